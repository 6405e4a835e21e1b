// What copying numbers must do on any device.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "oscar/model/layer_weights.h"

namespace oscar::copy_numbers_cases {

// More than one piece, and no whole number of them.
inline constexpr int64_t kMany = (int64_t{5} << 20) + 3;

inline torch::Tensor random(torch::Dtype dtype) {
  return torch::randn({kMany}, torch::kFloat32).to(dtype);
}

inline ByteReader bytes_of(const torch::Tensor& tensor) {
  return [tensor](size_t first, size_t bytes, std::byte* out) {
    std::memcpy(out, static_cast<const std::byte*>(tensor.data_ptr()) + first, bytes);
  };
}

inline constexpr torch::Dtype kTypes[] = {torch::kBFloat16, torch::kFloat16, torch::kFloat32,
                                          torch::kFloat8_e4m3fn};

inline void expect_same_bits(torch::Device device) {
  for (const torch::Dtype dtype : kTypes) {
    const torch::Tensor numbers = random(dtype);
    const torch::Tensor place = torch::zeros({kMany}, numbers.options().device(device));
    EXPECT_TRUE(copy_numbers(bytes_of(numbers), place)) << dtype << " on " << device;
    const torch::Tensor back = place.to(torch::kCPU);
    EXPECT_EQ(std::memcmp(back.data_ptr(), numbers.data_ptr(), numbers.nbytes()), 0)
        << dtype << " on " << device;
  }
}

inline void expect_to_find_one_not_finite(torch::Device device) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
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

}  // namespace oscar::copy_numbers_cases
