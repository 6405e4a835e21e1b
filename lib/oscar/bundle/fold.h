// Value transforms into a checkpoint's weights.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/fit/linalg.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace oscar {

// The weights of one layer with the transform of its values folded in (math 6.5).

// v' = (v - mean) forward and o = o' inverse + mean, for each KV head.
struct ValueFold {
  int num_qo_heads = 0;
  std::vector<MatrixD> forward, inverse;  // [Hkv] of [d, d]
  std::vector<VectorD> mean;  // [Hkv] of [d], given back by the output bias; empty: left alone

  int num_kv_heads() const { return static_cast<int>(forward.size()); }
  int head_dim() const { return static_cast<int>(forward.front().rows()); }
};

// New bytes of a tensor in its own dtype, computed in float64 and rounded once (to nearest even).
// Throws Error when a value does not fit the dtype.
//   value weight  [Hkv d, hidden]  A_h <- forward^T A_h
//   value bias    [Hkv d]          b_h <- (b_h - mean_h) forward
//   output weight [hidden, Hq d]   B_j <- B_j inverse_h^T, h the KV head of query head j
//   output bias   [hidden]         c <- c + sum over j of mean_h B_j^T, from the old output weight
std::vector<std::byte> fold_value_weight(const TensorView& weight, const ValueFold& fold);
std::vector<std::byte> fold_value_bias(const TensorView& bias, const ValueFold& fold);
std::vector<std::byte> fold_output_weight(const TensorView& weight, const ValueFold& fold);
std::vector<std::byte> fold_output_bias(const TensorView& bias, const TensorView& output_weight,
                                        const ValueFold& fold);

// The tensors that a fold changes; no data where the model has no such bias.
struct ValueWeights {
  TensorView value, value_bias, output, output_bias;
};

// What attention adds to the residual stream for tokens that attend to themselves only:
// (x A^T + b) B^T + c, each value given to the query heads of its KV head. inputs [n, hidden],
// result [n, hidden].
MatrixD attended_to_self(const ValueWeights& weights, const MatrixD& inputs, int num_qo_heads,
                         int num_kv_heads);

// A checkpoint with the bundle's value transforms folded into its weights, and the bundle for it.

// What becomes of v_mean, which a server must subtract from values and add to the attention output:
//   kAuto  kFold where the model has biases on v_proj and o_proj, kKeep elsewhere
//   kFold  the biases do both; Error when the model has no such biases
//   kKeep  it stays in the bundle, for servers that center values
//   kDrop  values are no longer centered: the error that was predicted no longer holds
enum class ValueMean { kAuto, kFold, kKeep, kDrop };
// What was done, in a few words.
const char* describe(ValueMean mean);

struct FoldResult {
  ValueMean mean = ValueMean::kAuto;  // what was done; kAuto when no value is centered
  int layers = 0, tensors = 0;        // changed
  // Largest relative change over layers of what attention adds to the residual stream for random
  // inputs that attend to themselves, from the weights as written; rounding to their dtype shows
  // here.
  double largest_change = 0;
  std::string warning;                // of check_bundle_matches; may be empty
  std::vector<std::string> left_out;  // other names in the model's folder, not copied
};

// In the warnings of the first layer whose values were centered, where their mean was dropped.
inline constexpr const char* kDroppedMean =
    "values are not centered: fold --value-mean drop left their mean out";

// The bundle's name in the folder that fold_model writes.
inline constexpr const char* kFoldedBundleName = "oscar.h5";

// Writes `out`, a folder that appears whole or not at all: the shards, or the GGUF file, under
// their names with dtypes kept, v_proj and o_proj of every quantized layer changed as
// above; config, tokenizer and other small files of a Hugging Face folder as they are (no
// folders, no weights in other formats, no adapter); oscar_fold.json, which says how it was made;
// and the bundle for the folded model. In that bundle values have no transform of their own (kind
// identity), keys are as before, and codes, metrics and predicted errors are those of the unfolded
// model. Statistics and the portable variant, which describe unfolded values, are left out. Layers
// that are never quantized stay as they are. Throws Error for a bundle of another model or without
// transforms of values, for weights that cannot be loaded, for a GGUF file whose values are
// quantized, which would lose what is folded into them, when `out` exists, and when the written
// weights compute something else.
FoldResult fold_model(const Bundle& bundle, const std::string& bundle_name,
                      const Checkpoint& checkpoint, const std::filesystem::path& out,
                      ValueMean mean);

}  // namespace oscar
