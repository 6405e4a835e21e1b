// Is this bundle of this model? The first difference is named.
#pragma once

#include "oscar/bundle/bundle.h"
#include "oscar/io/checkpoint.h"

namespace oscar {

// Throws Error naming the field that differs, with both values: shape of the model, rope as run,
// kind and sliding window of each layer's attention, weights (a fine-tune of the same base differs
// only there), tokenizer. Returns a warning when config.json differs although all of these agree,
// as a bundle holds no more of it (not the epsilon of norms, for example); else "".
[[nodiscard]] std::string check_bundle_matches(const Bundle& bundle, const Checkpoint& checkpoint,
                                               const std::string& bundle_path);

}  // namespace oscar
