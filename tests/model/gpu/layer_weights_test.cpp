// The same by several threads.
#include "../layer_weights_cases.h"
#include "support/cuda_device.h"

namespace oscar::layer_weights_cases {
namespace {

TEST(LayerWeightsGpu, OfManyRowsHaveEachInItsPlace) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  expect_every_row_in_its_place({torch::kCUDA, 0});
}

TEST(LayerWeightsGpu, InFp8HaveTheScalesOfEveryBlock) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  expect_scales_of_every_block({torch::kCUDA, 0});
}

TEST(LayerWeightsGpu, ThatAreNotFiniteAreRefusedWhereverTheyAre) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  expect_a_number_that_is_not_finite_to_be_found({torch::kCUDA, 0});
}

}  // namespace
}  // namespace oscar::layer_weights_cases
