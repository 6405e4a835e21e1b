// A checkpoint with the bundle's value transforms folded into its weights, and the bundle for it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/checkpoint/checkpoint.h"

namespace oscar {

// What becomes of v_mean, which a server must subtract from values and add to the attention output:
//   kAuto  kFold where the model has biases on v_proj and o_proj, kKeep elsewhere
//   kFold  the biases do both; Error when the model has no such biases
//   kKeep  it stays in the bundle, for servers that centre values
//   kDrop  values are no longer centred: the error that was predicted no longer holds
enum class ValueMean { kAuto, kFold, kKeep, kDrop };
// What was done, in a few words.
const char* describe(ValueMean mean);

struct FoldResult {
  ValueMean mean = ValueMean::kAuto;  // what was done; kAuto when no value is centred
  int layers = 0, tensors = 0;        // changed
  // Largest relative change over layers of what attention adds to the residual stream for random
  // inputs that attend to themselves, from the weights as written; rounding to their dtype shows
  // here.
  double largest_change = 0;
  std::string warning;                // of check_bundle_matches; may be empty
  std::vector<std::string> left_out;  // other names in the model's folder, not copied
};

// The bundle's name in the folder that fold_model writes.
inline constexpr const char* kFoldedBundleName = "oscar.h5";

// Writes `out`, a folder that appears whole or not at all: the shards, or the GGUF file, under
// their names with dtypes kept, v_proj and o_proj of every quantized layer changed as in
// fold_weights.h; config, tokenizer and other small files of a Hugging Face folder as they are (no
// folders, no weights in other formats); oscar_fold.json, which says how it was made; and the
// bundle for the folded model. In that bundle values have no transform of their own (kind
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
