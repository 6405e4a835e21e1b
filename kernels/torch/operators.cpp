// torch.ops.oscar_int2: schemas, and the way from tensors to the CPU references or the CUDA
// kernels.
//
// Only torch's stable ABI (torch/csrc/stable, TORCH_TARGET_VERSION 2.10), so that one library loads
// in every later torch. Fake functions are in oscar_int2/_library.py: the stable ABI reads sizes
// as plain numbers, and tracing with dynamic shapes has none.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "arguments.h"
#include "dispatch.h"
#include "table_checks.h"

namespace oscar::torch_ops {
namespace {

TableLimits table_limits(const CacheTensors& cache, const WindowTensors& windows) {
  return {.num_pages = cache.pool.size(0),
          .max_pages = cache.block_table.size(1),
          .num_slots = windows.k.size(0)};
}

void quantize_append(const Recipe& recipe, const Format& format, const Tensor& pool,
                     const Tensor& block_table, const Tensor& window_k, const Tensor& window_v,
                     const Tensor& k, const Tensor& v, const Tensor& query_start_loc,
                     const Tensor& old_len, const Tensor& old_history, const Tensor& new_history,
                     const Tensor& status, const OptionalTensor& window_slot,
                     const OptionalTensor& first_position, std::optional<int64_t> max_new_rows,
                     std::optional<int64_t> max_new_history, const OptionalTensor& read_history) {
  constexpr const char* kOp = "quantize_append";
  const CacheTensors cache{recipe, format, pool, block_table, first_position};
  const WindowTensors windows{window_k, window_v, window_slot};
  const AppendParams params = append_params(
      kOp, cache, windows,
      {k, v, query_start_loc, old_len, old_history, new_history, read_history, status});
  // Without bounds: every new row in one request, and all that its ring can hold besides.
  const int64_t most_rows = kMaxInt / (2 * int64_t{params.num_kv_heads});
  const int row_bound =
      checked_int(kOp, "max_new_rows", max_new_rows.value_or(k.size(0)), 0, most_rows);
  const int history_bound = checked_int(
      kOp, "max_new_history",
      max_new_history.value_or(int64_t{row_bound} + params.windows.ring_tokens), 0, kMaxInt / 2);
  if (params.batch == 0) return;
  if (pool.is_cuda()) {
    append_on_device(kOp, params, row_bound, history_bound, pool);
    return;
  }
  TableLimits limits = table_limits(cache, windows);
  limits.num_rows = k.size(0);
  limits.max_new_rows = row_bound;
  limits.max_new_history = history_bound;
  check_append_tables(kOp, params, limits);
  append_on_host(params);
}

// The workspace to use: the caller's, or one for this call alone, which `own` then keeps.
void* workspace_for(const char* op, const AttentionParams& params, const Tensor& pool,
                    const OptionalTensor& workspace, OptionalTensor& own, int64_t& bytes) {
  const int64_t needed = device_workspace_bytes(op, params, pool);
  if (workspace) {
    bytes = checked_size({op, "workspace", *workspace}, 1, 0);
    checked_int(op, "workspace.size(0)", bytes, needed);
  } else {
    bytes = needed;
    own = torch::stable::new_zeros(pool, {&needed, 1}, ScalarType::Byte);
  }
  const Tensor& used = workspace ? *workspace : *own;
  return checked_data({op, "workspace", used}, ScalarType::Byte, {{"bytes", bytes}}, pool,
                      kRowAlignment);
}

void attend(const char* op, const CacheTensors& cache, const WindowTensors& windows,
            const AttentionTensors& tensors, const Tensor& o, const OptionalTensor& lse,
            const OptionalTensor& workspace) {
  AttentionParams params = attention_params(op, cache, windows, tensors);
  const Extent batch{"batch", params.batch}, queries{"q_len", params.q_len},
      heads{"num_qo_heads", params.num_qo_heads}, dims{"head_dim", params.format.head_dim};
  params.o = static_cast<uint16_t*>(checked_data({op, "o", o}, ScalarType::BFloat16,
                                                 {batch, queries, heads, dims}, cache.pool,
                                                 kRowAlignment));
  if (lse) {
    params.lse = static_cast<float*>(checked_data({op, "lse", *lse}, ScalarType::Float,
                                                  {batch, queries, heads}, cache.pool,
                                                  static_cast<int>(alignof(float))));
  }
  if (params.batch == 0) return;
  if (cache.pool.is_cuda()) {
    OptionalTensor own;
    int64_t bytes = 0;
    void* const memory = workspace_for(op, params, cache.pool, workspace, own, bytes);
    attend_on_device(op, params, memory, bytes, cache.pool);
    return;
  }
  check_attention_tables(op, params, table_limits(cache, windows));
  attend_on_host(params);
}

void decode_attention_out(const Tensor& q, const Recipe& recipe, const Format& format,
                          const Tensor& pool, const Tensor& block_table, const Tensor& history_len,
                          const Tensor& window_k, const Tensor& window_v, const Tensor& seq_lens,
                          const Tensor& o, const OptionalTensor& lse, double sm_scale,
                          const OptionalTensor& window_slot, const OptionalTensor& workspace,
                          const OptionalTensor& first_position) {
  attend("decode_attention_out", {recipe, format, pool, block_table, first_position},
         {window_k, window_v, window_slot}, {q, history_len, seq_lens, sm_scale}, o, lse,
         workspace);
}

std::tuple<Tensor, Tensor> decode_attention(const Tensor& q, const Recipe& recipe,
                                            const Format& format, const Tensor& pool,
                                            const Tensor& block_table, const Tensor& history_len,
                                            const Tensor& window_k, const Tensor& window_v,
                                            const Tensor& seq_lens, double sm_scale,
                                            const OptionalTensor& window_slot,
                                            const OptionalTensor& workspace,
                                            const OptionalTensor& first_position) {
  constexpr const char* kOp = "decode_attention";
  const int64_t batch = checked_size({kOp, "q", q}, 4, 0);
  const std::array<int64_t, 4> rows = {batch, q.size(1), q.size(2), q.size(3)};
  const Tensor o = torch::stable::new_empty(q, {rows.data(), 4}, ScalarType::BFloat16);
  const Tensor lse = torch::stable::new_empty(q, {rows.data(), 3}, ScalarType::Float);
  attend(kOp, {recipe, format, pool, block_table, first_position},
         {window_k, window_v, window_slot}, {q, history_len, seq_lens, sm_scale}, o, lse,
         workspace);
  return {o, lse};
}

int64_t decode_attention_workspace_size(const Tensor& pool, int64_t head_dim) {
  constexpr const char* kOp = "decode_attention_workspace_size";
  AttentionParams params;
  params.format.head_dim = checked_int(kOp, "head_dim", head_dim, 8, kMaxHeadDim);
  return pool.is_cuda() ? device_workspace_bytes(kOp, params, pool) : 0;
}

void dequantize_history(const Recipe& recipe, const Format& format, const Tensor& pool,
                        const Tensor& block_table, const Tensor& history_len, const Tensor& k,
                        const Tensor& v, const OptionalTensor& first_position,
                        int64_t first_token) {
  constexpr const char* kOp = "dequantize_history";
  const HistoryRowsParams params = history_params(
      kOp, {recipe, format, pool, block_table, first_position}, {history_len, k, v, first_token});
  if (params.batch == 0 || params.tokens == 0) return;
  if (pool.is_cuda()) {
    dequantize_on_device(kOp, params, pool);
    return;
  }
  check_history_tables(kOp, params, {.num_pages = pool.size(0), .max_pages = block_table.size(1)});
  dequantize_on_host(params);
}

void step_numbers(const std::vector<int64_t>& windows, const Tensor& query_start_loc,
                  const Tensor& seq_lens, const Tensor& slot_mapping, const Tensor& window_slot,
                  const Tensor& drafts, const Tensor& starts, const Tensor& numbers,
                  const Tensor& history, const Tensor& written) {
  constexpr const char* kOp = "step_numbers";
  const StepParams params =
      step_params(kOp, {windows, query_start_loc, seq_lens, slot_mapping, window_slot, drafts,
                        starts, numbers, history, written});
  if (numbers.is_cuda()) {
    step_numbers_on_device(kOp, params, numbers);
    return;
  }
  check_step_tables(kOp, params, {.num_slots = history.size(0)});
  step_numbers_on_host(params);
}

int64_t page_bytes_of_format(int64_t head_dim, const Format& format) {
  return page_bytes(checked_format("page_bytes", head_dim, format).page);
}

void register_tensor_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("quantize_append", TORCH_BOX(&quantize_append));
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
  m.impl("decode_attention_out", TORCH_BOX(&decode_attention_out));
  m.impl("decode_attention_workspace_size", TORCH_BOX(&decode_attention_workspace_size));
  m.impl("dequantize_history", TORCH_BOX(&dequantize_history));
  m.impl("step_numbers", TORCH_BOX(&step_numbers));
}

}  // namespace

STABLE_TORCH_LIBRARY(oscar_int2, m) {
  m.def(
      "quantize_append(Tensor[] recipe, int[] format, Tensor(a!) pool, Tensor block_table, "
      "Tensor(b!) window_k, Tensor(c!) window_v, Tensor k, Tensor v, Tensor query_start_loc, "
      "Tensor old_len, Tensor old_history, Tensor new_history, Tensor(d!) status, *, "
      "Tensor? window_slot=None, Tensor? first_position=None, int? max_new_rows=None, "
      "int? max_new_history=None, Tensor? read_history=None) -> ()");
  m.def(
      "decode_attention(Tensor q, Tensor[] recipe, int[] format, Tensor pool, Tensor block_table, "
      "Tensor history_len, Tensor window_k, Tensor window_v, Tensor seq_lens, *, float sm_scale, "
      "Tensor? window_slot=None, Tensor(a!)? workspace=None, Tensor? first_position=None) "
      "-> (Tensor o, Tensor lse)");
  m.def(
      "decode_attention_out(Tensor q, Tensor[] recipe, int[] format, Tensor pool, "
      "Tensor block_table, Tensor history_len, Tensor window_k, Tensor window_v, Tensor seq_lens, "
      "Tensor(a!) o, Tensor(b!)? lse=None, *, float sm_scale, Tensor? window_slot=None, "
      "Tensor(c!)? workspace=None, Tensor? first_position=None) -> ()");
  m.def("decode_attention_workspace_size(Tensor pool, int head_dim) -> int");
  m.def(
      "dequantize_history(Tensor[] recipe, int[] format, Tensor pool, Tensor block_table, "
      "Tensor history_len, Tensor(a!) k, Tensor(b!) v, *, Tensor? first_position=None, "
      "int first_token=0) -> ()");
  m.def(
      "step_numbers(int[] windows, Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, "
      "Tensor window_slot, Tensor drafts, Tensor(a!) starts, Tensor(b!) numbers, "
      "Tensor(c!) history, Tensor(d!) written) -> ()");
  m.def("page_bytes(int head_dim, int[] format) -> int");
  m.def("recipe_names() -> str");
  m.def("format_names() -> str");
  m.def("step_names() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CPU, m) { register_tensor_operators(m); }
STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CUDA, m) { register_tensor_operators(m); }
STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CompositeImplicitAutograd, m) {
  m.impl("page_bytes", TORCH_BOX(&page_bytes_of_format));
  m.impl("recipe_names", TORCH_BOX(&recipe_names));
  m.impl("format_names", TORCH_BOX(&format_names));
  m.impl("step_names", TORCH_BOX(&step_names));
}

}  // namespace oscar::torch_ops
