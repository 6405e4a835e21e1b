// Float64 sums on their way between a device and the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/model/torch.h"

namespace oscar {

inline torch::Tensor zero_sums(at::IntArrayRef shape, torch::Device device) {
  return torch::zeros(shape, torch::dtype(torch::kFloat64).device(device));
}

// Adds `values`, as many as `sum` has entries.
inline void add_values(torch::Tensor& sum, const std::vector<double>& values) {
  const auto host =
      torch::from_blob(const_cast<double*>(values.data()), sum.sizes(), torch::kFloat64);
  sum.add_(host.to(sum.device(), /*non_blocking=*/false, /*copy=*/true));
}

// Copies `sum` into as many `values`. Throws Error naming layer and sum when one is not finite. One
// thread looks through them: beside those that read weights, libtorch's may have to wait for a
// core.
inline void copy_values(const torch::Tensor& sum, std::vector<double>& values, int layer,
                        const char* name) {
  const torch::Tensor host = sum.to(torch::kCPU).contiguous();
  std::memcpy(values.data(), host.data_ptr<double>(), values.size() * sizeof(double));
  if (!std::ranges::all_of(values, [](double value) { return std::isfinite(value); })) {
    throw Error(
        {.what = "a statistic is not finite",
         .where = "layer " + std::to_string(layer) + ", " + name,
         .hint = "the weights or activations of this layer overflow; check the checkpoint"});
  }
}

// The same for moments [heads, d, d]: the upper triangles and their mirror images. The products
// that were added up are symmetric to the bit on some processors only. The host mirrors them:
// beside a forward pass, a kernel of the device would wait for the product in progress.
inline void copy_moments(const torch::Tensor& sum, std::vector<double>& values, int layer,
                         const char* name) {
  copy_values(sum, values, layer, name);
  const auto size = static_cast<size_t>(sum.size(1));
  for (auto matrix = values.begin(); matrix != values.end();
       matrix += static_cast<std::ptrdiff_t>(size * size)) {
    for (size_t row = 0; row < size; ++row) {
      for (size_t column = row; column < size; ++column) {
        const double entry = matrix[row * size + column] + 0.0;  // no -0
        matrix[row * size + column] = matrix[column * size + row] = entry;
      }
    }
  }
}

}  // namespace oscar
