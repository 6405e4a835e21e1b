// The fingerprint of a bundle's text as a dataset: one owner of its names and its checks.
#pragma once

#include "oscar/bundle/raw_file.h"
#include "oscar/data/ngram_fingerprint.h"

namespace oscar {

// Adds dataset /corpus/ngram_hashes, i64 [count], with attributes `ngram`, `capacity` and `rule`.
// Nothing for a fingerprint without hashes. `fingerprint` must outlive `file`.
void encode_fingerprint(const NgramFingerprint& fingerprint, EncodedFile& file);

// Without hashes when the file has none, or was sampled by a rule that this build does not know.
// Throws Error for a dataset of this rule that it can't have written: dtype, shape, more hashes
// than the capacity, negative, repeated or unordered ones.
NgramFingerprint decode_fingerprint(const RawFile& raw);

}  // namespace oscar
