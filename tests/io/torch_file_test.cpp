// Files of torch.save: written, read back, and refused where they hold more than tensors. What
// torch itself makes of them is in tests/cli/test_export.py.
#include "oscar/io/torch_file.h"

#include <gtest/gtest.h>
#include <functional>
#include <random>
#include <tuple>

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace oscar {
namespace {

using oscar_test::TemporaryFolder;
using oscar_test::write_file;

const FloatTensor kMatrix = {{2, 3}, {1, 2, 3, 4, 5, 6}};

// A pickle between the protocol and the end.
std::string pickle(const std::string& body) { return "\x80\x02" + body + "."; }

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

struct PickledFile {
  TemporaryFolder folder;
  std::filesystem::path path = folder.path() / "x.pt";

  explicit PickledFile(const std::string& data, const std::string& storage = "")
      : PickledFile(std::vector<ZipMember>{{"x/data.pkl", data}, {"x/data/0", storage}}) {}
  explicit PickledFile(const std::vector<ZipMember>& members) { write_zip(path, members); }
  std::string said() const {
    return refusal([this] { TorchFile::open(path); });
  }
};

// A tensor of 6 floats with this storage type, offset, sizes and strides.
std::string tensor_text(const std::string& type, int64_t offset, const std::vector<int64_t>& sizes,
                        const std::vector<int64_t>& strides) {
  PickleWriter pickle;
  pickle.global("torch._utils", "_rebuild_tensor_v2");
  pickle.mark();
  pickle.mark();
  pickle.text("storage");
  pickle.global("torch", type);
  pickle.text("0");
  pickle.text("cpu");
  pickle.integer(6);
  pickle.tuple();
  pickle.persistent();
  pickle.integer(offset);
  for (const auto& numbers : {sizes, strides}) {
    pickle.mark();
    for (const int64_t number : numbers) pickle.integer(number);
    pickle.tuple();
  }
  pickle.tuple();
  pickle.call();
  return pickle.finish();
}

std::string floats(std::initializer_list<float> values) {
  return {reinterpret_cast<const char*>(std::data(values)), values.size() * sizeof(float)};
}

TEST(TorchFile, GivesBackWhatWasWritten) {
  TemporaryFolder folder;
  const auto path = folder.path() / "a.pt";
  TorchDict inner = {{int64_t{7}, {kMatrix}}, {int64_t{1} << 40, {std::monostate{}}}};
  write_torch_file(path, {TorchDict{{"name", {std::string("text")}},
                                    {"number", {int64_t{-5000000000}}},
                                    {"layers", {inner}}}});
  const TorchFile file = TorchFile::open(path);
  EXPECT_EQ(file.root().find("name")->text, "text");
  EXPECT_EQ(file.root().find("number")->integer, -5000000000);
  const PickleNode& layers = *file.root().find("layers");
  EXPECT_EQ(file.tensor(*layers.find(7), "7", 6), kMatrix);
  EXPECT_EQ(layers.find(int64_t{1} << 40)->kind, PickleNode::Kind::kNone);
  EXPECT_EQ(layers.find(8), nullptr);
  EXPECT_NE(refusal([&] { file.tensor(*layers.find(7), "layer 7", 5); }).find("layer 7"),
            std::string::npos);
}

TEST(TorchFile, ReadsViewsOfAStorage) {
  const PickledFile turned(tensor_text("FloatStorage", 1, {2, 2}, {1, 3}),
                           floats({0, 1, 2, 3, 4, 5}));
  const TorchFile file = TorchFile::open(turned.path);
  EXPECT_EQ(file.tensor(file.root(), "x", 4), (FloatTensor{{2, 2}, {1, 4, 2, 5}}));
}

TEST(TorchFile, RefusesViewsThatLeaveTheirStorage) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  const std::vector<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>> views = {
      {1, {6}, {1}},           {0, {2, 3}, {4, 1}}, {kHuge, {1}, {1}},
      {0, {kHuge, 4}, {0, 0}}, {0, {2}, {kHuge}},   {0, {3, 3}, {kHuge, kHuge}},
      {-1, {1}, {1}},          {0, {2}, {-1}},      {0, {-2}, {1}},
      {0, {2, 3}, {3}},        {0, {kHuge}, {1}}};
  for (const auto& [offset, sizes, strides] : views) {
    const PickledFile written(tensor_text("FloatStorage", offset, sizes, strides),
                              floats({0, 1, 2, 3, 4, 5}));
    const TorchFile file = TorchFile::open(written.path);
    EXPECT_THROW(file.tensor(file.root(), "x", 1 << 20), Error);
  }
  // A view that repeats one number is data, but never more of it than was asked for.
  const PickledFile repeated(tensor_text("FloatStorage", 0, {1 << 30}, {0}), floats({1}));
  const TorchFile file = TorchFile::open(repeated.path);
  EXPECT_THROW(file.tensor(file.root(), "x", 1 << 20), Error);
}

TEST(TorchFile, RefusesForeignGlobalsByName) {
  for (const auto& [module, name] : {std::pair{"os", "system"},
                                     {"builtins", "eval"},
                                     {"torch", "load"},
                                     {"torch._utils", "_rebuild_parameter"},
                                     {"numpy.core.multiarray", "_reconstruct"},
                                     {"collections", "OrderedDict\x1b[2J"}}) {
    const PickledFile file(pickle(std::string("c") + module + "\n" + name + "\n(X\x02" +
                                  std::string(3, '\0') + "lstR"));
    const std::string said = file.said();
    EXPECT_NE(said.find("foreign name"), std::string::npos) << said;
    EXPECT_NE(said.find(module), std::string::npos) << said;
    EXPECT_EQ(said.find('\x1b'), std::string::npos);
  }
  // Each of these would run something in Python's own machine.
  for (const std::string body :
       {"(ios\nsystem\n", "(cos\nsystem\no", "\x8c\x02os\x8c\x06system\x93", "}}b", "))\x81",
        "Pname\n", "\x82\x01"}) {
    EXPECT_NE(PickledFile(pickle(body)).said(), "") << body;
  }
  EXPECT_NE(PickledFile(tensor_text("LongStorage", 0, {1}, {1})).said(), "");
}

TEST(TorchFile, RefusesMalformedPickles) {
  for (const std::string body : {"",           "t",
                                 "\x85",       "}u",
                                 "(K\x01u",    "}(K\x01u",
                                 "K\x01K\x02", "(",
                                 "N(",         "h\x01",
                                 "q\x00",      "X\xff\xff\xff\xff",
                                 "K",          "\x8a\x09xxxxxxxxx",
                                 "a",          "]K\x01K\x02s",
                                 "R",          ")R",
                                 "))R",        "NQ",
                                 "(K\x01\x85", "corder",
                                 "\x80\x04N"}) {
    EXPECT_NE(PickledFile(pickle(body)).said(), "") << body;
  }
  EXPECT_NE(PickledFile(std::string("\x80\x02N")).said(), "");  // no end
  EXPECT_NE(PickledFile(pickle("N") + "N").said(), "");         // more behind it
  EXPECT_NE(PickledFile(std::string(kLongestPickle + 1, '(')).said(), "");
}

// Deep or endless structures are held flat: reading and freeing them takes no stack.
TEST(TorchFile, TakesNoStackForDepthAndNoTimeForCycles) {
  std::string deep;
  for (int i = 0; i < 1000000; ++i) deep += ")\x85";
  EXPECT_NE(PickledFile(pickle(deep)).said(), "");  // many values
  std::string nested = ")";
  for (int i = 0; i < 1000000; ++i) nested += '\x85';
  const PickledFile tower(pickle(nested));
  EXPECT_FALSE(TorchFile::is_tensor(TorchFile::open(tower.path).root()));
  const PickledFile cycle(pickle(std::string("}q\0K\x01h\0s", 8)));
  const TorchFile file = TorchFile::open(cycle.path);
  EXPECT_EQ(file.root().find(1), &file.root());
}

TEST(TorchFile, RefusesOtherArchives) {
  EXPECT_NE(PickledFile(std::vector<ZipMember>{{"x/data.txt", "N"}}).said(), "");
  const PickledFile big(
      std::vector<ZipMember>{{"x/data.pkl", pickle("N")}, {"x/byteorder", "big"}});
  EXPECT_NE(big.said().find("byte order"), std::string::npos) << big.said();
  TemporaryFolder folder;
  write_file(folder.path() / "legacy.pt", std::string("\x80\x02\x8a\x0al\xfc", 6));
  EXPECT_THROW(TorchFile::open(folder.path() / "legacy.pt"), Error);
}

TEST(TorchFile, NoChangeOfAByteIsMoreThanARefusal) {
  TemporaryFolder folder;
  const auto path = folder.path() / "a.pt";
  write_torch_file(path, {TorchDict{{"layers", {TorchDict{{int64_t{0}, {kMatrix}}}}}}});
  const std::string good = read_text_file(path);
  std::mt19937_64 random(5);
  size_t refused = 0;
  for (size_t i = 0; i < 1000; ++i) {
    std::string bytes = good;
    for (uint64_t n = random() % 3 + 1; n-- > 0;) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    write_file(path, bytes);
    try {
      const TorchFile file = TorchFile::open(path);
      const PickleNode* layers = file.root().find("layers");
      if (layers && layers->find(int64_t{0})) file.tensor(*layers->find(int64_t{0}), "0", 100);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 700u);
}

}  // namespace
}  // namespace oscar
