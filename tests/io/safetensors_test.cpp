#include "oscar/io/safetensors.h"

#include <gtest/gtest.h>
#include <cstring>

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"

// A safetensors file copied with one of its tensors replaced.

namespace {

using namespace oscar;
using namespace oscar_test;

// Two tensors in an order that is not that of their names, with metadata and padding in the header.
std::string two_tensors() {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}   )";
  return safetensors_bytes(header, "bbbbBBBBaaAAaa");
}

TEST(SafetensorsCopy, KeepsTheHeaderAndEveryTensorThatIsNotReplaced) {
  const TemporaryFolder folder;
  const auto from = folder.path() / "from.safetensors", to = folder.path() / "to.safetensors";
  write_file(from, two_tensors());
  copy_safetensors(from, to, [](const TensorEntry& tensor) {
    std::optional<std::vector<std::byte>> bytes;
    if (tensor.name == "a") bytes.emplace(tensor.bytes, std::byte{'x'});
    return bytes;
  });
  std::string expected = two_tensors();
  expected.replace(expected.size() - 6, 6, "xxxxxx");
  EXPECT_EQ(read_text_file(to), expected);
}

TEST(SafetensorsCopy, RefusesAReplacementOfAnotherSizeAndATruncatedFile) {
  const TemporaryFolder folder;
  const auto from = folder.path() / "from.safetensors", to = folder.path() / "to.safetensors";
  const auto shorter = [](const TensorEntry&) { return std::optional(std::vector<std::byte>(1)); };
  write_file(from, two_tensors());
  EXPECT_THROW(copy_safetensors(from, to, shorter), Error);
  write_file(from, two_tensors().substr(0, two_tensors().size() - 1));
  EXPECT_THROW(copy_safetensors(from, to, [](const TensorEntry&) { return std::nullopt; }), Error);
}

TEST(SafetensorsCopy, SaysWhenItCannotWrite) {
  const TemporaryFolder folder;
  write_file(folder.path() / "from.safetensors", two_tensors());
  EXPECT_THROW(
      copy_safetensors(folder.path() / "from.safetensors", folder.path() / "no/such/folder",
                       [](const TensorEntry&) { return std::nullopt; }),
      Error);
}

}  // namespace

// Shards are read where they are right and refused, by name, where anything is off.

namespace {

using namespace oscar;
using namespace oscar_test;

std::string message_of(const std::filesystem::path& folder) {
  try {
    const SafetensorsWeights opened(folder);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const std::map<std::string, TestTensor> kTwo = {{"a", {{2, 3}, {1, 2, 3, 4, 5, 6}}},
                                                {"b", {{2}, {7, 8}}}};

TEST(Safetensors, GivesBackWhatWasWritten) {
  TemporaryFolder folder;
  write_file(folder.path() / "model.safetensors", safetensors_bytes(kTwo));
  const SafetensorsWeights store(folder.path());
  EXPECT_EQ(store.names(), (std::vector<std::string>{"a", "b"}));
  const TensorView b = store.get("b", {2});
  float values[2];
  std::memcpy(values, b.data, sizeof values);
  EXPECT_EQ(values[0], 7.0f);
  EXPECT_EQ(values[1], 8.0f);
  store.stored_bytes("b").file->release(b.data, b.bytes);
  std::memcpy(values, b.data, sizeof values);  // released pages come back from the file
  EXPECT_EQ(values[1], 8.0f);
  store.stored_bytes("b").read(sizeof(float), sizeof(float), reinterpret_cast<std::byte*>(values));
  EXPECT_EQ(values[0], 8.0f);
}

TEST(Safetensors, SaysWhichFileWasCutShortBeforeItWasRead) {
  TemporaryFolder folder;
  const auto path = folder.path() / "model.safetensors";
  write_file(path, safetensors_bytes(kTwo));
  const SafetensorsWeights store(folder.path());
  const StoredBytes b = store.stored_bytes("b");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  std::byte out[8];
  b.read(0, 4, out);
  try {
    b.read(0, 8, out);
    FAIL() << "bytes that are not there were read";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cut short"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos);
  }
}

TEST(Safetensors, AcceptsEmptyTensorsScalarsAndMetadata) {
  TemporaryFolder folder;
  write_file(folder.path() / "model.safetensors",
             safetensors_bytes(R"({"__metadata__":{"format":"pt"},
      "empty":{"dtype":"F16","shape":[0,5],"data_offsets":[0,0]},
      "scalar":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}})",
                               "xy"));
  const SafetensorsWeights store(folder.path());
  EXPECT_EQ(store.get("empty", {0, 5}).bytes, 0u);
  EXPECT_EQ(store.get("scalar", {}).bytes, 2u);
}

TEST(Safetensors, NamesTensorAndShapesWhenTheShapeIsWrong) {
  TemporaryFolder folder;
  write_file(folder.path() / "model.safetensors", safetensors_bytes(kTwo));
  const SafetensorsWeights store(folder.path());
  try {
    store.get("a", {3, 2});
    FAIL() << "a wrong shape was accepted";
  } catch (const Error& error) {
    EXPECT_NE(error.info().where.find(": a"), std::string::npos);
    EXPECT_EQ(error.info().expected, "[3, 2]");
    EXPECT_EQ(error.info().found, "[2, 3]");
  }
  EXPECT_THROW(store.get("c", {1}), Error);
}

TEST(Safetensors, ListsOtherDtypesAndRefusesToLoadThem) {
  TemporaryFolder folder;
  write_file(
      folder.path() / "model.safetensors",
      safetensors_bytes(R"({"q":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}})", "abcd"));
  const SafetensorsWeights store(folder.path());
  EXPECT_TRUE(store.contains("q"));
  EXPECT_THROW(store.get("q", {4}), Error);
}

TEST(Safetensors, RefusesHostileHeaders) {
  const auto tensor = [](const std::string& name, const std::string& shape,
                         const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
  };
  const std::string good = tensor("a", "[2]", "[0,8]");
  struct Case {
    const char* why;
    std::string header;
    size_t data_bytes;
    const char* message;
  };
  const Case cases[] = {
      {"no JSON", "{", 0, "no valid JSON"},
      {"no object", "[]", 0, "not a JSON object"},
      {"a shape nested 100,000 deep",
       "{" + tensor("a", std::string(100000, '[') + std::string(100000, ']'), "[0,8]") + "}", 8,
       "nested too deeply"},
      {"invalid UTF-8", "{\"\xff\":1}", 0, "no valid JSON"},
      {"entry is no object", R"({"a":1})", 0, "not described"},
      {"no shape", R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8, "not described"},
      {"three offsets", "{" + tensor("a", "[2]", "[0,8,8]") + "}", 8, "not described"},
      {"name twice", "{" + good + "," + good + "}", 8, "occurs twice"},
      {"negative size", "{" + tensor("a", "[-2]", "[0,8]") + "}", 8, "non-negative"},
      {"fractional size", "{" + tensor("a", "[2.0]", "[0,8]") + "}", 8, "non-negative"},
      {"size over 2^63", "{" + tensor("a", "[18446744073709551615]", "[0,8]") + "}", 8,
       "non-negative"},
      {"product overflows", "{" + tensor("a", "[4294967296,4294967296,4]", "[0,8]") + "}", 8,
       "larger than any file"},
      {"product wraps to the right size",
       "{" + tensor("a", "[4611686018427387905,2]", "[0,8]") + "}", 8, "larger than any file"},
      {"size and shape disagree", "{" + tensor("a", "[3]", "[0,8]") + "}", 8, "disagrees"},
      {"end before begin", "{" + tensor("a", "[2]", "[8,0]") + "}", 8, "outside the file"},
      {"negative offset", "{" + tensor("a", "[2]", "[-8,0]") + "}", 8, "non-negative"},
      {"offset past the end", "{" + tensor("a", "[2]", "[8,16]") + "}", 8, "outside the file"},
      {"offset of 2^64 - 1", "{" + tensor("a", "[2]", "[0,18446744073709551615]") + "}", 8,
       "outside the file"},
      {"overlap", "{" + good + "," + tensor("b", "[2]", "[4,12]") + "}", 12, "overlap"},
      {"same bytes twice", "{" + good + "," + tensor("b", "[2]", "[0,8]") + "}", 8, "overlap"},
      {"gap", "{" + good + "," + tensor("b", "[2]", "[12,20]") + "}", 20, "belong to no tensor"},
      {"gap at the start", "{" + tensor("a", "[2]", "[4,12]") + "}", 12, "belong to no tensor"},
      {"rest at the end", "{" + good + "}", 12, "end of the file"},
      {"seventeen dimensions",
       "{" + tensor("a", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]") + "}", 8, "16 sizes"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.why);
    TemporaryFolder folder;
    write_file(folder.path() / "model.safetensors",
               safetensors_bytes(c.header, std::string(c.data_bytes, 'x')));
    EXPECT_NE(message_of(folder.path()).find(c.message), std::string::npos)
        << message_of(folder.path());
  }
}

TEST(Safetensors, RefusesFilesTooShortForTheirHeader) {
  TemporaryFolder folder;
  const auto path = folder.path() / "model.safetensors";
  const std::string whole = safetensors_bytes(kTwo);
  for (const size_t kept : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{20},
                            whole.size() - 32, whole.size() - 1}) {
    write_file(path, whole.substr(0, kept));
    EXPECT_NE(message_of(folder.path()), "") << kept << " bytes were accepted";
  }
  std::string huge = whole;
  huge[7] = '\x7f';  // a header length of 2^62
  write_file(path, huge);
  EXPECT_NE(message_of(folder.path()).find("longer than allowed"), std::string::npos);
}

TEST(Safetensors, SurvivesEveryOneByteChangeOfItsHeader) {
  TemporaryFolder folder;
  const std::string whole = safetensors_bytes(kTwo);
  for (size_t i = 0; i < whole.size() - 32; ++i) {
    for (const char byte : {'\0', '9', '"', '}', '\x80'}) {
      std::string changed = whole;
      changed[i] = byte;
      write_file(folder.path() / "model.safetensors", changed);
      message_of(folder.path());  // accepted or refused: never a crash or a wild read
    }
  }
}

void write_sharded(const std::filesystem::path& folder, const std::string& weight_map) {
  write_file(folder / "one.safetensors", safetensors_bytes({{"a", kTwo.at("a")}}));
  write_file(folder / "two.safetensors", safetensors_bytes({{"b", kTwo.at("b")}}));
  write_file(folder / "model.safetensors.index.json", R"({"weight_map":)" + weight_map + "}");
}

TEST(Safetensors, FingerprintDoesNotDependOnTheSharding) {
  TemporaryFolder whole, sharded, other;
  write_file(whole.path() / "model.safetensors", safetensors_bytes(kTwo));
  write_sharded(sharded.path(), R"({"a":"one.safetensors","b":"two.safetensors"})");
  auto changed = kTwo;
  changed.at("b").values[1] = 9;
  write_file(other.path() / "model.safetensors", safetensors_bytes(changed));
  for (const bool all_bytes : {false, true}) {
    const std::string print = SafetensorsWeights(whole.path()).fingerprint(all_bytes);
    EXPECT_EQ(print.size(), 64u);
    EXPECT_EQ(print, SafetensorsWeights(sharded.path()).fingerprint(all_bytes));
    EXPECT_NE(print, SafetensorsWeights(other.path()).fingerprint(all_bytes));
  }
}

TEST(Safetensors, OnlyTheFullFingerprintSeesTheMiddleOfALargeTensor) {
  TemporaryFolder one, two;
  std::map<std::string, TestTensor> tensors = {{"a", {{4096}, std::vector<float>(4096, 1.0f)}}};
  write_file(one.path() / "model.safetensors", safetensors_bytes(tensors));
  tensors["a"].values[2048] = 2.0f;
  write_file(two.path() / "model.safetensors", safetensors_bytes(tensors));
  const auto print = [](const TemporaryFolder& folder, bool all) {
    return SafetensorsWeights(folder.path()).fingerprint(all);
  };
  EXPECT_EQ(print(one, false), print(two, false));
  EXPECT_NE(print(one, true), print(two, true));
}

TEST(Safetensors, AShardWhoseNameIsTooLongForTheSystemIsMissing) {
  const TemporaryFolder folder;
  write_sharded(folder.path(), R"({"a":")" + std::string(300, 'x') + R"("})");
  EXPECT_NE(message_of(folder.path()).find("shard of the checkpoint is missing"), std::string::npos)
      << message_of(folder.path());
}

TEST(Safetensors, RefusesAnIndexThatDoesNotMatchItsShards) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"a":"one.safetensors","b":"three.safetensors"})", "shard of the checkpoint is missing"},
      {R"({"a":"one.safetensors","c":"two.safetensors"})", "does not hold"},
      {R"({"a":"../one.safetensors"})", "plain file name"},
      {R"({"a":"/etc/passwd"})", "plain file name"},
      {R"({"a":""})", "plain file name"},
      {R"({"a":7})", "plain file name"},
      {R"({})", "names no tensor"},
      {R"([])", "no weight_map"},
  };
  for (const auto& [map, message] : cases) {
    SCOPED_TRACE(map);
    TemporaryFolder folder;
    write_sharded(folder.path(), map);
    EXPECT_NE(message_of(folder.path()).find(message), std::string::npos)
        << message_of(folder.path());
  }
}

TEST(Safetensors, NamesTheFolderWhenThereAreNoWeights) {
  TemporaryFolder folder;
  EXPECT_NE(message_of(folder.path()).find("no weights were found"), std::string::npos);
}

TEST(Safetensors, RefusesATensorThatTheIndexDoesNotName) {
  TemporaryFolder folder;
  write_file(folder.path() / "one.safetensors", safetensors_bytes(kTwo));
  write_file(folder.path() / "model.safetensors.index.json",
             R"({"weight_map":{"a":"one.safetensors"}})");
  const std::string text = message_of(folder.path());
  EXPECT_NE(text.find("a tensor that the index does not name"), std::string::npos) << text;
  EXPECT_NE(text.find("one.safetensors: b"), std::string::npos) << text;
}

}  // namespace
