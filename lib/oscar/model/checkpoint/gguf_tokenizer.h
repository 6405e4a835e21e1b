// A tokenizer in a GGUF file, as tokenizer.json would say it.
#pragma once

#include <optional>
#include <string>

#include "oscar/io/gguf.h"

namespace oscar {

// The tokenizer of a GGUF model, in the manner of tokenizer.json.

inline constexpr const char* kGgufChatTemplate = "tokenizer.chat_template";

// What tokenizer.json would say: byte-level BPE ("gpt2") with a known pre-tokenizer, or BPE by
// scores with bytes as a last resort ("llama"), as the `tokenizers` library reads it; nothing when
// the file has no tokens. Merges of "llama" follow from the scores: a token is made of any two
// others that spell it, that of the highest score first (Kudo and Richardson, arXiv 1808.06226).
// Throws Error naming what cannot be expressed, with the way out (pre-tokenized ids), and for
// tables that do not fit together.
std::optional<std::string> gguf_tokenizer_json(const GgufFile& file);

// sha256 over the keys and values of the tokenizer, the chat template apart; empty when the file
// has no tokens. It can be had of any tokenizer.
std::string gguf_tokenizer_sha256(const GgufFile& file);

}  // namespace oscar
