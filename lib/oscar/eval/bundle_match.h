// Is this bundle of this model? The first difference is named.
#pragma once

#include "oscar/bundle/bundle.h"
#include "oscar/io/checkpoint.h"

namespace oscar {

// Throws Error naming the field that differs, with both values: shape of the model, rope as run,
// weights (a fine-tune of the same base differs only there), tokenizer. config.json may differ in
// keys that change nothing.
void check_bundle_matches(const Bundle& bundle, const Checkpoint& checkpoint,
                          const std::string& bundle_path);

}  // namespace oscar
