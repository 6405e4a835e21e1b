// The post-processor of tokenizer.json: special tokens before and behind the ids of a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/data/tokenizer_json.h"

namespace oscar {

struct PostProcessor {
  std::vector<int32_t> prefix, suffix;
};

// Reads templates (of one text; pairs do not occur here) and byte-level processors, which move
// offsets only. Throws Error naming anything else.
PostProcessor read_post_processor(const TokenizerJson& object, const std::string& where);

}  // namespace oscar
