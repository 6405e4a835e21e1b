// Noise-shaped rounding of one row (math 5.2): each code also absorbs the errors made before it.
#pragma once

#include "oscar/cache/codec.h"

namespace oscar {

// Codes of a row x [head_dim] (unclipped) with the scales and zeros of its quantization groups,
// so that e M e^T is small, where e = dequantized - x and M + damping = U D U^T.
// feedback: U [head_dim, head_dim], unit upper triangular; only entries above the diagonal are
// read. In ascending order target_i = x_i - sum over j < i of e_j U_{j,i}. `errors` [head_dim] is
// scratch and holds e afterwards. The idea is GPTQ's (arXiv 2210.17323), moved to cache rows.
OSCAR_HOST_DEVICE inline void shaped_codes(const float* x, const float* feedback,
                                           const ScaleZero* groups, int head_dim,
                                           int quant_group_size, float* errors, uint8_t* codes) {
  for (int i = 0; i < head_dim; ++i) {
    float pushed = 0.0f;
    for (int j = 0; j < i; ++j) {
      pushed = add_rn(pushed, mul_rn(errors[j], feedback[static_cast<int64_t>(j) * head_dim + i]));
    }
    const ScaleZero sz = groups[i / quant_group_size];
    const int code = code_of(sub_rn(x[i], pushed), sz);
    codes[i] = static_cast<uint8_t>(code);
    errors[i] = sub_rn(dequantize(code, sz), x[i]);
  }
}

}  // namespace oscar
