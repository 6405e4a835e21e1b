// The operators on the CPU.
#include <algorithm>
#include <vector>

#include "backends.h"
#include "oscar/cache/paged_reference.h"

namespace oscar::torch_ops {

void append_on_host(const AppendParams& params) { append_ref(params); }

void attend_on_host(const AttentionParams& params) {
  std::vector<float> o(static_cast<size_t>(params.batch) * params.q_len * params.num_qo_heads *
                       params.format.head_dim);
  decode_attention_ref(params, o.data(), params.lse);
  std::transform(o.begin(), o.end(), params.o, float_to_bf16);
}

void dequantize_on_host(const PageFormat& format, const uint8_t* pool, int64_t chunks, float* out) {
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int side = 0; side < 2; ++side) {
      for (int token = 0; token < kPageTokens; ++token, out += format.head_dim) {
        dequantize_row(format, pool + chunk * chunk_bytes(format), side, token, out);
      }
    }
  }
}

}  // namespace oscar::torch_ops
