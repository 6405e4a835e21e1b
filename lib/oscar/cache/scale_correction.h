// One factor per row that removes the bias of rounding from the stored scale (math 5.3).
#pragma once

#include "oscar/cache/codec.h"

namespace oscar {

enum class ScaleCorrection : uint8_t { kNone = 0, kUnbiased = 1, kMetric = 2 };

// f = num / den, or 1 where the quotient means nothing, kept within [0.5, 2].
OSCAR_HOST_DEVICE inline float correction_factor(float num, float den) {
  if (!(num > 0.0f) || !(den > 0.0f) || !(den > mul_rn(1e-6f, num))) return 1.0f;
  const float f = div_rn(num, den);
  return f < 0.5f ? 0.5f : f > 2.0f ? 2.0f : f;
}

// f = <x, x> / <x, y>, x the row before clipping and y its dequantized form, both [head_dim].
OSCAR_HOST_DEVICE inline float unbiased_factor(const float* x, const float* y, int head_dim) {
  float num = 0.0f, den = 0.0f;
  for (int i = 0; i < head_dim; ++i) {
    num = add_rn(num, mul_rn(x[i], x[i]));
    den = add_rn(den, mul_rn(x[i], y[i]));
  }
  return correction_factor(num, den);
}

// f = (x M x^T) / (x M y^T) with the undamped metric M [head_dim, head_dim].
OSCAR_HOST_DEVICE inline float metric_factor(const float* x, const float* y, const float* metric,
                                             int head_dim) {
  float num = 0.0f, den = 0.0f;
  for (int i = 0; i < head_dim; ++i) {
    float weighted = 0.0f;  // (x M)_i
    for (int j = 0; j < head_dim; ++j) {
      weighted = add_rn(weighted, mul_rn(x[j], metric[static_cast<int64_t>(j) * head_dim + i]));
    }
    num = add_rn(num, mul_rn(weighted, x[i]));
    den = add_rn(den, mul_rn(weighted, y[i]));
  }
  return correction_factor(num, den);
}

}  // namespace oscar
