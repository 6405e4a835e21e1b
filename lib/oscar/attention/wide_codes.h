// This toolkit's rows with codes of other than 2 bits, to measure what each bit buys.
#pragma once

#include "oscar/attention/int2_attention.h"

namespace oscar {

inline constexpr int kMostCodeBits = 8;

// quantize_dequantize of a side without centers for side.code_bits, from 1 to kMostCodeBits: the
// codec of cache/codec.h with 2^bits levels, scale (hi - lo) / (2^bits - 1), by operations of
// torch. Sums may round otherwise than the cache library's. x [batch, Hkv, tokens, d] float32 that
// hold bf16 numbers. Throws Error for rows that the codec refuses and for the rules of another
// backend's codec.
torch::Tensor quantize_dequantize_wide(const SideCodec& side, const torch::Tensor& x,
                                       const std::string& where);

}  // namespace oscar
