// Some entries of a layer's attention weights, by which a server sees that a bundle was made for
// the very weights that it has loaded, whatever file and dtype they came from.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "oscar/fit/linalg.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// Of each KV head: W_Q (rows of its query heads), W_K, W_V (its rows) and W_O (columns of its query
// heads), so that a rank of tensor parallelism finds its own part.
inline constexpr int kSampledMatrices = 4;
inline constexpr int kSampledRows = 4, kSampledColumns = 16;
inline constexpr int kWeightSamples = 16;  // entries of a matrix and KV head

// Where entry `sample` lies in the part [rows, columns] of a KV head: the row in the middle of one
// of 4 equal strips, the column in the middle of one of 16, each of which is taken once.
struct SamplePosition {
  int64_t row, column;
};
inline SamplePosition sample_position(int sample, int64_t rows, int64_t columns) {
  const int i = sample / kSampledRows, j = sample % kSampledRows;
  return {(2 * i + 1) * rows / (2 * kSampledRows),
          (2 * (kSampledRows * j + i) + 1) * columns / (2 * kSampledColumns)};
}

// [Hkv, 4, 16] of each layer: W_Q, W_K, W_V, W_O as the model runs them, rounded to bf16 numbers.
// Empty for local layers. Reads no more than the rows that are sampled. Throws Error for tensors
// that are missing or of another shape.
std::vector<MatrixStack<float>> sample_weights(const ModelConfig& config,
                                               const WeightSource& weights);

}  // namespace oscar
