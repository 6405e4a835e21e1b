// One row in the bytes of each stack: the golden row, and one that has ties.
#include "oscar/exchange/coded_row.h"

#include <gtest/gtest.h>

#include <cstring>

#include "oscar/base/error.h"
#include "oscar/exchange/manifest.h"
#include "oscar/stacks/stack.h"

namespace oscar {
namespace {

// Groups of the whole row, in the metadata dtype that the stack has first.
StackRun run_on(const char* name, int group) {
  const Stack& stack = find_stack(name);
  QuantizerSettings quantizer = default_codec(stack);
  quantizer.quant_group_size = group;
  StackRun run;
  run.format = quantizer.row_format();
  run.packing = stack.packing;
  return run;
}

std::vector<float> floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Scale 2 and minimum 0: 1, 3 and 5 lie half way between codes.
const std::vector<float> kGoldenRow = {-1.5f, .3f, .8f, 3.0f, -.5f, 1.1f, 0.0f, 2.0f};
const std::vector<float> kTieRow = {0, 6, 1, 3, 5, 2, 4, 0};

struct Golden {
  const char* stack;
  const char* codes;      // of kGoldenRow at ratio .75: 0 2 2 3 1 2 1 3
  const char* metadata;   // scale 1.1666667 and zero point 1.2857143, or minimum -1.5
  const char* tie_codes;  // of kTieRow, unclipped
};

// fp16: 1.1666667 is 3cab, 1.2857143 is 3d25, -1.5 is be00; lowest byte first. With the scale
// rounded before coding the zero point would be 1.5 / 1.1669922 = 1.2853556, 3d24.
const Golden kGolden[] = {
    {"sglang-v1", "58ee", "5555953f4a92a43f", "b41b"},
    {"sglang-v2", "58ee", "5555953f4a92a43f", "b41b"},
    {"sglang-0c88a", "58ee", "5555953f4a92a43f", "b41b"},
    {"vllm-pr46774", "e8d9", "ab3c00be", "9c27"},
    {"onnxruntime", "e8d9", "5555953f0000c0bf", "8c26"},
    {"mlx", "e8d9", "ab3c253d", "9c27"},
    {"oscar_int2", "e8d9", "ab3c243d", "9c27"},
};

TEST(CodedRow, TheGoldenRowHasTheBytesOfEachStack) {
  for (const Golden& golden : kGolden) {
    const CodedRow row = code_row(run_on(golden.stack, 8), .75, kGoldenRow);
    EXPECT_EQ(hex(row.codes), golden.codes) << golden.stack;
    EXPECT_EQ(hex(row.metadata), golden.metadata) << golden.stack;
  }
}

TEST(CodedRow, TiesGoUpExceptWhereAStackRoundsThemToEven) {
  for (const Golden& golden : kGolden) {
    const CodedRow row = code_row(run_on(golden.stack, 8), 0, kTieRow);
    EXPECT_EQ(hex(row.codes), golden.tie_codes) << golden.stack;
  }
}

// A row of 128 values, clipped at .96; numpy's twin of these rules is
// tests/parity/test_coded_rows.py.
TEST(CodedRow, ARowOf128ValuesHasTheBytesOfEachStack) {
  const std::vector<float> row = probe_row(128, 0);
  const struct {
    const char* stack;
    int group;
    const char *codes, *metadata;
  } goldens[] = {
      {"sglang-v1", 128, "e46dab9eb6ea791bfe27a10fe21a50deb1a5dd6b3add16932dc12962fc92b6af",
       "abaa9a3f0000c03f"},
      {"vllm-pr46774", 128, "b4dade8ad5e695e8eda9c7c8b41e23d36a7b2b569b57a2b7a71e23d37a8c4cab",
       "d53c40bf"},
      {"onnxruntime", 32, "b4dedf8ad5e695e8eda9c7c8b41e23d37a7f2b569b57a2f7a71e23d37a8c4cab",
       "abaa923f0000e8bfabaa9a3f0000e8bfabaa923f0000e8bfabaa9a3f0000e8bf"},
      {"mlx", 64, "b4dade8ad5e695e8eda9c7c8b41e23d36a7b2b569b57a2b7a71e23d37a8c4cab",
       "eb3c1a3ed53c003e"},
  };
  for (const auto& golden : goldens) {
    const CodedRow coded = code_row(run_on(golden.stack, golden.group), .96, row);
    EXPECT_EQ(hex(coded.codes), golden.codes) << golden.stack;
    EXPECT_EQ(hex(coded.metadata), golden.metadata) << golden.stack;
  }
}

TEST(CodedRow, ScaleAndZeroOfEachGroupStandSideBySide) {
  std::vector<float> row = kTieRow;
  for (const float x : kTieRow) row.push_back(2 * x - 4);  // scale 4, minimum -4
  const CodedRow coded = code_row(run_on("sglang-v1", 8), 0, row);
  EXPECT_EQ(floats(coded.metadata), (std::vector<float>{2, 0, 4, 1}));
  const CodedRow minimum = code_row(run_on("onnxruntime", 8), 0, row);
  EXPECT_EQ(floats(minimum.metadata), (std::vector<float>{2, 0, 4, -4}));
}

TEST(CodedRow, WhatCannotBeCodedIsRefused) {
  EXPECT_THROW(code_row(StackRun{}, 0, kTieRow), Error);  // levels of its own
  EXPECT_THROW(code_row(run_on("vllm-pr46774", 5), 0, kTieRow), Error);
  std::vector<float> row = kTieRow;
  row[3] = NAN;
  EXPECT_THROW(code_row(run_on("vllm-pr46774", 8), 0, row), Error);
}

}  // namespace
}  // namespace oscar
