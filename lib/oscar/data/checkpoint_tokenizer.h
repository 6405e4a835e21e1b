// The tokenizer of a checkpoint, opened only by who reads text.
#pragma once

#include <string>

#include "oscar/checkpoint/checkpoint.h"
#include "oscar/data/tokenizer.h"

namespace oscar {

// Throws Error when the checkpoint has none, or one that is not implemented.
Tokenizer open_tokenizer(const Checkpoint& checkpoint);

// Whether a part of a CORPUS argument (corpus.h) holds text. Ids and self:N need no tokenizer.
bool reads_text(const std::string& corpus_argument);

}  // namespace oscar
