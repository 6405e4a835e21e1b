// Copies of GGUF files: what is kept, replaced and added, and what cannot be.
#include "oscar/io/gguf_copy.h"

#include <gtest/gtest.h>

#include "checkpoint/model_folder.h"
#include "io/gguf_bytes.h"
#include "oscar/base/error.h"

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
