// What config.json says about quantized weights: which FP8 layout, or by name why not.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// What shares one scale: a whole matrix, each row (an output channel), or each block.
enum class ScaleLayout { kTensor, kChannel, kBlock };

// Weights stored in FP8 E4M3, each with a tensor of scales beside it. Biases, norms and whatever
// else is not stored in FP8 are as in any checkpoint.
struct Fp8Layout {
  ScaleLayout layout = ScaleLayout::kTensor;
  int64_t block_rows = 0, block_columns = 0;  // kBlock
  // A weight's scales have its name with one of these behind it.
  std::vector<std::string> scale_suffixes = {};
  std::vector<std::string> left_out = {};  // names or patterns of modules that are not quantized
};

// "a scale a tensor", "a scale a channel", "a scale for every 128 x 128".
std::string describe(const Fp8Layout& layout);

// Reads the quantization_config (or compression_config) of a config.json: `quant_method` "fp8", in
// blocks or with one scale a tensor, and "compressed-tensors" of format "float-quantized", with one
// scale a tensor, a channel or a block. None when there is none. Keys that concern activations and
// the KV cache alone are accepted. Throws Error naming the method or the key for everything else,
// with what to do instead.
std::optional<Fp8Layout> parse_quantization(const Json& config, const std::string& source);

}  // namespace oscar
