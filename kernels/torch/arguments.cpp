// Tensors to parameters of a call.
#include "arguments.h"

#include <string>
#include <type_traits>
#include <utility>

namespace oscar::torch_ops {
namespace {

int32_t* int_array(const char* op, const char* name, const Tensor& t, const Extent& length,
                   const Tensor& neighbour) {
  return static_cast<int32_t*>(
      checked_data({op, name, t}, ScalarType::Int, {length}, neighbour, alignof(int32_t)));
}

// Pool and block table, without lengths.
PagedHistory paged_history(const char* op, const Tensor& pool, const Tensor& block_table,
                           const PageFormat& format, int num_kv_heads, int64_t batch) {
  PagedHistory out;
  out.pool = static_cast<uint8_t*>(checked_data(
      {op, "pool", pool}, ScalarType::Byte,
      {{"num_pages"}, {"num_kv_heads", num_kv_heads}, {"page_bytes", page_bytes(format)}}, pool,
      kRowAlignment));
  out.block_table = static_cast<const int32_t*>(
      checked_view({op, "block_table", block_table}, ScalarType::Int,
                   {{"batch", batch}, {"pages at most"}}, pool, alignof(int32_t)));
  const int64_t pages = block_table.size(1);
  out.table_stride = batch > 1 ? block_table.stride(0) : pages;
  if ((pages > 1 && block_table.stride(1) != 1) || out.table_stride < pages) {
    refuse(op, "entries of a request do not follow each other", "block_table",
           "strides [any from " + std::to_string(pages) + ", 1]", stride_text(block_table),
           "call .contiguous() first");
  }
  return out;
}

ExactWindows exact_windows(const char* op, const WindowTensors& t, const GivenFormat& format,
                           int num_kv_heads, int64_t batch, const Tensor& pool) {
  ExactWindows out;
  const int64_t slots = checked_size({op, "window_k", t.k}, 4, 0);
  const int64_t tokens = t.k.size(2);
  const auto window = [&](const char* name, const Tensor& rows) {
    return static_cast<uint16_t*>(checked_data({op, name, rows}, ScalarType::BFloat16,
                                               {{"slots", slots},
                                                {"num_kv_heads", num_kv_heads},
                                                {"sink_tokens + ring_tokens", tokens},
                                                {"head_dim", format.page.head_dim}},
                                               pool, kRowAlignment));
  };
  out.k = window("window_k", t.k);
  out.v = window("window_v", t.v);
  const int window_tokens = checked_int(op, "window_k.size(2)", tokens, 1);
  out.sink_tokens = checked_int(op, "sink_tokens", format.sink_tokens, 0, window_tokens - 1);
  out.ring_tokens = window_tokens - out.sink_tokens;
  if (t.slot) {
    out.slot = int_array(op, "window_slot", *t.slot, {"batch", batch}, pool);
  } else if (slots < batch) {
    refuse(op, "fewer window slots than requests", "window_k", "at least " + std::to_string(batch),
           std::to_string(slots), "pass window_slot to say which slot a request has");
  }
  return out;
}

bool is_read(RecipeUse use, HeadShape shape, const std::string& name) {
  const bool basis = name == "forward" || name == "partner" || name == "mean";
  switch (use) {
    case RecipeUse::kBasis:
      return basis;
    case RecipeUse::kKeyCenters:
      return shape == HeadShape::kKeyCenters;
    case RecipeUse::kWriting:
      break;
  }
  return !basis;
}

template <typename Number>
constexpr ScalarType dtype_of() {
  return std::is_same_v<Number, float> ? ScalarType::Float : ScalarType::Byte;
}

// Takes the tensors of one side, from `first` on in the list.
struct SideReader {
  const char* op;
  const Recipe& recipe;
  const char* side;
  size_t next;
  RecipeUse use;
  int num_kv_heads, head_dim;
  const Tensor& neighbour;

  template <typename Number>
  void operator()(const char* name, HeadShape shape, const Number*& to) {
    const Tensor& t = recipe[next++];
    if (!is_read(use, shape, name) || t.numel() == 0) return;
    const Extent heads{"num_kv_heads", num_kv_heads}, dims{"head_dim", head_dim};
    const std::string whole = std::string(side) + "." + name;
    const Argument argument{op, whole.c_str(), t};
    const ScalarType dtype = dtype_of<Number>();
    void* data = nullptr;
    if (shape == HeadShape::kNumber) {
      data = checked_data(argument, dtype, {heads}, neighbour, alignof(Number));
    } else if (shape == HeadShape::kVector) {
      data = checked_data(argument, dtype, {heads, dims}, neighbour, kRowAlignment);
    } else {
      data = checked_data(argument, dtype, {heads, dims, dims}, neighbour, kRowAlignment);
    }
    to = static_cast<const Number*>(data);
  }

  void operator()(const char* name, HeadShape shape, KeyCenters& to) {
    const Tensor& t = recipe[next++];
    if (!is_read(use, shape, name) || t.numel() == 0) return;
    const std::string whole = std::string(side) + "." + name;
    const Argument argument{op, whole.c_str(), t};
    if (std::string(side) != "key") {
      refuse(op, "only keys have centers", whole, "an empty tensor", shape_text(t));
    }
    const int64_t segments = checked_size(argument, 4, 0);
    const int64_t places = kMaxInt / (int64_t{num_kv_heads} * kCenters * head_dim);
    to.segments = checked_int(op, (whole + ".size(0)").c_str(), segments, 1, places);
    to.rows = static_cast<const uint16_t*>(checked_data(argument, ScalarType::BFloat16,
                                                        {{"segments", segments},
                                                         {"num_kv_heads", num_kv_heads},
                                                         {"centers", kCenters},
                                                         {"head_dim", head_dim}},
                                                        neighbour, kRowAlignment));
  }
};

const int32_t* first_positions(const char* op, const OptionalTensor& t, const KeyCenters& centers,
                               int64_t batch, const Tensor& pool) {
  if (!t) return nullptr;
  if (!centers.rows) {
    refuse(op, "only key centers depend on positions", "first_position",
           "key.key_centers in the recipe", "none");
  }
  return int_array(op, "first_position", *t, {"batch", batch}, pool);
}

}  // namespace

HeadRows head_rows(const Argument& argument, const Extent& rows, const Extent& heads,
                   const Extent& dims, const Tensor& neighbour) {
  const Tensor& t = argument.tensor;
  constexpr int64_t kAligned = kRowAlignment / sizeof(uint16_t);
  HeadRows out;
  out.data = static_cast<const uint16_t*>(
      checked_view(argument, ScalarType::BFloat16, {rows, heads, dims}, neighbour, kRowAlignment));
  if (t.size(0) > 1) out.row_stride = t.stride(0);
  if (t.size(1) > 1) out.head_stride = t.stride(1);
  if (t.stride(2) != 1 || out.row_stride % kAligned != 0 || out.head_stride % kAligned != 0) {
    refuse(argument.op, "rows cannot be read where they lie", argument.name,
           "strides of multiples of " + std::to_string(kAligned) + " elements, and 1 in a row",
           stride_text(t), "call .contiguous() first");
  }
  return out;
}

GivenFormat checked_format(const char* op, int64_t head_dim, const Format& format) {
  GivenFormat out;
  size_t next = 0;
  const auto number = [&](const char* name, int64_t most) {
    if (next >= format.size()) {
      refuse(op, "too few numbers", "format", format_names(), std::to_string(format.size()));
    }
    return checked_int(op, name, format[next++], 0, most);
  };
  visit_format(out, [&](const char* name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    constexpr int64_t kLast = static_cast<int64_t>(MetadataDtype::kFp32);
    field = static_cast<Field>(number(name, std::is_enum_v<Field> ? kLast : kMaxInt));
  });
  if (next != format.size()) {
    refuse(op, "too many numbers", "format", format_names(), std::to_string(format.size()));
  }
  int& group = out.page.rows.quant_group_size;
  out.page.head_dim = checked_int(op, "head_dim", head_dim, 8, kMaxHeadDim);
  if (head_dim % 8 != 0) {
    refuse(op, "unsupported size", "head_dim", "a multiple of 8", std::to_string(head_dim));
  }
  if (group == 0) group = out.page.head_dim;
  if (head_dim % group != 0) {
    refuse(op, "unsupported size", "quant_group_size",
           "a divisor of head_dim " + std::to_string(head_dim), std::to_string(group));
  }
  return out;
}

LayerRecipe layer_recipe(const char* op, const Recipe& recipe, RecipeUse use, int num_kv_heads,
                         int head_dim, const Tensor& neighbour) {
  LayerRecipe out;
  if (recipe.empty()) return out;
  size_t count = 0;
  visit_recipe(out.key, [&](const auto&...) { ++count; });
  if (recipe.size() != 2 * count) {
    refuse(op, "wrong number of tensors", "recipe",
           std::to_string(count) + " of keys, then as many of values: " + recipe_names(),
           std::to_string(recipe.size()), "empty tensors stand for what a layer does not have");
  }
  visit_recipe(out.key, SideReader{op, recipe, "key", 0, use, num_kv_heads, head_dim, neighbour});
  visit_recipe(out.value,
               SideReader{op, recipe, "value", count, use, num_kv_heads, head_dim, neighbour});
  for (const auto& [name, side] : {std::pair{"key", &out.key}, std::pair{"value", &out.value}}) {
    if (!side->scale_correction || side->metric) continue;
    refuse(op, "corrections by head need the metrics", std::string(name) + ".scale_correction",
           std::string(name) + ".metric beside it", "none",
           "matrices of heads that do not correct by the metric are not read");
  }
  return out;
}

std::string recipe_names() {
  std::string names;
  const SideRecipe recipe;
  visit_recipe(recipe, [&](const char* name, const auto&...) { names += std::string(" ") + name; });
  return names.substr(1);
}

std::string format_names() {
  std::string names;
  const GivenFormat format;
  visit_format(format, [&](const char* name, const auto&) { names += std::string(" ") + name; });
  return names.substr(1);
}

AttentionParams attention_params(const char* op, const CacheTensors& cache,
                                 const WindowTensors& windows, const AttentionTensors& t) {
  const Tensor& pool = cache.pool;
  const int64_t batch = checked_size({op, "q", t.q}, 4, 0);
  AttentionParams p;
  const GivenFormat format = checked_format(op, t.q.size(3), cache.format);
  p.format = format.page;
  p.batch = checked_int(op, "q.size(0)", batch, 0);
  p.q_len = checked_int(op, "q.size(1)", t.q.size(1), 1);
  p.num_qo_heads = checked_int(op, "q.size(2)", t.q.size(2), 1);
  p.num_kv_heads = checked_int(op, "pool.size(1)", checked_size({op, "pool", pool}, 3, 1), 1);
  if (p.num_qo_heads % p.num_kv_heads != 0) {
    refuse(op, "query heads do not share the KV heads evenly", "q",
           "num_qo_heads a multiple of num_kv_heads " + std::to_string(p.num_kv_heads),
           std::to_string(p.num_qo_heads));
  }
  p.history = paged_history(op, pool, cache.block_table, p.format, p.num_kv_heads, batch);
  p.windows = exact_windows(op, windows, format, p.num_kv_heads, batch, pool);
  p.centers = layer_recipe(op, cache.recipe, RecipeUse::kKeyCenters, p.num_kv_heads,
                           p.format.head_dim, pool)
                  .key.key_centers;
  p.centers.first_position = first_positions(op, cache.first_position, p.centers, batch, pool);
  p.history.history_len = int_array(op, "history_len", t.history_len, {"batch", batch}, pool);
  p.seq_lens = int_array(op, "seq_lens", t.seq_lens, {"batch", batch}, pool);
  p.q = static_cast<const uint16_t*>(checked_data({op, "q", t.q}, ScalarType::BFloat16,
                                                  {{"batch", batch},
                                                   {"q_len", p.q_len},
                                                   {"num_qo_heads", p.num_qo_heads},
                                                   {"head_dim", p.format.head_dim}},
                                                  pool, kRowAlignment));
  p.sm_scale = static_cast<float>(t.sm_scale);
  return p;
}

AppendParams append_params(const char* op, const CacheTensors& cache, const WindowTensors& windows,
                           const AppendTensors& t) {
  const Tensor& pool = cache.pool;
  const int64_t rows = checked_size({op, "k", t.k}, 3, 0);
  const int64_t batch = checked_size({op, "old_len", t.old_len}, 1, 0);
  AppendParams p;
  const GivenFormat format = checked_format(op, t.k.size(2), cache.format);
  p.format = format.page;
  p.batch = checked_int(op, "old_len.size(0)", batch, 0);
  checked_int(op, "k.size(0)", rows, 0);
  p.num_kv_heads = checked_int(op, "k.size(1)", t.k.size(1), 1);
  p.history = paged_history(op, pool, cache.block_table, p.format, p.num_kv_heads, batch);
  p.windows = exact_windows(op, windows, format, p.num_kv_heads, batch, pool);
  const LayerRecipe recipe =
      layer_recipe(op, cache.recipe, RecipeUse::kWriting, p.num_kv_heads, p.format.head_dim, pool);
  p.key = writer_of(recipe.key);
  p.value = writer_of(recipe.value);
  p.centers = recipe.key.key_centers;
  p.centers.first_position = first_positions(op, cache.first_position, p.centers, batch, pool);
  const Extent heads{"num_kv_heads", p.num_kv_heads}, dims{"head_dim", p.format.head_dim};
  const Extent new_rows{"new rows", rows};
  p.k = head_rows({op, "k", t.k}, new_rows, heads, dims, pool);
  p.v = head_rows({op, "v", t.v}, new_rows, heads, dims, pool);
  p.query_start_loc =
      int_array(op, "query_start_loc", t.query_start_loc, {"batch + 1", batch + 1}, pool);
  p.old_len = int_array(op, "old_len", t.old_len, {"batch", batch}, pool);
  p.old_history = int_array(op, "old_history", t.old_history, {"batch", batch}, pool);
  p.new_history = int_array(op, "new_history", t.new_history, {"batch", batch}, pool);
  if (t.read_history) {
    p.read_history = int_array(op, "read_history", *t.read_history, {"batch", batch}, pool);
  }
  p.status = int_array(op, "status", t.status, {"slots", windows.k.size(0)}, pool);
  return p;
}

HistoryRowsParams history_params(const char* op, const CacheTensors& cache,
                                 const HistoryTensors& t) {
  constexpr int64_t kMostTokens = (1 << 30) - 1;
  const Tensor& pool = cache.pool;
  const int64_t batch = checked_size({op, "k", t.k}, 4, 0), tokens = t.k.size(1);
  HistoryRowsParams p;
  const GivenFormat format = checked_format(op, t.k.size(3), cache.format);
  p.format = format.page;
  p.sink_tokens = checked_int(op, "sink_tokens", format.sink_tokens, 0, kMostTokens);
  p.batch = checked_int(op, "k.size(0)", batch, 0);
  p.tokens = checked_int(op, "k.size(1)", tokens, 0, kMostTokens);
  p.num_kv_heads = checked_int(op, "k.size(2)", t.k.size(2), 1);
  p.first_token = checked_int(op, "first_token", t.first_token, 0, kMostTokens);
  p.history = paged_history(op, pool, cache.block_table, p.format, p.num_kv_heads, batch);
  p.history.history_len = int_array(op, "history_len", t.history_len, {"batch", batch}, pool);
  p.centers = layer_recipe(op, cache.recipe, RecipeUse::kKeyCenters, p.num_kv_heads,
                           p.format.head_dim, pool)
                  .key.key_centers;
  p.centers.first_position = first_positions(op, cache.first_position, p.centers, batch, pool);
  p.bf16 = t.k.scalar_type() == ScalarType::BFloat16;
  if (!p.bf16 && t.k.scalar_type() != ScalarType::Float) {
    refuse(op, "wrong dtype", "k", "BFloat16 or Float",
           torch::headeronly::toString(t.k.scalar_type()));
  }
  const int64_t aligned = kRowAlignment / (p.bf16 ? 2 : 4);
  const auto rows_out = [&](const char* name, const Tensor& tensor) {
    RowsOut out;
    out.data = checked_view({op, name, tensor}, t.k.scalar_type(),
                            {{"batch", batch},
                             {"tokens", tokens},
                             {"num_kv_heads", p.num_kv_heads},
                             {"head_dim", p.format.head_dim}},
                            pool, kRowAlignment);
    if (batch > 1) out.batch_stride = tensor.stride(0);
    if (tokens > 1) out.token_stride = tensor.stride(1);
    if (p.num_kv_heads > 1) out.head_stride = tensor.stride(2);
    if (tensor.stride(3) != 1 || out.batch_stride % aligned != 0 ||
        out.token_stride % aligned != 0 || out.head_stride % aligned != 0) {
      refuse(op, "rows cannot be written where they lie", name,
             "strides of multiples of " + std::to_string(aligned) + " elements, and 1 in a row",
             stride_text(tensor));
    }
    return out;
  };
  p.k = rows_out("k", t.k);
  p.v = rows_out("v", t.v);
  return p;
}

std::string step_names() {
  static_assert(kStepNumbers == 7);
  return "old_len seq_lens old_history new_history old_written new_written window_slot";
}

StepParams step_params(const char* op, const StepTensors& t) {
  const Tensor& device = t.numbers;
  const int64_t requests = checked_size({op, "seq_lens", t.seq_lens}, 1, 0);
  const int64_t held = checked_size({op, "window_slot", t.window_slot}, 1, 0);
  const int64_t most = checked_size({op, "numbers", t.numbers}, 2, 1);
  const int64_t windows = checked_size({op, "history", t.history}, 1, 0);
  StepParams p;
  p.requests = checked_int(op, "seq_lens.size(0)", requests, 0, most);
  p.held = checked_int(op, "window_slot.size(0)", held, 0, requests);
  checked_int(op, "numbers.size(0)", t.numbers.size(0), kStepNumbers);
  p.stride = most;
  p.mapped = checked_size({op, "slot_mapping", t.slot_mapping}, 1, 0);
  p.query_start_loc =
      int_array(op, "query_start_loc", t.query_start_loc, {"requests + 1", requests + 1}, device);
  p.seq_lens = int_array(op, "seq_lens", t.seq_lens, {"requests", requests}, device);
  p.slot_mapping = static_cast<const int64_t*>(checked_data({op, "slot_mapping", t.slot_mapping},
                                                            ScalarType::Long, {{"rows"}}, device,
                                                            alignof(int64_t)));
  const Extent with_window{"requests with a window", held};
  p.window_slot = int_array(op, "window_slot", t.window_slot, with_window, device);
  p.drafts = int_array(op, "drafts", t.drafts, with_window, device);
  p.starts = int_array(op, "starts", t.starts, {"requests at most + 1", most + 1}, device);
  p.numbers = static_cast<int32_t*>(checked_data({op, "numbers", t.numbers}, ScalarType::Int,
                                                 {{"numbers"}, {"requests at most", most}}, device,
                                                 alignof(int32_t)));
  p.history = int_array(op, "history", t.history, {"windows", windows}, device);
  p.written = int_array(op, "written", t.written, {"windows", windows}, device);
  if (t.windows.size() != 3) {
    refuse(op, "wrong number of lengths", "windows", "sink_tokens, recent_tokens, demote_block",
           std::to_string(t.windows.size()));
  }
  constexpr int64_t kMostTokens = 1 << 30;
  p.sink_tokens = checked_int(op, "sink_tokens", t.windows[0], 0, kMostTokens);
  p.recent_tokens = checked_int(op, "recent_tokens", t.windows[1], 0, kMostTokens);
  p.demote_block = checked_int(op, "demote_block", t.windows[2], 1, kMostTokens);
  return p;
}

}  // namespace oscar::torch_ops
