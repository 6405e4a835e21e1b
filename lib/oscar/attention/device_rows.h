// Rows through the codec on a GPU, by a kernel of builds with CUDA.
#pragma once

#include "oscar/attention/int2_attention.h"

namespace oscar {

// Whether this program has the kernel.
bool has_device_rows();

// quantize_dequantize of rows [batch, Hkv, tokens, d] float32 on a CUDA device that hold bf16
// numbers, contiguous: equal to the cache library's codec to the bit. Throws Error for rows that
// the codec refuses. Precondition: has_device_rows().
torch::Tensor quantize_dequantize_device(const SideCodec& side, const torch::Tensor& rows,
                                         const std::string& where);

}  // namespace oscar
