// Leakage guard: how much of an evaluation's text a bundle was made from.
#pragma once

#include <vector>

#include "oscar/base/json.h"
#include "oscar/data/corpus.h"
#include "oscar/data/ngram_fingerprint.h"

namespace oscar {

// Entry `overlap` of a bundle in the report (SCHEMA.md). Of `chunks` those with more than
// `first_position` tokens were evaluated: with needle tasks, whose haystack is all text, any.
Json overlap_json(const NgramFingerprint& fingerprint,
                  const std::vector<std::vector<int32_t>>& chunks, int64_t first_position);

// The same for a bundle without a fingerprint, from the files that text came from: tokens of a file
// that was calibrated on count as seen, whatever part of it was read.
Json same_files_json(const CorpusRecord& calibrated, const CorpusRecord& evaluated);

}  // namespace oscar
