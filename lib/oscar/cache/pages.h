// Pages of 64 tokens, where everything lies in one, and the CPU reference of what kernels do
// with them.
#pragma once

#include "oscar/cache/codec.h"

namespace oscar {

// Where every byte of the paged INT2 cache lies: pages, pools, block tables and exact windows.

inline constexpr int kPageTokens = 64;

// What a page of one KV head looks like:
//   K codes [64][d/4] | V codes [64][d/4] | (scale, zero)_K [64][groups][2] | the same for V
// Codes lie as PackOrder::kConsecutive says. With key centers the sign of a key row's first scale
// names its center (codec.h).
struct PageFormat {
  int head_dim = 128;   // 64, 128 or 256
  RowFormat rows = {};  // by this toolkit's rules
};

OSCAR_HOST_DEVICE inline int groups_per_row(const PageFormat& f) {
  return f.head_dim / f.rows.quant_group_size;
}
OSCAR_HOST_DEVICE inline int code_row_bytes(const PageFormat& f) { return f.head_dim / 4; }
OSCAR_HOST_DEVICE inline int metadata_row_bytes(const PageFormat& f) {
  return groups_per_row(f) * 2 * metadata_bytes(f.rows.metadata);
}
// Byte offsets inside a page. side: 0 = keys, 1 = values.
OSCAR_HOST_DEVICE inline int code_offset(const PageFormat& f, int side, int token) {
  return (side * kPageTokens + token) * code_row_bytes(f);
}
OSCAR_HOST_DEVICE inline int metadata_offset(const PageFormat& f, int side, int token) {
  return 2 * kPageTokens * code_row_bytes(f) + (side * kPageTokens + token) * metadata_row_bytes(f);
}
OSCAR_HOST_DEVICE inline int page_bytes(const PageFormat& f) {
  return 2 * kPageTokens * (code_row_bytes(f) + metadata_row_bytes(f));
}

// The INT2 history of a batch: pool [page][num_kv_heads][page_bytes] and a padded block table.
// Request b has history_len[b] INT2 tokens, and page p of them is block_table[b * table_stride +
// p]. Entries behind the pages in use may hold anything.
struct PagedHistory {
  uint8_t* pool = nullptr;               // 16-byte aligned
  const int32_t* block_table = nullptr;  // [batch][pages at most]
  int64_t table_stride = 0;              // entries from one request to the next
  const int32_t* history_len = nullptr;  // [batch]; append does not read it
};

OSCAR_HOST_DEVICE inline int64_t page_of_token(const PagedHistory& h, int b, int token) {
  return h.block_table[b * h.table_stride + token / kPageTokens];
}

// Exact bf16 rows in the same transformed, centered basis: the first sink_tokens positions, and a
// ring of ring_tokens rows for the positions that are not INT2 (yet). Row of position p:
// p while p < sink_tokens, else sink_tokens + (p - sink_tokens) % ring_tokens.
// ring_tokens >= recent + demote_block + the largest number of tokens appended at once in decode.
struct ExactWindows {
  uint16_t* k = nullptr;  // [slots][num_kv_heads][sink_tokens + ring_tokens][head_dim]
  uint16_t* v = nullptr;
  const int32_t* slot = nullptr;  // [batch] window slot of a request; null: the request's index
  int sink_tokens = 0;
  int ring_tokens = 0;
};

OSCAR_HOST_DEVICE inline int64_t slot_of(const ExactWindows& w, int request) {
  return w.slot ? w.slot[request] : request;
}

OSCAR_HOST_DEVICE inline int window_row(const ExactWindows& w, int position) {
  return position < w.sink_tokens ? position
                                  : w.sink_tokens + (position - w.sink_tokens) % w.ring_tokens;
}

OSCAR_HOST_DEVICE inline int64_t window_offset(const ExactWindows& w, int64_t slot, int head,
                                               int num_kv_heads, int row, int head_dim) {
  return (((slot * num_kv_heads + head) * (w.sink_tokens + w.ring_tokens)) + row) * head_dim;
}

// bf16 rows [rows][num_heads][head_dim], those of one head at one place together. Strides in
// elements.
struct HeadRows {
  const uint16_t* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;
};

OSCAR_HOST_DEVICE inline HeadRows contiguous_rows(const uint16_t* data, int num_heads,
                                                  int head_dim) {
  return {data, int64_t{num_heads} * head_dim, head_dim};
}
OSCAR_HOST_DEVICE inline const uint16_t* row_at(const HeadRows& rows, int64_t row, int head) {
  return rows.data + row * rows.row_stride + head * rows.head_stride;
}

// Number of INT2 tokens once `length` tokens are final: whole demote blocks older than the
// recent window. Length counts the newest query's own token (math 4.7).
OSCAR_HOST_DEVICE inline int history_for_length(int length, int sink_tokens, int recent_tokens,
                                                int demote_block) {
  const int beyond = length - sink_tokens - recent_tokens;
  return beyond <= 0 ? 0 : beyond / demote_block * demote_block;
}

// One call of decode attention. Positions of request b: [0, sink) exact, then history_len[b] INT2,
// then exact up to seq_lens[b]. Query i of q_len sits at seq_lens - q_len + i and sees the
// positions up to its own; one that sees none gives zeros and lse = -infinity. A request with
// seq_len 0 is an unused place of the batch: nothing else of it is read.
struct AttentionParams {
  PageFormat format;
  PagedHistory history;
  ExactWindows windows;
  KeyCenters centers = {};
  const int32_t* seq_lens = nullptr;  // [batch], in tokens, this step's tokens included
  const uint16_t* q = nullptr;        // bf16 [batch][q_len][num_qo_heads][head_dim], transformed
  uint16_t* o = nullptr;              // bf16, same shape, transformed and centered basis
  float* lse = nullptr;               // [batch][q_len][num_qo_heads] natural log; may be null
  float sm_scale = 1.0f;
  int batch = 0, q_len = 1, num_qo_heads = 0, num_kv_heads = 0;
};

// How the rows of one side are written, head by head; arrays in the memory of the pages.
struct SideWriter {
  float clip_ratio = 0.0f;               // of every head when `clip_ratios` is null; <= 0: off
  const float* clip_ratios = nullptr;    // [num_kv_heads]
  const uint8_t* corrections = nullptr;  // [num_kv_heads] ScaleCorrection; null: kMetric with a
                                         //   metric, else kNone
  const uint8_t* roundings = nullptr;    // [num_kv_heads] Rounding; null: kShaped with a feedback
                                         //   matrix, else kPlain
  const float* feedback = nullptr;       // U [num_kv_heads][d][d], needed by Rounding::kShaped
  const float* metric = nullptr;         // M [num_kv_heads][d][d], needed by kMetric
};

OSCAR_HOST_DEVICE inline RowRecipe head_recipe(const SideWriter& writer, int head) {
  RowRecipe recipe;
  recipe.clip_ratio = writer.clip_ratios ? writer.clip_ratios[head] : writer.clip_ratio;
  recipe.scale_correction = writer.corrections
                                ? static_cast<ScaleCorrection>(writer.corrections[head])
                            : writer.metric ? ScaleCorrection::kMetric
                                            : ScaleCorrection::kNone;
  recipe.rounding = writer.roundings  ? static_cast<Rounding>(writer.roundings[head])
                    : writer.feedback ? Rounding::kShaped
                                      : Rounding::kPlain;
  return recipe;
}

// One call of append: rows that enter the cache, and rows that leave the exact windows for INT2.
// Positions [old_len, new_len) are new; [sink + old_history, sink + new_history) become INT2,
// taken from the new rows or, for positions before old_len, from the windows; the other new rows
// go to the windows. The block table is the one after the append. Of a request without new rows and
// new history nothing is read.
//
// A row may get its page before it leaves the windows: with read_history, new rows behind the sink
// and read_history[b] INT2 tokens go to the windows too. Attention may read either.
//
// A row is refused when it is not finite, wherever it goes, or when its range does not fit the
// metadata of its page. The windows take it as it is. In a page its metadata becomes NaN, so that
// attention over it gives NaN from then on.
struct AppendParams {
  PageFormat format;
  PagedHistory history;
  ExactWindows windows;
  KeyCenters centers = {};
  HeadRows k, v;  // [total new rows][num_kv_heads], transformed, centered
  const int32_t* query_start_loc = nullptr;  // [batch + 1] into the new rows
  const int32_t* old_len = nullptr;          // [batch]
  const int32_t* old_history = nullptr;      // [batch] INT2 tokens before
  const int32_t* new_history = nullptr;      // [batch] INT2 tokens after
  const int32_t* read_history = nullptr;     // [batch] of these, those that no window holds; null:
                                             //   all
  SideWriter key, value;
  int* status = nullptr;  // [slots], RowStatus bits of refused rows or-ed in by window slot; may be
                          //   null
  int batch = 0, num_kv_heads = 0;
};

OSCAR_HOST_DEVICE inline const SideWriter& writer_of(const AppendParams& p, int side) {
  return side ? p.value : p.key;
}

// INT2 tokens of request b that no window holds after an append.
OSCAR_HOST_DEVICE inline int read_history_of(const AppendParams& p, int b) {
  return p.read_history ? p.read_history[b] : p.new_history[b];
}

// Where rows [batch][tokens][num_kv_heads][head_dim] of bf16 or fp32 go. Strides in elements.
struct RowsOut {
  void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
};

// INT2 tokens back as rows, in the basis of the cache, keys with their centers: tokens
// [first_token, min(first_token + tokens, history_len[b])) of request b become rows 0, 1, ...;
// later rows stay as they are.
struct HistoryRowsParams {
  PageFormat format;
  PagedHistory history;
  KeyCenters centers = {};
  int sink_tokens = 0;  // of the windows: where the history begins
  RowsOut k, v;
  bool bf16 = true;  // else fp32
  int first_token = 0, tokens = 0;
  int batch = 0, num_kv_heads = 0;
};

OSCAR_HOST_DEVICE inline int64_t offset_of(const RowsOut& rows, int64_t b, int64_t token,
                                           int64_t head) {
  return b * rows.batch_stride + token * rows.token_stride + head * rows.head_stride;
}

// The plain CPU references of the kernels, on the same structs and the same bytes.

// Appends and demotes as AppendParams says (all pointers in host memory). Returns the or of all
// RowStatus bits. A refused row keeps the codes of its page.
RowStatus append_ref(const AppendParams& params);

// Decode attention in fp32 (what CPU evaluation runs) and in double (the oracle of tests).
// o: [batch][q_len][num_qo_heads][head_dim] of the arithmetic's type instead of params.o, which is
// ignored; lse as in params. A query that sees no key gives zeros and lse = -infinity.
void decode_attention_ref(const AttentionParams& params, float* o, float* lse);
void decode_attention_ref(const AttentionParams& params, double* o, double* lse);

// INT2 tokens back as rows (HistoryRowsParams): the codec's fp32 numbers, centers added in fp32,
// one rounding where they are bf16.
void dequantize_history_ref(const HistoryRowsParams& params);

// One dequantized row (side 0 = key, 1 = value) of a page, [head_dim]. A key with centers comes
// without its own: what is coded is the difference from it.
void dequantize_row(const PageFormat& format, const uint8_t* page_data, int side, int token,
                    float* out);

// Rows into the basis of the cache and out of it: bf16 rows times the matrix of their KV head.

// The rows of one tensor: out = (x - subtracted) matrix + added, vectors being rows. Head h belongs
// to KV head h / (num_heads / num_kv_heads).
struct TransformRows {
  HeadRows x;                         // [rows][num_heads]
  uint16_t* out = nullptr;            // bf16 [rows][num_heads][head_dim], apart from every input
  const float* matrix = nullptr;      // [num_kv_heads][head_dim][head_dim]
  const float* subtracted = nullptr;  // [num_kv_heads][head_dim]; null: zeros
  const float* added = nullptr;       // [num_kv_heads][head_dim]; null: zeros
  int num_heads = 0;                  // a multiple of num_kv_heads
};

inline constexpr int kMaxTransforms = 3;  // q, k and v

struct TransformParams {
  TransformRows tensors[kMaxTransforms] = {};
  int num_tensors = 0;
  int rows = 0;  // of every tensor
  int num_kv_heads = 0, head_dim = 0;
};

// The CPU reference: differences, products and sums in fp32, one rounding to bf16 at the end.
void transform_ref(const TransformParams& params);

}  // namespace oscar
