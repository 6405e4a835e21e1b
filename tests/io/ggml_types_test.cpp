// Blocks of every type that is read, held against golden values of the gguf package.
#include "oscar/io/ggml_types.h"

#include <gtest/gtest.h>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

namespace {

using namespace oscar;

std::vector<std::byte> from_hex(const std::string& text) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

TEST(GgmlTypes, BlocksOfEveryTypeHaveTheGoldenValues) {
  std::ifstream goldens(std::string(OSCAR_SOURCE_DIR) + "/tests/golden/ggml_blocks.txt");
  std::set<std::string> seen;
  std::string head, hex, patterns;
  while (std::getline(goldens, head) && std::getline(goldens, hex) &&
         std::getline(goldens, patterns)) {
    SCOPED_TRACE(head);
    const GgmlType* type = find_ggml_type(static_cast<uint32_t>(std::stoul(head)));
    ASSERT_NE(type, nullptr);
    ASSERT_NE(type->decode, nullptr);
    EXPECT_EQ(head.substr(head.find(' ') + 1), type->name);
    const std::vector<std::byte> blocks = from_hex(hex);
    ASSERT_EQ(blocks.size() % type->block_bytes, 0u);
    std::vector<float> values(blocks.size() / type->block_bytes *
                              static_cast<size_t>(type->block_values));
    decode_ggml(*type, blocks.data(), static_cast<int64_t>(values.size()), values.data());
    std::istringstream words(patterns);
    std::string word;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(words >> word);
      uint32_t bits;
      std::memcpy(&bits, &values[i], sizeof bits);
      ASSERT_EQ(bits, std::stoul(word, nullptr, 16)) << "value " << i;
    }
    EXPECT_FALSE(words >> word);
    seen.insert(type->name);
  }
  std::istringstream names(decodable_ggml_types());
  for (std::string name; std::getline(names >> std::ws, name, ',');)
    EXPECT_EQ(seen.erase(name), 1u);
  EXPECT_TRUE(seen.empty());
}

TEST(GgmlTypes, NumbersThatGgmlGaveUpAreUnknown) {
  for (const uint32_t id : {4u, 5u, 31u, 36u, 1000u, UINT32_MAX}) {
    EXPECT_EQ(find_ggml_type(id), nullptr) << id;
  }
  EXPECT_EQ(describe_ggml_type(4), "Q4_2, which ggml has given up");
  EXPECT_EQ(describe_ggml_type(1000), "number 1000, newer than this program");
  EXPECT_EQ(describe_ggml_type(41), "Q1_0");
}

}  // namespace
