// Numbers arrive as they are, wherever they lie, and none that is not finite goes unseen.
#include "oscar/model/copy_numbers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

namespace oscar {
namespace {

std::vector<torch::Device> devices() {
  std::vector<torch::Device> all = {torch::kCPU};
  if (at::hasCUDA()) all.emplace_back(torch::kCUDA, 0);
  return all;
}

// More than one piece, and no whole number of them.
constexpr int64_t kMany = (int64_t{5} << 20) + 3;

torch::Tensor random(torch::Dtype dtype) {
  return torch::randn({kMany}, torch::kFloat32).to(dtype);
}

const std::byte* bytes_of(const torch::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data_ptr());
}

constexpr torch::Dtype kTypes[] = {torch::kBFloat16, torch::kFloat16, torch::kFloat32,
                                   torch::kFloat8_e4m3fn};

TEST(CopyNumbers, AreTheSameToTheBitFromUnalignedMemory) {
  for (const torch::Device device : devices()) {
    for (const torch::Dtype dtype : kTypes) {
      const torch::Tensor numbers = random(dtype);
      std::vector<std::byte> file(numbers.nbytes() + 1);
      std::memcpy(file.data() + 1, numbers.data_ptr(), numbers.nbytes());
      const torch::Tensor place = torch::zeros({kMany}, numbers.options().device(device));
      EXPECT_TRUE(copy_numbers(file.data() + 1, place)) << dtype << " on " << device;
      const torch::Tensor back = place.to(torch::kCPU);
      EXPECT_EQ(std::memcmp(back.data_ptr(), numbers.data_ptr(), numbers.nbytes()), 0)
          << dtype << " on " << device;
    }
  }
}

TEST(CopyNumbers, FindOneThatIsNotFiniteInAnyPlace) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const torch::Device device : devices()) {
    for (const torch::Dtype dtype : kTypes) {
      for (const int64_t at : {int64_t{0}, kMany / 2, kMany - 1}) {
        for (const double value : {kInfinity, -kInfinity, std::nan("")}) {
          if (dtype == torch::kFloat8_e4m3fn && !std::isnan(value)) continue;  // has none
          torch::Tensor numbers = random(torch::kFloat32);
          numbers[at] = value;
          numbers = numbers.to(dtype);
          const torch::Tensor place = torch::empty({kMany}, numbers.options().device(device));
          EXPECT_FALSE(copy_numbers(bytes_of(numbers), place))
              << value << " at " << at << ", " << dtype << " on " << device;
        }
      }
    }
  }
}

TEST(CopyNumbers, TakeTheLargestAndTheSmallestForFinite) {
  for (const torch::Dtype dtype : {torch::kBFloat16, torch::kFloat16, torch::kFloat32}) {
    const torch::Tensor numbers = torch::tensor({65504.0, -65504.0, 0.0, -0.0, 6e-8}, dtype);
    EXPECT_TRUE(copy_numbers(bytes_of(numbers), torch::empty_like(numbers))) << dtype;
  }
  const torch::Tensor codes = torch::tensor({448.0f, -448.0f, 0.0f}).to(torch::kFloat8_e4m3fn);
  EXPECT_TRUE(copy_numbers(bytes_of(codes), torch::empty_like(codes)));
}

}  // namespace
}  // namespace oscar
