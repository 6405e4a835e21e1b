// One row at a time, all columns together: the compiler works on several of them at once.
#include "oscar/cache/transform.h"

#include <algorithm>
#include <vector>

namespace oscar {
namespace {

void transform_head(const TransformParams& p, const TransformRows& t, int head) {
  const int d = p.head_dim, kv_head = head / (t.num_heads / p.num_kv_heads);
  const float* const matrix = t.matrix + int64_t{kv_head} * d * d;
  std::vector<float> sums(d);
  for (int row = 0; row < p.rows; ++row) {
    const uint16_t* const x = row_at(t.x, row, head);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int i = 0; i < d; ++i) {
      float value = bf16_to_float(x[i]);
      if (t.subtracted) value -= t.subtracted[kv_head * d + i];
      const float* const entries = matrix + int64_t{i} * d;
      for (int j = 0; j < d; ++j) sums[j] += value * entries[j];
    }
    uint16_t* const out = t.out + (int64_t{row} * t.num_heads + head) * d;
    for (int j = 0; j < d; ++j) {
      out[j] = float_to_bf16(t.added ? sums[j] + t.added[kv_head * d + j] : sums[j]);
    }
  }
}

}  // namespace

void transform_ref(const TransformParams& params) {
  for (int i = 0; i < params.num_tensors; ++i) {
    const TransformRows& tensor = params.tensors[i];
    for (int head = 0; head < tensor.num_heads; ++head) transform_head(params, tensor, head);
  }
}

}  // namespace oscar
