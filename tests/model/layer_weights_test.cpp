// Large weights are read in pieces, each to its place.
#include "layer_weights_cases.h"

namespace oscar::layer_weights_cases {
namespace {

TEST(LayerWeights, OfManyRowsHaveEachInItsPlace) { expect_every_row_in_its_place(torch::kCPU); }

TEST(LayerWeights, InFp8HaveTheScalesOfEveryBlock) { expect_scales_of_every_block(torch::kCPU); }

TEST(LayerWeights, ThatAreNotFiniteAreRefusedWhereverTheyAre) {
  expect_a_number_that_is_not_finite_to_be_found(torch::kCPU);
}

}  // namespace
}  // namespace oscar::layer_weights_cases
