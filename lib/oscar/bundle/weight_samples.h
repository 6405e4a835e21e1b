// Some entries of a layer's attention weights, biases and norms, by which a server sees that a
// bundle was made for the very weights that it has loaded, whatever file and dtype they came from.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "oscar/fit/linalg.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// Of each KV head: W_Q (rows of its query heads), W_K, W_V (its rows) and W_O (columns of its query
// heads), so that a rank of tensor parallelism finds its own part.
inline constexpr int kSampledMatrices = 4;
inline constexpr int kSampledRows = 4, kSampledColumns = 16;
inline constexpr int kWeightSamples = 16;  // entries of a matrix or vector and KV head
// Of each KV head: biases of W_Q (of its query heads), W_K and W_V, and the weights of the norms of
// queries and keys, which heads share unless a norm takes all of a row.
inline constexpr int kSampledVectors = 5;

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

// Of a vector of so many entries: the one in the middle of each of 16 equal strips.
inline int64_t sample_position(int sample, int64_t entries) {
  return (2 * sample + 1) * entries / (2 * kWeightSamples);
}

// Of one layer, rounded to bf16 numbers.
struct WeightSamples {
  MatrixStack<float> matrices;  // [Hkv, 4, 16]: W_Q, W_K, W_V, W_O as the model runs them
  // [Hkv, 5, 16]: b_Q, b_K, b_V, norm of q, norm of k as they are stored, zeros where the model has
  // none. Empty: not known.
  MatrixStack<float> vectors;

  bool empty() const { return matrices.empty(); }
  bool operator==(const WeightSamples&) const = default;
};

// By layer id; empty for layers that are not fitted, and none at all of models with output gates,
// as in bundles of the engine in transformers. Reads no more than the rows that are sampled. Throws
// Error for tensors that are missing or of another shape.
std::vector<WeightSamples> sample_weights(const ModelConfig& config, const WeightSource& weights);

// Where samples of two files differ, by layer id, in words for a message; "": nowhere. Compared are
// tensors that both have. Servers' rule (python/oscar_int2/weights.py): entries are the same if
// they are once rounded to bf16. `fp16`: one side was rounded to fp16 before, and may be an ulp
// away. A norm of zeros is one that the model does not have, or that its engine did not find.
std::string weight_difference(const std::vector<WeightSamples>& a,
                              const std::vector<WeightSamples>& b, bool fp16);

}  // namespace oscar
