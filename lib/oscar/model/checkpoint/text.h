// Tokenizer and corpora of a checkpoint, as programs name them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/text/tokenizer.h"

namespace oscar {

// The tokenizer of a checkpoint, opened only by who reads text, and what ids need of it.

// Throws Error when the checkpoint has none, or one that is not implemented.
Tokenizer open_tokenizer(const Checkpoint& checkpoint);

// Whether a part of a CORPUS argument (corpus.h) holds text. Ids and self:N need no tokenizer.
bool reads_text(const std::string& corpus_argument);

// Tokens that end documents and turns (packing.h): the config's, then those that the tokenizer's
// list of added tokens names. One whose components are not implemented, or that cannot be read at
// all, does not matter here.
std::vector<int32_t> separator_tokens(const Checkpoint& checkpoint);

}  // namespace oscar
