// Numbers arrive as they are, wherever they lie, and none that is not finite goes unseen.
#include "copy_numbers_cases.h"

namespace oscar::copy_numbers_cases {
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
