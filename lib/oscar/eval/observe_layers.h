// One pass of the reference over a few rows, for what looks at each layer's queries, keys and
// values.
#pragma once

#include <cstdint>

#include "oscar/model/transformer.h"

namespace oscar {

// Runs ids [sequences, tokens] through all layers from position `position_offset` on; `observer`
// sees each. Throws Interrupted when a stop was requested.
void observe_layers(Transformer& model, const torch::Tensor& ids, int64_t position_offset,
                    AttentionObserver& observer);

}  // namespace oscar
