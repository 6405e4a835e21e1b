#include "oscar/model/layer_weights.h"

#include <gtest/gtest.h>
#include <cmath>
#include <random>

#include "copy_numbers_cases.h"
#include "layer_weights_cases.h"
#include "model/checkpoint/fp8_folder.h"
#include "oscar/base/error.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar::copy_numbers_cases {

// Numbers arrive as they are, wherever they lie, and none that is not finite goes unseen.

namespace {

TEST(CopyNumbers, AreTheSameToTheBit) { expect_same_bits(torch::kCPU); }

TEST(CopyNumbers, FindOneThatIsNotFiniteInAnyPlace) { expect_to_find_one_not_finite(torch::kCPU); }

TEST(CopyNumbers, TakeTheLargestAndTheSmallestForFinite) {
  for (const torch::Dtype dtype : {torch::kBFloat16, torch::kFloat16, torch::kFloat32}) {
    const torch::Tensor numbers = torch::tensor({65504.0, -65504.0, 0.0, -0.0, 6e-8}, dtype);
    EXPECT_TRUE(copy_numbers(bytes_of(numbers), torch::empty_like(numbers))) << dtype;
  }
  const torch::Tensor codes = torch::tensor({448.0f, -448.0f, 0.0f}).to(torch::kFloat8_e4m3fn);
  EXPECT_TRUE(copy_numbers(bytes_of(codes), torch::empty_like(codes)));
}

}  // namespace
}  // namespace oscar::copy_numbers_cases

// FP8 weights on the device against dull loops, code by code.

namespace {

using namespace oscar;
using namespace oscar_test;

const WeightSpec kSpec{WeightRole::kUp, "model.layers.0.mlp.up_proj.weight", {}};

// E4M3 as its definition reads: sign, four bits of exponent (bias 7), three of fraction.
double value_of(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15), fraction = static_cast<int>(code & 7);
  const double size =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

bool is_number(unsigned code) { return (code & 0x7f) != 0x7f; }

torch::Tensor load(const std::string& codes, int64_t rows, int64_t columns,
                   const std::vector<float>& scales, const std::vector<int64_t>& grid,
                   const Json& quantization, torch::Dtype dtype = torch::kFloat32) {
  const TemporaryFolder folder;
  write_file(folder.path() / "model.safetensors",
             safetensors_bytes(RawTensors{{kSpec.name, {"F8_E4M3", {rows, columns}, codes}},
                                          {kSpec.name + "_scale_inv", f32(grid, scales)}}));
  const Fp8Weights weights(std::make_shared<SafetensorsWeights>(folder.path()),
                           *parse_quantization({{"quantization_config", quantization}}, ""));
  WeightSpec spec = kSpec;
  spec.shape = {rows, columns};
  return load_weight(weights, spec, {torch::kCPU, dtype});
}

TEST(Fp8Weight, EveryCodeThatIsANumberHasItsValueToTheBit) {
  std::string codes;
  for (unsigned code = 0; code < 256; ++code) {
    if (is_number(code)) codes += static_cast<char>(code);
  }
  const torch::Tensor found = load(codes, 1, 254, {1}, {1}, fp8_config());
  for (int64_t i = 0; i < 254; ++i) {
    const auto code = static_cast<unsigned char>(codes[static_cast<size_t>(i)]);
    const float expected = static_cast<float>(value_of(code)), got = found[0][i].item<float>();
    EXPECT_EQ(std::memcmp(&expected, &got, sizeof got), 0) << "code " << unsigned{code};
  }
  EXPECT_EQ(found.max().item<float>(), 448.0f);
}

TEST(Fp8Weight, CodesThatAreNoNumbersAreRefusedByTheNameOfTheWeight) {
  for (const char code : {'\x7f', '\xff'}) {
    std::string codes(6, '\x10');
    codes[4] = code;
    try {
      load(codes, 2, 3, {1}, {1}, fp8_config());
      FAIL() << "a NaN was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find(kSpec.name), std::string::npos);
    }
  }
  // So is a product that fp32 does not hold.
  EXPECT_THROW(load(std::string(6, '\x7e'), 2, 3, {3e38f}, {1}, fp8_config()), Error);
}

struct Shape {
  int64_t rows, columns, block_rows, block_columns;
};

TEST(Fp8Weight, EveryElementIsItsCodesValueTimesTheScaleOfItsBlock) {
  // Whole and partial blocks, blocks larger than the matrix, and more rows than a slab.
  const Shape shapes[] = {{8, 6, 4, 3},         {7, 5, 4, 3}, {1, 1, 4, 4},          {3, 9, 128, 2},
                          {130, 257, 128, 128}, {9, 4, 1, 4}, {4300, 1000, 128, 128}};
  for (const Shape& s : shapes) {
    std::mt19937_64 random(5);
    std::string codes;
    for (int64_t i = 0; i < s.rows * s.columns; ++i) {
      const auto code = static_cast<unsigned char>(random());
      codes += static_cast<char>(is_number(code) ? code : 0);
    }
    const int64_t grid_rows = (s.rows + s.block_rows - 1) / s.block_rows;
    const int64_t grid_columns = (s.columns + s.block_columns - 1) / s.block_columns;
    std::vector<float> scales;
    for (int64_t i = 0; i < grid_rows * grid_columns; ++i) {
      scales.push_back(std::ldexp(1.0f + static_cast<float>(random() % 1000) / 1000, -5));
    }
    const Json config = fp8_config({s.block_rows, s.block_columns});
    const std::vector<int64_t> grid = {grid_rows, grid_columns};
    const torch::Tensor found = load(codes, s.rows, s.columns, scales, grid, config);
    const float* got = found.data_ptr<float>();
    int64_t wrong = 0;
    for (int64_t r = 0; r < s.rows; ++r) {
      for (int64_t c = 0; c < s.columns; ++c) {
        const int64_t i = r * s.columns + c;
        const int64_t block = r / s.block_rows * grid_columns + c / s.block_columns;
        const auto code = static_cast<unsigned char>(codes[static_cast<size_t>(i)]);
        const float expected =
            static_cast<float>(value_of(code)) * scales[static_cast<size_t>(block)];
        if (got[i] != expected) ++wrong;
      }
    }
    EXPECT_EQ(wrong, 0) << s.rows << " x " << s.columns;
    // Rounded once to the dtype of the run.
    const auto narrow = load(codes, s.rows, s.columns, scales, grid, config, torch::kBFloat16);
    EXPECT_TRUE(torch::equal(narrow, found.to(torch::kBFloat16)));
  }
}

}  // namespace

namespace oscar::layer_weights_cases {

// Large weights are read in pieces, each to its place.

namespace {

TEST(LayerWeights, OfManyRowsHaveEachInItsPlace) { expect_every_row_in_its_place(torch::kCPU); }

TEST(LayerWeights, InFp8HaveTheScalesOfEveryBlock) { expect_scales_of_every_block(torch::kCPU); }

TEST(LayerWeights, ThatAreNotFiniteAreRefusedWhereverTheyAre) {
  expect_a_number_that_is_not_finite_to_be_found(torch::kCPU);
}

}  // namespace
}  // namespace oscar::layer_weights_cases
