// A safetensors file copied with one of its tensors replaced.
#include "oscar/io/safetensors_copy.h"

#include <gtest/gtest.h>

#include <cstring>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"

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
