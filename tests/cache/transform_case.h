// Inputs of the transforms in and out of the cache's basis, and what float64 makes of them; for the
// CPU reference and for the kernel.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "oscar/cache/pages.h"

namespace oscar_test {

struct TransformCase {
  int rows = 1, num_kv_heads = 2, heads_per_kv = 4, head_dim = 128;
  bool means = true;
  bool apart = false;  // rows are slices of a fused qkv tensor, and heads lie apart too
};
inline void PrintTo(const TransformCase& c, std::ostream* out) {
  *out << c.rows << " rows, " << c.num_kv_heads << " x " << c.heads_per_kv << " heads, d "
       << c.head_dim << (c.means ? "" : ", no means") << (c.apart ? ", rows apart" : "");
}

// One tensor: q, k, v, or o with a mean that is added.
struct TransformTensor {
  int num_heads = 0;
  int64_t row_stride = 0, head_stride = 0;
  std::vector<uint16_t> x, out;
  std::vector<float> matrix, subtracted, added;  // empty: none
};

struct TransformSetup {
  static constexpr uint16_t kPoison = 0x7fc0;  // NaN between rows, and in outputs until written
  TransformCase shape;
  std::vector<TransformTensor> tensors;  // q, k, v; or o alone

  explicit TransformSetup(const TransformCase& c, bool output = false, unsigned seed = 1)
      : shape(c) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (int t = 0; t < (output ? 1 : 3); ++t) {
      TransformTensor tensor;
      const int d = c.head_dim;
      tensor.num_heads = c.num_kv_heads * (t == 0 ? c.heads_per_kv : 1);
      tensor.head_stride = d + (c.apart ? 8 * (t + 1) : 0);
      tensor.row_stride = tensor.num_heads * tensor.head_stride + (c.apart ? 40 : 0);
      tensor.x.assign(static_cast<size_t>(c.rows) * tensor.row_stride, kPoison);
      tensor.out.assign(static_cast<size_t>(c.rows) * tensor.num_heads * d, kPoison);
      for (int row = 0; row < c.rows; ++row) {
        for (int head = 0; head < tensor.num_heads; ++head) {
          for (int i = 0; i < d; ++i) {
            tensor.x[row * tensor.row_stride + head * tensor.head_stride + i] =
                oscar::float_to_bf16(3.0f * normal(rng) + (i % 7 == 0 ? 20.0f : 0.0f));
          }
        }
      }
      const auto normals = [&](std::vector<float>& values, size_t count, float scale) {
        values.resize(count);
        for (float& value : values) value = scale * normal(rng);
      };
      const size_t entries = static_cast<size_t>(c.num_kv_heads) * d;
      normals(tensor.matrix, entries * d, 1.0f / std::sqrt(static_cast<float>(d)));
      if (c.means && t > 0) normals(tensor.subtracted, entries, 10.0f);
      if (c.means && output) normals(tensor.added, entries, 2.0f);
      tensors.push_back(std::move(tensor));
    }
  }

  oscar::TransformParams params() {
    oscar::TransformParams p{.num_tensors = static_cast<int>(tensors.size()),
                             .rows = shape.rows,
                             .num_kv_heads = shape.num_kv_heads,
                             .head_dim = shape.head_dim};
    for (size_t t = 0; t < tensors.size(); ++t) {
      TransformTensor& from = tensors[t];
      p.tensors[t] = {.x = {from.x.data(), from.row_stride, from.head_stride},
                      .out = from.out.data(),
                      .matrix = from.matrix.data(),
                      .subtracted = from.subtracted.empty() ? nullptr : from.subtracted.data(),
                      .added = from.added.empty() ? nullptr : from.added.data(),
                      .num_heads = from.num_heads};
    }
    return p;
  }

  // Every output within the rounding to bf16 of what float64 gives, and 4e-6 of the sum of
  // magnitudes, which is more than d roundings in fp32 leave.
  void expect_outputs() const {
    const int d = shape.head_dim;
    for (size_t t = 0; t < tensors.size(); ++t) {
      const TransformTensor& tensor = tensors[t];
      for (int row = 0; row < shape.rows; ++row) {
        for (int head = 0; head < tensor.num_heads; ++head) {
          const int kv_head = head / (tensor.num_heads / shape.num_kv_heads);
          const auto* x = &tensor.x[row * tensor.row_stride + head * tensor.head_stride];
          const float* matrix = &tensor.matrix[static_cast<size_t>(kv_head) * d * d];
          for (int j = 0; j < d; ++j) {
            double sum = 0.0, magnitude = 0.0;
            for (int i = 0; i < d; ++i) {
              double value = oscar::bf16_to_float(x[i]);
              if (!tensor.subtracted.empty()) value -= tensor.subtracted[kv_head * d + i];
              sum += value * matrix[i * d + j];
              magnitude += std::fabs(value * matrix[i * d + j]);
            }
            if (!tensor.added.empty()) sum += tensor.added[kv_head * d + j];
            const double got = oscar::bf16_to_float(
                tensor.out[(static_cast<size_t>(row) * tensor.num_heads + head) * d + j]);
            int exponent = 0;
            std::frexp(sum, &exponent);
            ASSERT_LE(std::fabs(got - sum), std::ldexp(1.0, exponent - 9) + 4e-6 * magnitude)
                << "tensor " << t << " row " << row << " head " << head << " column " << j;
          }
        }
      }
    }
  }
};

inline std::vector<TransformCase> transform_cases() {
  std::vector<TransformCase> all;
  for (const int d : {64, 128, 256}) {
    for (const int group : {1, 4, 8}) {
      for (const int rows : {1, 7, 33}) {
        all.push_back({rows, 2, group, d, true, group == 4});
      }
    }
  }
  all.push_back({300, 1, 4, 128, true, true});
  all.push_back({300, 1, 1, 64, false, false});
  all.push_back({65, 1, 5, 128, true, true});
  all.push_back({40, 1, 16, 256, false, true});
  return all;
}

}  // namespace oscar_test
