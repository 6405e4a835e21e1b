#include "oscar/io/gguf.h"

#include <gtest/gtest.h>
#include <random>

#include "io/gguf_bytes.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"

// Copies of GGUF files: what is kept, replaced and added, and what cannot be.

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr uint32_t kF16 = 1;

std::string bytes_of_tensor(const GgufFile& file, const std::string& name) {
  const GgufTensor& tensor = file.tensors().at(name);
  return {reinterpret_cast<const char*>(tensor.data), tensor.bytes};
}

std::optional<std::vector<std::byte>> keep(const std::string&, const GgufTensor&) {
  return std::nullopt;
}

struct GgufCopy : testing::Test {
  TemporaryFolder folder;
  std::filesystem::path from = folder.path() / "a.gguf", to = folder.path() / "b.gguf";

  // Keys of several kinds, tensors of odd sizes whose order is not that of their names.
  void write_model(uint32_t alignment) {
    GgufBuilder builder;
    builder.alignment = alignment;
    builder.integer("general.alignment", alignment).text("general.architecture", "qwen3");
    builder.texts("tokenizer.ggml.tokens", {"a", "", "ccc"}).flag("x.flag", true);
    builder.f32("z", {3}, {1, 2, 3}).tensor("a", {2, 2}, kF16, "12345678").f32("m", {1}, {7});
    write_file(from, builder.bytes());
  }
};

TEST_F(GgufCopy, WithoutChangesHasEqualBytes) {
  for (const uint32_t alignment : {8U, 32U, 256U}) {
    write_model(alignment);
    copy_gguf(GgufFile(from), to, keep, {});
    const std::string before = read_text_file(from), after = read_text_file(to);
    // The last tensor may be followed by zeros up to the alignment.
    ASSERT_GE(after.size(), before.size());
    EXPECT_LT(after.size() - before.size(), alignment);
    EXPECT_EQ(after.substr(0, before.size()), before) << alignment;
    EXPECT_EQ(after.find_first_not_of('\0', before.size()), std::string::npos);
  }
}

TEST_F(GgufCopy, ReplacesAndAddsTensorsAndKeepsTheRest) {
  write_model(64);
  const auto replace = [](const std::string& name, const GgufTensor& tensor) {
    EXPECT_EQ(tensor.bytes, name == "z" ? 12U : name == "a" ? 8U : 4U);
    return name == "a" ? std::optional(std::vector<std::byte>(8, std::byte{0x3C})) : std::nullopt;
  };
  copy_gguf(GgufFile(from), to, replace,
            {{"b.rot", {{2, 3}, {1, 2, 3, 4, 5, 6}}}, {"k", {{1}, {9}}}});
  const GgufFile old(from), file(to);
  EXPECT_EQ(file.metadata(), old.metadata());
  EXPECT_EQ(file.alignment(), 64u);
  EXPECT_EQ(file.keys(), old.keys());
  ASSERT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(bytes_of_tensor(file, "a"), "<<<<<<<<");
  EXPECT_EQ(bytes_of_tensor(file, "z"), bytes_of_tensor(old, "z"));
  EXPECT_EQ(bytes_of_tensor(file, "m"), bytes_of_tensor(old, "m"));
  EXPECT_EQ(file.tensors().at("b.rot").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(bytes_of_tensor(file, "b.rot").substr(4, 4), bytes_of(2.0F));
  EXPECT_EQ(bytes_of_tensor(file, "k"), bytes_of(9.0F));
}

TEST_F(GgufCopy, RefusesOtherSizesAndNamesThatAreTaken) {
  write_model(32);
  const GgufFile file(from);
  const auto cut = [](const std::string&, const GgufTensor& tensor) {
    return std::optional(std::vector<std::byte>(tensor.bytes - 1));
  };
  EXPECT_THROW(copy_gguf(file, to, cut, {}), Error);
  EXPECT_THROW(copy_gguf(file, to, keep, {{"m", {{1}, {1}}}}), Error);
  EXPECT_THROW(copy_gguf(file, to, keep, {{std::string(64, 'n'), {{1}, {1}}}}), Error);
  EXPECT_THROW(copy_gguf(file, folder.path() / "none" / "b.gguf", keep, {}), Error);
}

}  // namespace

// GGUF files are read where they are right and refused, by name, where anything is off.

namespace {

using namespace oscar;
using namespace oscar_test;
using enum GgufType;

class Gguf : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& bytes) const {
    const auto path = folder_.path() / "model.gguf";
    write_file(path, bytes);
    return path;
  }
  // What the error says; empty when the file was opened.
  std::string refusal(const std::string& bytes) const {
    try {
      const GgufFile file(write(bytes));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  void expect_refused(const char* why, const std::string& bytes, const char* message) const {
    SCOPED_TRACE(why);
    const std::string text = refusal(bytes);
    EXPECT_NE(text.find(message), std::string::npos) << text;
    EXPECT_NE(text.find("model.gguf"), std::string::npos) << text;
  }

  TemporaryFolder folder_;
};

GgufBuilder every_type() {
  GgufBuilder file;
  file.add("u8", kUint8, bytes_of(uint8_t{200})).add("i8", kInt8, bytes_of(int8_t{-3}));
  file.add("u16", kUint16, bytes_of(uint16_t{60000})).add("i16", kInt16, bytes_of(int16_t{-300}));
  file.integer("u32", 4000000000u).add("i32", kInt32, bytes_of(int32_t{-70000}));
  file.add("u64", kUint64, bytes_of(uint64_t{1} << 40)).add("i64", kInt64, bytes_of(int64_t{-9}));
  file.number("f32", 1e-5f).add("f64", kFloat64, bytes_of(0.1)).flag("bool", true);
  file.text("text", "a b").texts("texts", {"x", "", "yz"});
  file.numbers<int32_t>("integers", kInt32, {1, -2, 3}).numbers<float>("floats", kFloat32, {.5f});
  file.add("nested", kArray,
           gguf_array(kArray, 2, gguf_array(kUint8, 1, "a") + gguf_array(kString, 0, "")));
  file.f32("a", {3, 2}, {1, 2, 3, 4, 5, 6}).tensor("b", {32}, 8, std::string(34, '\1'));
  return file;
}

TEST_F(Gguf, GivesBackWhatWasWritten) {
  for (const uint32_t version : {2u, 3u}) {
    GgufBuilder builder = every_type();
    builder.version = version;
    const GgufFile file(write(builder.bytes()));
    EXPECT_EQ(file.integer("u8"), 200);
    EXPECT_EQ(file.integer("i8"), -3);
    EXPECT_EQ(file.integer("u16"), 60000);
    EXPECT_EQ(file.integer("i16"), -300);
    EXPECT_EQ(file.integer("u32"), 4000000000);
    EXPECT_EQ(file.integer("i32"), -70000);
    EXPECT_EQ(file.integer("u64"), int64_t{1} << 40);
    EXPECT_EQ(file.integer("i64"), -9);
    EXPECT_EQ(file.number("f32"), 1e-5);  // not 9.99999974e-06
    EXPECT_EQ(file.number("f64"), 0.1);
    EXPECT_EQ(file.flag("bool"), true);
    EXPECT_EQ(file.scalar("bool"), 1.0);
    EXPECT_EQ(file.scalar("i8"), -3.0);
    EXPECT_EQ(file.text("text"), "a b");
    EXPECT_EQ(file.texts("texts"), (std::vector<std::string_view>{"x", "", "yz"}));
    EXPECT_EQ(file.integers("integers"), (std::vector<int64_t>{1, -2, 3}));
    EXPECT_EQ(file.floats("floats"), std::vector<float>{.5f});
    EXPECT_EQ(file.integer("none"), std::nullopt);
    EXPECT_EQ(file.keys().size(), 16u);
    const GgufTensor& a = file.tensors().at("a");
    EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 3}));
    float values[6];
    decode_ggml(*a.type, a.data, 6, values);
    EXPECT_EQ(values[5], 6.0f);
    EXPECT_EQ(file.tensors().at("b").bytes, 34u);
    EXPECT_STREQ(file.tensors().at("b").type->name, "Q8_0");
  }
}

TEST_F(Gguf, RefusesAValueOfAnotherTypeByItsKey) {
  const GgufFile file(write(every_type().bytes()));
  const auto message = [](auto&& read) {
    try {
      read();
    } catch (const Error& error) {
      return error.info().where + " " + error.info().found;
    }
    return std::string();
  };
  EXPECT_TRUE(message([&] { (void)file.integer("text"); }).ends_with("text string"));
  EXPECT_TRUE(message([&] { (void)file.text("u8"); }).ends_with("u8 uint8"));
  EXPECT_TRUE(message([&] { (void)file.number("u8"); }).ends_with("u8 uint8"));
  EXPECT_TRUE(message([&] { (void)file.flag("u8"); }).ends_with("u8 uint8"));
  EXPECT_TRUE(message([&] { (void)file.texts("integers"); }).ends_with("integers array"));
  EXPECT_TRUE(message([&] { (void)file.integers("texts"); }).ends_with("texts array"));
  EXPECT_TRUE(message([&] { (void)file.integers("floats"); }).ends_with("floats array"));
  EXPECT_TRUE(message([&] { (void)file.floats("integers"); }).ends_with("integers array"));
}

TEST_F(Gguf, RefusesOtherFilesAndVersions) {
  expect_refused("safetensors", std::string(64, 'x'), "not a GGUF file");
  expect_refused("three bytes", "GGU", "not a GGUF file");
  for (const auto& [version, found] : {std::pair{1u, "version 1"},
                                       {4u, "version 4"},
                                       {0u, "version 0"},
                                       {3u << 24, "big-endian"}}) {
    GgufBuilder file = every_type();
    file.version = version;
    expect_refused(found, file.bytes(), found);
  }
}

TEST_F(Gguf, RefusesImpossibleCountsBeforeReadingFurther) {
  for (const int64_t count : {int64_t{1} << 17, INT64_MAX, int64_t{-1} * 40}) {
    GgufBuilder file = every_type();
    file.extra_tensors = count;
    expect_refused("tensors", file.bytes(), "numbers of keys and tensors are impossible");
    file.extra_tensors = 0;
    file.extra_values = count;
    expect_refused("keys", file.bytes(), "numbers of keys and tensors are impossible");
  }
  GgufBuilder file = every_type();
  file.extra_tensors = 1000;
  EXPECT_NE(refusal(file.bytes()), "");
}

TEST_F(Gguf, RefusesMetadataThatDoesNotFitTheFile) {
  const auto with = [](const std::string& value) {
    GgufBuilder file;
    file.values.push_back(value);
    return file.bytes();
  };
  const auto typed = [&](GgufType type, const std::string& value) {
    return with(gguf_text("k") + gguf_type(type) + value);
  };
  const uint64_t huge = uint64_t{1} << 63;
  expect_refused("a key of 2^63 bytes", with(bytes_of(huge)), "empty or too long");
  expect_refused("a key without a name", with(gguf_text("")), "empty or too long");
  expect_refused("a key of 65,536 bytes", with(gguf_text(std::string(65536, 'k'))), "too long");
  expect_refused("a key beyond the end", with(bytes_of(uint64_t{100})), "ends inside its header");
  expect_refused("type 13", typed(static_cast<GgufType>(13), ""), "unknown type");
  expect_refused("a string of 2^63 bytes", typed(kString, bytes_of(huge)), "ends inside");
  expect_refused("a string of 2^64 - 1 bytes", typed(kString, bytes_of(UINT64_MAX)), "ends inside");
  expect_refused("half an integer", typed(kUint32, "ab"), "longer than the file");
  expect_refused("neither true nor false", typed(kBool, "\2"), "neither 0 nor 1");
  for (const GgufType type : {kUint8, kUint64, kString, kArray, kBool}) {
    for (const uint64_t count : {huge, UINT64_MAX, uint64_t{1} << 61, uint64_t{50}}) {
      expect_refused("an array", typed(kArray, gguf_array(type, count, "abc")),
                     "longer than the file");
    }
  }
  expect_refused("an array of type 99", typed(kArray, gguf_array(static_cast<GgufType>(99), 1, "")),
                 "unknown type");
  std::string nested = gguf_array(kUint8, 0, "");
  for (int depth = 0; depth < 2; ++depth) nested = gguf_array(kArray, 1, nested);
  expect_refused("arrays three deep", typed(kArray, nested), "nested too deeply");
  std::string deep;
  for (int depth = 0; depth < 100000; ++depth) deep += gguf_array(kArray, 1, "");
  expect_refused("arrays 100,000 deep", typed(kArray, deep), "nested too deeply");
  GgufBuilder twice;
  expect_refused("a key twice", twice.integer("k", 1).integer("k", 2).bytes(), "occurs twice");
}

TEST_F(Gguf, RefusesTensorsThatAreNotWhatTheyClaim) {
  const uint64_t huge = uint64_t{1} << 62;
  struct Case {
    const char* why;
    GgufTestTensor tensor;
    const char* message;
  };
  const Case cases[] = {
      {"no dimension", {"a", {}, 0, 0}, "number of dimensions"},
      {"five dimensions", {"a", {1, 1, 1, 1, 2}, 0, 0}, "number of dimensions"},
      {"a size of 0", {"a", {0}, 0, 0}, "shape of a tensor is impossible"},
      {"a size of 2^64 - 1", {"a", {UINT64_MAX}, 0, 0}, "shape of a tensor is impossible"},
      {"a product of 2^64", {"a", {huge, 4}, 0, 0}, "shape of a tensor is impossible"},
      {"a product that wraps to 2", {"a", {huge + 1, 2, 2, 2}, 0, 0}, "impossible"},
      {"bytes of 2^64", {"a", {huge}, 0, 0}, "larger than its file"},
      {"more than the file", {"a", {1000}, 0, 0}, "larger than its file"},
      {"type 4, which is gone", {"a", {2}, 4, 0}, "Q4_2, which ggml has given up"},
      {"type 2^31", {"a", {2}, 1u << 31, 0}, "newer than this program"},
      {"half a block", {"a", {16}, 8, 0}, "not whole blocks"},
      {"a K type of 32", {"a", {32}, 12, 0}, "not whole blocks"},
      {"data not aligned", {"a", {2}, 0, 8}, "not aligned"},
      {"a gap in front", {"a", {2}, 0, 32}, "belong to no tensor"},
      {"an offset of 2^63", {"a", {2}, 0, uint64_t{1} << 63}, "belong to no tensor"},
      {"a name of 65 bytes", {std::string(65, 'a'), {2}, 0, 0}, "too long"},
      {"no name", {"", {2}, 0, 0}, "empty"},
  };
  for (const Case& c : cases) {
    GgufBuilder file;
    file.tensors.push_back(c.tensor);
    file.data = std::string(8, 'x');
    expect_refused(c.why, file.bytes(), c.message);
  }
  GgufBuilder good;
  good.f32("a", {2}, {1, 2}).f32("b", {2}, {3, 4});
  EXPECT_EQ(refusal(good.bytes()), "");
  GgufBuilder bad = good;
  bad.tensors[1].name = "a";
  expect_refused("a name twice", bad.bytes(), "occurs twice");
  bad = good;
  bad.tensors[1].offset = 0;
  expect_refused("the same bytes twice", bad.bytes(), "overlap");
  bad = good;
  bad.tensors[0].dimensions = {10};
  expect_refused("an overlap", bad.bytes(), "overlap");
  bad = good;
  bad.tensors[1].offset = 64;
  expect_refused("a gap", bad.bytes(), "belong to no tensor");
  bad = good;
  bad.data += std::string(32, 'x');
  expect_refused("a rest", bad.bytes(), "end of the file");
  bad = good;
  bad.data.resize(bad.data.size() - 1);
  expect_refused("one byte less", bad.bytes(), "outside the file");
}

TEST_F(Gguf, TakesTheAlignmentOfTheFileAndRefusesImpossibleOnes) {
  GgufBuilder file;
  file.alignment = 64;
  file.integer("general.alignment", 64).f32("a", {2}, {1, 2}).f32("b", {1}, {3});
  const GgufFile opened(write(file.bytes()));
  float value;
  decode_ggml(*opened.tensors().at("b").type, opened.tensors().at("b").data, 1, &value);
  EXPECT_EQ(value, 3.0f);
  for (const uint32_t alignment : {0u, 4u, 48u, 1u << 31}) {
    GgufBuilder bad;
    bad.integer("general.alignment", alignment);
    expect_refused("alignment", bad.bytes(), "alignment is impossible");
  }
  GgufBuilder text;
  text.text("general.alignment", "32");
  expect_refused("alignment", text.bytes(), "another type");
}

// Whatever was accepted can be read to its end without a wild read (the sanitizers look on).
void read_everything(const GgufFile& file) {
  for (const std::string& key : file.keys()) {
    const auto ignore = [&](auto&& read) {
      try {
        (void)read();
      } catch (const Error&) {  // of another type
      }
    };
    ignore([&] { return file.text(key); });
    ignore([&] { return file.scalar(key); });
    ignore([&] { return file.texts(key); });
    ignore([&] { return file.integers(key); });
    ignore([&] { return file.floats(key); });
    (void)file.raw(key);
  }
  for (const auto& [name, tensor] : file.tensors()) {
    if (tensor.type->decode == nullptr) continue;
    std::vector<float> values(tensor.bytes / tensor.type->block_bytes *
                              static_cast<size_t>(tensor.type->block_values));
    decode_ggml(*tensor.type, tensor.data, static_cast<int64_t>(values.size()), values.data());
  }
}

TEST_F(Gguf, SurvivesEveryCutAndEveryOneByteChange) {
  const std::string whole = every_type().bytes();
  const auto survive = [&](const std::string& bytes) {
    try {
      read_everything(GgufFile(write(bytes)));
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  for (size_t kept = 1; kept < whole.size(); ++kept) {
    EXPECT_FALSE(survive(whole.substr(0, kept))) << kept << " bytes were accepted";
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const char byte : {'\0', '\1', '\x7f', '\xff'}) {
      std::string changed = whole;
      changed[i] = byte;
      survive(changed);
    }
  }
}

TEST_F(Gguf, SurvivesRandomChanges) {
  const std::string whole = every_type().bytes();
  std::mt19937_64 random(7);
  for (int round = 0; round < 1500; ++round) {
    std::string changed = whole;
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t place = random() % changed.size();
      switch (random() % 4) {
        case 0:
          changed[place] = static_cast<char>(random());
          break;
        case 1:
          changed.erase(place, 1 + random() % 16);
          if (changed.empty()) changed = whole;
          break;
        case 2:
          changed.insert(place, changed.substr(place, random() % 32));
          break;
        default: {  // a count, a length or an offset
          const uint64_t value = random() >> (random() % 64);
          std::memcpy(changed.data() + place, &value, std::min<size_t>(8, changed.size() - place));
        }
      }
    }
    try {
      read_everything(GgufFile(write(changed)));
    } catch (const Error&) {  // refused: good
    }
  }
}

}  // namespace
