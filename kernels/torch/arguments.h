// The tensors of the operators, checked, as the structs that the CPU references and the kernels
// take.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "oscar/cache/steps.h"
#include "recipe.h"

namespace oscar::torch_ops {

using OptionalTensor = std::optional<Tensor>;

// A layer's recipe: the tensors of its keys, then those of its values, each in the order of
// visit_recipe (recipe.h); missing ones are empty. An empty list is a layer without any.
using Recipe = std::vector<Tensor>;
// A format: the numbers of visit_format.
using Format = std::vector<int64_t>;

// The cache of one layer, as the operators see it. Like the other structs it only refers to the
// arguments of the call.
struct CacheTensors {
  const Recipe& recipe;
  const Format& format;
  const Tensor& pool;                    // uint8 [num_pages, num_kv_heads, page_bytes]
  const Tensor& block_table;             // int32 [batch, pages at most], any stride between rows
  const OptionalTensor& first_position;  // int32 [batch]; none: 0
};

struct WindowTensors {
  const Tensor& k;             // bf16 [slots, num_kv_heads, sink + ring tokens, head_dim]
  const Tensor& v;             // the same
  const OptionalTensor& slot;  // int32 [batch]; none: the request's index
};

struct AttentionTensors {
  const Tensor& q;            // bf16 [batch, q_len, num_qo_heads, head_dim]
  const Tensor& history_len;  // int32 [batch]
  const Tensor& seq_lens;     // int32 [batch]
  double sm_scale = 1.0;
};

struct AppendTensors {
  const Tensor& k;  // bf16 [rows, num_kv_heads, head_dim], any strides between rows and heads
  const Tensor& v;  // the same
  const Tensor& query_start_loc;       // int32 [batch + 1]
  const Tensor& old_len;               // int32 [batch]
  const Tensor& old_history;           // int32 [batch]
  const Tensor& new_history;           // int32 [batch]
  const OptionalTensor& read_history;  // int32 [batch]; none: new_history
  const Tensor& status;                // int32 [slots], RowStatus bits
};

struct HistoryTensors {
  const Tensor& history_len;  // int32 [batch]
  const Tensor& k;  // bf16 or float32 [batch, tokens, num_kv_heads, head_dim], rows may lie apart
  const Tensor& v;  // the same
  int64_t first_token = 0;
};

struct StepTensors {
  const std::vector<int64_t>& windows;  // sink_tokens, recent_tokens, demote_block
  const Tensor& query_start_loc;        // int32 [requests + 1]
  const Tensor& seq_lens;               // int32 [requests]
  const Tensor& slot_mapping;           // int64 [rows at least]
  const Tensor& window_slot;            // int32 [requests with a window]
  const Tensor& drafts;                 // int32, the same
  const Tensor& starts;                 // int32 [requests at most + 1]
  const Tensor& numbers;                // int32 [kStepNumbers at least, requests at most]
  const Tensor& history;                // int32 [windows]
  const Tensor& written;                // int32 [windows]
};

// bf16 rows [rows, num_heads, head_dim] that may lie apart, as slices of a fused tensor do. Throws
// Error unless each is 16-byte aligned and contiguous in itself.
HeadRows head_rows(const Argument& argument, const Extent& rows, const Extent& heads,
                   const Extent& dims, const Tensor& neighbour);

// Throws Error for numbers that make no page.
GivenFormat checked_format(const char* op, int64_t head_dim, const Format& format);

// What a call reads of a recipe.
enum class RecipeUse { kBasis, kKeyCenters, kWriting };
// Checks those properties, and takes their addresses. All tensors lie on the device of `neighbour`.
LayerRecipe layer_recipe(const char* op, const Recipe& recipe, RecipeUse use, int num_kv_heads,
                         int head_dim, const Tensor& neighbour);

// "forward partner ...": the properties of a side in their order; and the fields of a format.
std::string recipe_names();
std::string format_names();
// The rows of StepTensors::numbers.
std::string step_names();

// Without o and lse. All tensors lie on the device of the pool.
AttentionParams attention_params(const char* op, const CacheTensors& cache,
                                 const WindowTensors& windows, const AttentionTensors& tensors);

AppendParams append_params(const char* op, const CacheTensors& cache, const WindowTensors& windows,
                           const AppendTensors& tensors);

HistoryRowsParams history_params(const char* op, const CacheTensors& cache,
                                 const HistoryTensors& tensors);

// All tensors lie on the device of `numbers`.
StepParams step_params(const char* op, const StepTensors& tensors);

}  // namespace oscar::torch_ops
