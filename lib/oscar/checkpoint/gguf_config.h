// The configuration of a GGUF model, in the words of config.json.
#pragma once

#include "oscar/base/json.h"
#include "oscar/io/gguf.h"

namespace oscar {

// What config.json would say of this model, for parse_model_config. Architectures llama, qwen2 and
// qwen3; RoPE scaling none, linear, yarn, and that of the tensor rope_freqs.weight, which is given
// back as "llama3" where that is what it holds and as "freq_factors" else. Throws Error for another
// architecture, for a key that would change the computation and is not implemented or not known
// (named), and for a value of another type.
Json gguf_config(const GgufFile& file);

// The tensor that holds a factor on the wavelength of each pair of dimensions; part of the
// configuration, no weight of the model.
inline constexpr const char* kGgufRopeFactors = "rope_freqs.weight";

// Whether rows of q and k are stored as neighbouring pairs (2i, 2i + 1) of a head's dimensions
// where config.json's models have halves (i, i + head_dim / 2).
bool has_paired_rows(const GgufFile& file);

}  // namespace oscar
