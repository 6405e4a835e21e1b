// The same through pinned memory.
#include "../copy_numbers_cases.h"
#include "support/cuda_device.h"

namespace oscar::copy_numbers_cases {
namespace {

TEST(CopyNumbersGpu, AreTheSameToTheBit) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  expect_same_bits({torch::kCUDA, 0});
}

TEST(CopyNumbersGpu, FindOneThatIsNotFiniteInAnyPlace) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  expect_to_find_one_not_finite({torch::kCUDA, 0});
}

}  // namespace
}  // namespace oscar::copy_numbers_cases
