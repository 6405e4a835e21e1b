// Tensors to parameters of a call.
#include "arguments.h"

#include <limits>

namespace oscar::torch_ops {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

MetadataDtype metadata_dtype(const char* op, std::optional<ScalarType> dtype) {
  switch (dtype.value_or(ScalarType::Half)) {
    case ScalarType::Half:
      return MetadataDtype::kFp16;
    case ScalarType::BFloat16:
      return MetadataDtype::kBf16;
    case ScalarType::Float:
      return MetadataDtype::kFp32;
    default:
      refuse(op, "no such metadata", "metadata_dtype", "float16, bfloat16 or float32",
             torch::headeronly::toString(*dtype));
  }
}

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
      {{"num_pages"}, {"num_kv_heads", num_kv_heads}, {"chunk_bytes", chunk_bytes(format)}}, pool,
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

// Pool, block table, windows and key centres. head_dim, num_kv_heads and batch come from the rows
// of the call.
struct CachePointers {
  PagedHistory history;
  ExactWindows windows;
  KeyCentres centres;
};

KeyCentres key_centres(const char* op, const OptionalTensor& centres,
                       const OptionalTensor& first_position, const Tensor& pool,
                       const PageFormat& format, int num_kv_heads, int64_t batch) {
  KeyCentres out;
  if (!centres) {
    if (first_position) {
      refuse(op, "only key centres depend on positions", "first_position", "key_centres beside it",
             "none");
    }
    return out;
  }
  const Tensor& rows = *centres;
  const int64_t segments = checked_size({op, "key_centres", rows}, 4, 0);
  const int64_t places =
      std::numeric_limits<int>::max() / (int64_t{num_kv_heads} * kCentres * format.head_dim);
  out.segments = checked_int(op, "key_centres.size(0)", segments, 1, places);
  out.rows =
      static_cast<const uint16_t*>(checked_data({op, "key_centres", rows}, ScalarType::BFloat16,
                                                {{"segments", segments},
                                                 {"num_kv_heads", num_kv_heads},
                                                 {"centres", kCentres},
                                                 {"head_dim", format.head_dim}},
                                                pool, kRowAlignment));
  if (first_position) {
    out.first_position = int_array(op, "first_position", *first_position, {"batch", batch}, pool);
  }
  return out;
}

CachePointers cache_pointers(const char* op, const CacheTensors& cache, const PageFormat& format,
                             int num_kv_heads, int64_t batch) {
  const Tensor& pool = cache.pool;
  CachePointers out;
  out.history = paged_history(op, pool, cache.block_table, format, num_kv_heads, batch);

  const int64_t slots = checked_size({op, "window_k", cache.window_k}, 4, 0);
  const int64_t tokens = cache.window_k.size(2);
  const auto window = [&](const char* name, const Tensor& t) {
    return static_cast<uint16_t*>(checked_data({op, name, t}, ScalarType::BFloat16,
                                               {{"slots", slots},
                                                {"num_kv_heads", num_kv_heads},
                                                {"sink_tokens + ring_tokens", tokens},
                                                {"head_dim", format.head_dim}},
                                               pool, kRowAlignment));
  };
  out.windows.k = window("window_k", cache.window_k);
  out.windows.v = window("window_v", cache.window_v);
  const int window_tokens = checked_int(op, "window_k.size(2)", tokens, 1, kMaxInt);
  out.windows.sink_tokens = checked_int(op, "sink_tokens", cache.sink_tokens, 0, window_tokens - 1);
  out.windows.ring_tokens = window_tokens - out.windows.sink_tokens;
  if (cache.window_slot) {
    out.windows.slot = int_array(op, "window_slot", *cache.window_slot, {"batch", batch}, pool);
  } else if (slots < batch) {
    refuse(op, "fewer window slots than requests", "window_k", "at least " + std::to_string(batch),
           std::to_string(slots), "pass window_slot to say which slot a request has");
  }
  out.centres =
      key_centres(op, cache.key_centres, cache.first_position, pool, format, num_kv_heads, batch);
  return out;
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

PageFormat page_format(const char* op, int64_t head_dim, const FormatArguments& format) {
  PageFormat out;
  out.head_dim = checked_int(op, "head_dim", head_dim, 8, kMaxHeadDim);
  if (out.head_dim % 8 != 0) {
    refuse(op, "unsupported size", "head_dim", "a multiple of 8", std::to_string(head_dim));
  }
  out.quant_group_size =
      checked_int(op, "quant_group_size", format.quant_group_size, 1, out.head_dim);
  if (out.head_dim % out.quant_group_size != 0) {
    refuse(op, "unsupported size", "quant_group_size",
           "a divisor of head_dim " + std::to_string(head_dim),
           std::to_string(out.quant_group_size));
  }
  out.metadata = metadata_dtype(op, format.metadata_dtype);
  return out;
}

AttentionParams attention_params(const char* op, const CacheTensors& cache,
                                 const FormatArguments& format, const AttentionTensors& t) {
  const Tensor& pool = cache.pool;
  const int64_t batch = checked_size({op, "q", t.q}, 4, 0);
  AttentionParams p;
  p.format = page_format(op, t.q.size(3), format);
  p.batch = checked_int(op, "q.size(0)", batch, 0, kMaxInt);
  p.q_len = checked_int(op, "q.size(1)", t.q.size(1), 1, kMaxInt);
  p.num_qo_heads = checked_int(op, "q.size(2)", t.q.size(2), 1, kMaxInt);
  p.num_kv_heads =
      checked_int(op, "pool.size(1)", checked_size({op, "pool", pool}, 3, 1), 1, kMaxInt);
  if (p.num_qo_heads % p.num_kv_heads != 0) {
    refuse(op, "query heads do not share the KV heads evenly", "q",
           "num_qo_heads a multiple of num_kv_heads " + std::to_string(p.num_kv_heads),
           std::to_string(p.num_qo_heads));
  }
  const CachePointers pointers = cache_pointers(op, cache, p.format, p.num_kv_heads, batch);
  p.history = pointers.history;
  p.windows = pointers.windows;
  p.centres = pointers.centres;
  p.history.history_len = int_array(op, "history_len", t.history_len, {"batch", batch}, pool);
  p.seq_len = int_array(op, "seq_len", t.seq_len, {"batch", batch}, pool);
  p.q = static_cast<const uint16_t*>(checked_data({op, "q", t.q}, ScalarType::BFloat16,
                                                  {{"batch", batch},
                                                   {"q_len", p.q_len},
                                                   {"num_qo_heads", p.num_qo_heads},
                                                   {"head_dim", p.format.head_dim}},
                                                  pool, kRowAlignment));
  p.sm_scale = static_cast<float>(t.sm_scale);
  return p;
}

AppendParams append_params(const char* op, const CacheTensors& cache, const FormatArguments& format,
                           const AppendTensors& t) {
  const Tensor& pool = cache.pool;
  const int64_t rows = checked_size({op, "k", t.k}, 3, 0);
  const int64_t batch = checked_size({op, "old_len", t.old_len}, 1, 0);
  AppendParams p;
  p.format = page_format(op, t.k.size(2), format);
  p.batch = checked_int(op, "old_len.size(0)", batch, 0, kMaxInt);
  checked_int(op, "k.size(0)", rows, 0, kMaxInt);
  p.num_kv_heads = checked_int(op, "k.size(1)", t.k.size(1), 1, kMaxInt);
  const CachePointers pointers = cache_pointers(op, cache, p.format, p.num_kv_heads, batch);
  p.history = pointers.history;
  p.windows = pointers.windows;
  p.centres = pointers.centres;
  const Extent heads{"num_kv_heads", p.num_kv_heads}, dims{"head_dim", p.format.head_dim};
  const Extent new_rows{"new rows", rows};
  p.k = head_rows({op, "k", t.k}, new_rows, heads, dims, pool);
  p.v = head_rows({op, "v", t.v}, new_rows, heads, dims, pool);
  p.rows_indptr = int_array(op, "rows_indptr", t.rows_indptr, {"batch + 1", batch + 1}, pool);
  p.old_len = int_array(op, "old_len", t.old_len, {"batch", batch}, pool);
  p.old_history = int_array(op, "old_history", t.old_history, {"batch", batch}, pool);
  p.new_history = int_array(op, "new_history", t.new_history, {"batch", batch}, pool);
  p.status = int_array(op, "status", t.status, {"slots", cache.window_k.size(0)}, pool);
  const auto floats = [&](const char* name, const OptionalTensor& tensor,
                          std::initializer_list<Extent> shape) -> const float* {
    if (!tensor) return nullptr;
    const int alignment = shape.size() > 1 ? kRowAlignment : static_cast<int>(alignof(float));
    return static_cast<const float*>(
        checked_data({op, name, *tensor}, ScalarType::Float, shape, pool, alignment));
  };
  p.key.clip_ratios = floats("clip_k", t.clip_k, {heads});
  p.value.clip_ratios = floats("clip_v", t.clip_v, {heads});
  p.key.feedback = floats("feedback_k", t.feedback_k, {heads, dims, dims});
  p.value.feedback = floats("feedback_v", t.feedback_v, {heads, dims, dims});
  p.key.metric = floats("metric_k", t.metric_k, {heads, dims, dims});
  p.value.metric = floats("metric_v", t.metric_v, {heads, dims, dims});
  const auto corrections = [&](const char* name, const OptionalTensor& tensor,
                               const float* metric) -> const uint8_t* {
    if (!tensor) return nullptr;
    if (!metric) {
      refuse(op, "corrections by head need the metrics", name, "metric_k or metric_v beside it",
             "none", "matrices of heads that do not correct by the metric are not read");
    }
    return static_cast<const uint8_t*>(
        checked_data({op, name, *tensor}, ScalarType::Byte, {heads}, pool, 1));
  };
  p.key.corrections = corrections("correction_k", t.correction_k, p.key.metric);
  p.value.corrections = corrections("correction_v", t.correction_v, p.value.metric);
  return p;
}

HistoryRowsParams history_params(const char* op, const FormatArguments& format,
                                 const HistoryTensors& t) {
  constexpr int64_t kMostTokens = (1 << 30) - 1;
  const Tensor& pool = t.pool;
  const int64_t batch = checked_size({op, "k", t.k}, 4, 0), tokens = t.k.size(1);
  HistoryRowsParams p;
  p.format = page_format(op, t.k.size(3), format);
  p.batch = checked_int(op, "k.size(0)", batch, 0, kMaxInt);
  p.tokens = checked_int(op, "k.size(1)", tokens, 0, kMostTokens);
  p.num_kv_heads = checked_int(op, "k.size(2)", t.k.size(2), 1, kMaxInt);
  p.first_token = checked_int(op, "first_token", t.first_token, 0, kMostTokens);
  p.sink_tokens = checked_int(op, "sink_tokens", t.sink_tokens, 0, kMostTokens);
  p.history = paged_history(op, pool, t.block_table, p.format, p.num_kv_heads, batch);
  p.history.history_len = int_array(op, "history_len", t.history_len, {"batch", batch}, pool);
  p.centres =
      key_centres(op, t.key_centres, t.first_position, pool, p.format, p.num_kv_heads, batch);
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

}  // namespace oscar::torch_ops
