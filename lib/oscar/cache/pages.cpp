// Pages of 64 tokens, where everything lies in one, and the CPU reference of what kernels do
// with them.
#include "oscar/cache/pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "oscar/cache/products.h"
#include "oscar/cache/quantize_rows.h"

namespace oscar {

// Append, decode attention and reading back of the paged cache, token by token.

namespace {

uint8_t* page_data_at(const PageFormat& format, const PagedHistory& history, int num_kv_heads,
                      int b, int token, int head) {
  const int64_t page = page_of_token(history, b, token);
  return history.pool + (page * num_kv_heads + head) * page_bytes(format);
}

// The centers that rows of a history token's page have, [2][head_dim].
const uint16_t* page_centers(const KeyCenters& centers, const PageFormat& format, int num_kv_heads,
                             int sink_tokens, int b, int token, int head) {
  const int segment = segment_of_page(centers, b, sink_tokens, token / kPageTokens);
  return centers_of(centers, segment, head, num_kv_heads, format.head_dim);
}

// The one of them that a key in its page has, [head_dim].
const uint16_t* row_center(const KeyCenters& centers, const PageFormat& format, int num_kv_heads,
                           int sink_tokens, const uint8_t* page_data, int b, int token, int head) {
  const uint8_t* metadata = page_data + metadata_offset(format, 0, token % kPageTokens);
  const int which = center_of_scale(load_metadata(metadata, 0, format.rows.metadata));
  return page_centers(centers, format, num_kv_heads, sink_tokens, b, token, head) +
         which * format.head_dim;
}

// Metadata of a row that was refused.
void refuse_row(const PageFormat& f, uint8_t* page_data, int side, int token) {
  uint8_t* const metadata = page_data + metadata_offset(f, side, token);
  for (int at = 0; at < metadata_row_bytes(f); at += 4) {
    std::memcpy(metadata + at, &kRefusedMetadata, 4);
  }
}

// One row to its place in a page.
RowStatus write_row(const AppendParams& p, const uint16_t* bf16_row, int b, int token, int head,
                    int side) {
  const PageFormat& f = p.format;
  const SideWriter& writer = writer_of(p, side);
  const int64_t matrix = static_cast<int64_t>(head) * f.head_dim * f.head_dim;
  RowFormat rows = f.rows;
  rows.rules = {};  // as kernels write
  const RowQuantizer quantizer{.head_dim = f.head_dim,
                               .format = rows,
                               .recipe = head_recipe(writer, head),
                               .feedback = writer.feedback ? writer.feedback + matrix : nullptr,
                               .metric = writer.metric ? writer.metric + matrix : nullptr};
  std::vector<float> x(f.head_dim);
  for (int i = 0; i < f.head_dim; ++i) x[i] = bf16_to_float(bf16_row[i]);
  int center = 0;
  if (side == 0 && p.centers.rows) {
    const uint16_t* both =
        page_centers(p.centers, f, p.num_kv_heads, p.windows.sink_tokens, b, token, head);
    center = nearest_center(bf16_row, both, f.head_dim);
    const uint16_t* o = both + center * f.head_dim;
    for (int i = 0; i < f.head_dim; ++i) x[i] = bf16_to_float(around_center(bf16_row[i], o[i]));
  }
  uint8_t* page_data = page_data_at(f, p.history, p.num_kv_heads, b, token, head);
  const int in_page = token % kPageTokens;
  const QuantizedRows out{page_data + code_offset(f, side, in_page),
                          page_data + metadata_offset(f, side, in_page), nullptr};
  const RowStatus status = quantize_rows_ref(quantizer, x.data(), 1, out).status;
  if (status == RowStatus::kOk && center != 0) {
    const float scale = load_metadata(out.metadata, 0, f.rows.metadata);
    store_metadata(out.metadata, 0, scale_with_center(scale, center), f.rows.metadata);
  }
  if (status != RowStatus::kOk) refuse_row(f, page_data, side, in_page);
  return status;
}

// One new row to its place in a window.
RowStatus keep_row(const uint16_t* row, int head_dim, uint16_t* to) {
  std::copy_n(row, head_dim, to);
  const bool finite =
      std::all_of(row, row + head_dim, [](uint16_t x) { return is_finite_bf16(x); });
  return finite ? RowStatus::kOk : RowStatus::kNonFinite;
}

constexpr int kTile = 16;  // positions whose rows are held together

// All query heads that share a KV head, for one query: each row is dequantized once for them.
template <typename Real>
void attend_group(const AttentionParams& p, int b, int query, int kv_head, Real* o, Real* lse) {
  const int d = p.format.head_dim, group = p.num_qo_heads / p.num_kv_heads;
  const int64_t first = (static_cast<int64_t>(b) * p.q_len + query) * p.num_qo_heads +
                        static_cast<int64_t>(kv_head) * group;
  const int visible = std::max(0, p.seq_lens[b] - p.q_len + query + 1);
  const int history = visible > 0 ? p.history.history_len[b] : 0;
  std::vector<Real> q(static_cast<size_t>(group) * d),
      weights(static_cast<size_t>(group) * visible);
  for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<Real>(bf16_to_float(p.q[first * d + i]));
  std::vector<float> coded(d);
  // `row` [head_dim], element i of it at row[i * stride].
  const auto load = [&](int position, int side, Real* row, int stride) {
    const int token = position - p.windows.sink_tokens;
    if (token >= 0 && token < history) {
      const uint8_t* page_data =
          page_data_at(p.format, p.history, p.num_kv_heads, b, token, kv_head);
      const int in_page = token % kPageTokens;
      dequantize_row(p.format, page_data, side, in_page, coded.data());
      for (int i = 0; i < d; ++i) row[i * stride] = coded[i];
      if (side == 0 && p.centers.rows) {
        const uint16_t* center = row_center(p.centers, p.format, p.num_kv_heads,
                                            p.windows.sink_tokens, page_data, b, token, kv_head);
        for (int i = 0; i < d; ++i) row[i * stride] += static_cast<Real>(bf16_to_float(center[i]));
      }
      return;
    }
    const uint16_t* exact = (side ? p.windows.v : p.windows.k) +
                            window_offset(p.windows, slot_of(p.windows, b), kv_head, p.num_kv_heads,
                                          window_row(p.windows, position), d);
    for (int i = 0; i < d; ++i) row[i * stride] = bf16_to_float(exact[i]);
  };
  std::vector<Real> largest(group, -std::numeric_limits<Real>::infinity()), sum(group, Real(0));
  std::vector<Real> tile(static_cast<size_t>(kTile) * d);  // keys [head_dim][kTile], then values
  for (int from = 0; from < visible; from += kTile) {
    const int count = std::min(kTile, visible - from);
    for (int t = 0; t < count; ++t) load(from + t, 0, tile.data() + t, kTile);
    for (int h = 0; h < group; ++h) {
      Real* const dots = weights.data() + static_cast<size_t>(h) * visible + from;
      add_products(q.data() + h * d, d, tile.data(), kTile, count, dots);
      for (int t = 0; t < count; ++t) {
        dots[t] *= static_cast<Real>(p.sm_scale);
        largest[h] = std::max(largest[h], dots[t]);
      }
    }
  }
  Real* const out = o + first * d;
  std::fill(out, out + static_cast<int64_t>(group) * d, Real(0));
  for (int from = 0; from < visible; from += kTile) {
    const int count = std::min(kTile, visible - from);
    for (int t = 0; t < count; ++t) load(from + t, 1, tile.data() + t * d, 1);
    for (int h = 0; h < group; ++h) {
      Real* const of_head = weights.data() + static_cast<size_t>(h) * visible + from;
      for (int t = 0; t < count; ++t) {
        of_head[t] = std::exp(of_head[t] - largest[h]);
        sum[h] += of_head[t];
      }
      add_products(of_head, count, tile.data(), d, d, out + h * d);
    }
  }
  for (int h = 0; h < group; ++h) {
    for (int i = 0; i < d && sum[h] != 0; ++i) out[h * d + i] /= sum[h];
    if (lse) lse[first + h] = sum[h] != 0 ? largest[h] + std::log(sum[h]) : largest[h];
  }
}

template <typename Real>
void attend_all(const AttentionParams& p, Real* o, Real* lse) {
  for (int b = 0; b < p.batch; ++b) {
    for (int query = 0; query < p.q_len; ++query) {
      for (int head = 0; head < p.num_kv_heads; ++head) attend_group(p, b, query, head, o, lse);
    }
  }
}

}  // namespace

RowStatus append_ref(const AppendParams& p) {
  const int d = p.format.head_dim, sink = p.windows.sink_tokens;
  int all = 0;
  for (int b = 0; b < p.batch; ++b) {
    if (p.query_start_loc[b] == p.query_start_loc[b + 1] && p.old_history[b] == p.new_history[b])
      continue;
    int status = 0;
    const int64_t slot = slot_of(p.windows, b), first_row = p.query_start_loc[b];
    const int old_len = p.old_len[b];
    const int new_len = old_len + p.query_start_loc[b + 1] - p.query_start_loc[b];
    const auto window = [&](uint16_t* base, int head, int position) {
      return base + window_offset(p.windows, slot, head, p.num_kv_heads,
                                  window_row(p.windows, position), d);
    };
    const auto fresh = [&](const HeadRows& rows, int head, int position) {
      return row_at(rows, first_row + position - old_len, head);
    };
    for (int token = p.old_history[b]; token < p.new_history[b]; ++token) {
      for (int head = 0; head < p.num_kv_heads; ++head) {
        const bool is_new = sink + token >= old_len;
        const uint16_t* k =
            is_new ? fresh(p.k, head, sink + token) : window(p.windows.k, head, sink + token);
        const uint16_t* v =
            is_new ? fresh(p.v, head, sink + token) : window(p.windows.v, head, sink + token);
        status |= static_cast<int>(write_row(p, k, b, token, head, 0));
        status |= static_cast<int>(write_row(p, v, b, token, head, 1));
      }
    }
    for (int position = old_len; position < new_len; ++position) {
      if (position >= sink && position < sink + read_history_of(p, b)) continue;
      for (int head = 0; head < p.num_kv_heads; ++head) {
        for (const auto& [rows, to] : {std::pair{p.k, p.windows.k}, std::pair{p.v, p.windows.v}}) {
          const RowStatus kept =
              keep_row(fresh(rows, head, position), d, window(to, head, position));
          status |= static_cast<int>(kept);
        }
      }
    }
    if (p.status) p.status[slot] |= status;
    all |= status;
  }
  return static_cast<RowStatus>(all);
}

void decode_attention_ref(const AttentionParams& params, float* o, float* lse) {
  attend_all(params, o, lse);
}
void decode_attention_ref(const AttentionParams& params, double* o, double* lse) {
  attend_all(params, o, lse);
}

void dequantize_history_ref(const HistoryRowsParams& p) {
  const int d = p.format.head_dim;
  std::vector<float> row(d);
  const auto store = [&](const RowsOut& rows, int b, int at, int head) {
    const int64_t offset = offset_of(rows, b, at, head);
    for (int i = 0; i < d; ++i) {
      if (p.bf16) {
        static_cast<uint16_t*>(rows.data)[offset + i] = float_to_bf16(row[i]);
      } else {
        static_cast<float*>(rows.data)[offset + i] = row[i];
      }
    }
  };
  for (int b = 0; b < p.batch; ++b) {
    const int64_t end =
        std::min<int64_t>(int64_t{p.first_token} + p.tokens, p.history.history_len[b]);
    for (int token = p.first_token; token < end; ++token) {
      for (int head = 0; head < p.num_kv_heads; ++head) {
        const uint8_t* page_data =
            page_data_at(p.format, p.history, p.num_kv_heads, b, token, head);
        const int in_page = token % kPageTokens;
        dequantize_row(p.format, page_data, 0, in_page, row.data());
        if (p.centers.rows) {
          const uint16_t* o = row_center(p.centers, p.format, p.num_kv_heads, p.sink_tokens,
                                         page_data, b, token, head);
          for (int i = 0; i < d; ++i) row[i] = add_rn(row[i], bf16_to_float(o[i]));
        }
        store(p.k, b, token - p.first_token, head);
        dequantize_row(p.format, page_data, 1, in_page, row.data());
        store(p.v, b, token - p.first_token, head);
      }
    }
  }
}

void dequantize_row(const PageFormat& f, const uint8_t* page_data, int side, int token,
                    float* out) {
  const uint8_t* codes = page_data + code_offset(f, side, token);
  const void* metadata = page_data + metadata_offset(f, side, token);
  const int size = f.rows.quant_group_size;
  for (int first = 0; first < f.head_dim; first += size) {
    const int64_t pair = 2 * (first / size);
    const ScaleZero sz{scale_without_center(load_metadata(metadata, pair, f.rows.metadata)),
                       load_metadata(metadata, pair + 1, f.rows.metadata)};
    for (int i = first; i < first + size; ++i) {
      out[i] = dequantize(unpack_code(codes, i, f.head_dim, PackOrder::kConsecutive), sz);
    }
  }
}

// Rows into the basis of the cache and out of it.

namespace {

void transform_head(const TransformParams& p, const TransformRows& t, int head) {
  const int d = p.head_dim, kv_head = head / (t.num_heads / p.num_kv_heads);
  const float* const matrix = t.matrix + int64_t{kv_head} * d * d;
  std::vector<float> centered(d), sums(d);
  for (int row = 0; row < p.rows; ++row) {
    const uint16_t* const x = row_at(t.x, row, head);
    for (int i = 0; i < d; ++i) {
      centered[i] = bf16_to_float(x[i]);
      if (t.subtracted) centered[i] -= t.subtracted[kv_head * d + i];
    }
    std::fill(sums.begin(), sums.end(), 0.0f);
    add_products(centered.data(), d, matrix, d, d, sums.data());
    uint16_t* const out = t.out + (int64_t{row} * t.num_heads + head) * d;
    for (int j = 0; j < d; ++j) {
      out[j] = float_to_bf16(t.added ? sums[j] + t.added[kv_head * d + j] : sums[j]);
    }
  }
}

}  // namespace

void transform_ref(const TransformParams& params) {
  for (int i = 0; i < params.num_tensors; ++i) {
    const TransformRows& tensor = params.tensors[i];
    for (int head = 0; head < tensor.num_heads; ++head) transform_head(params, tensor, head);
  }
}

}  // namespace oscar
