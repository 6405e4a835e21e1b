// What a bundle says of its model, and whether a bundle is of a given model.
#pragma once

#include <string>

#include "oscar/bundle/bundle.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace oscar {

// The record of `checkpoint` as a bundle stores it. `hash_weights`: the fingerprint covers every
// byte of the weights (WeightSource::fingerprint).
BundleModel describe_model(const Checkpoint& checkpoint, bool hash_weights);

// Whether a row of any layer is ever in 2 bits, and what is said where none is.
inline constexpr const char* kNothingQuantized =
    "no layer of this model is in 2 bits: every window stays in BF16";
bool has_quantized_layer(const Bundle& bundle);

// Throws Error naming the field that differs, with both values: shape of the model, rope as run,
// kind and sliding window of each layer's attention, weights (a fine-tune of the same base differs
// only there), tokenizer. Weights are compared by samples where the bundle and the checkpoint have
// some, else by the fingerprint: one of the two must be there. Hashes of a GGUF file's tokenizer
// and configuration are not compared with a folder's. Returns a warning when config.json differs
// although all of these agree, as a bundle holds no more of it (not the epsilon of norms, for
// example), and when samples agree and the fingerprint differs or is not there; else "".
[[nodiscard]] std::string check_bundle_matches(const Bundle& bundle, const Checkpoint& checkpoint,
                                               const std::string& bundle_path);

}  // namespace oscar
