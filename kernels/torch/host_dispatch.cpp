// The operators on the CPU.
#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "oscar/cache/pages.h"

namespace oscar::torch_ops {

void append_on_host(const AppendParams& params) { append_ref(params); }

void attend_on_host(const AttentionParams& params) {
  std::vector<float> o(static_cast<size_t>(params.batch) * params.q_len * params.num_qo_heads *
                       params.format.head_dim);
  decode_attention_ref(params, o.data(), params.lse);
  std::transform(o.begin(), o.end(), params.o, float_to_bf16);
}

void dequantize_on_host(const HistoryRowsParams& params) { dequantize_history_ref(params); }

void transform_on_host(const TransformParams& params) { transform_ref(params); }

void step_numbers_on_host(const StepParams& params) {
  for (int b = 0; b < params.requests; ++b) fill_step_numbers(params, b);
}

}  // namespace oscar::torch_ops
