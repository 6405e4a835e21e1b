// Block-wise attention with a mixed cache: one buffer of rows, overwritten by INT2 as they age.
#include "oscar/int2/int2_attention.h"

#include <algorithm>
#include <limits>

namespace oscar {
namespace {

constexpr int64_t kMaxBlock = 256;                   // queries of one block
constexpr int64_t kMaskElements = int64_t{1} << 24;  // of one block's mask

// The rows of one side as a block of queries reads them, and the keys in dispute in front: rows of
// [h(first), h(last)) are INT2 for late queries of the block and exact for early ones, so both
// versions are there and the mask picks.
struct MixedRows {
  torch::Tensor exact, int2;  // [batch * Hkv, tokens, d]
  torch::Tensor buffer;       // [batch * Hkv, front + tokens, d]
  int64_t front = 0;
  int64_t converted = 0;  // rows [.., converted) of the buffer are final

  MixedRows(const torch::Tensor& exact_rows, const torch::Tensor& int2_rows, int64_t front_rows,
            int64_t sink)
      : exact(exact_rows.flatten(0, 1)),
        int2(int2_rows.flatten(0, 1)),
        front(front_rows),
        converted(sink) {
    buffer = torch::empty({exact.size(0), front + exact.size(1), exact.size(2)}, exact.options());
    buffer.slice(1, front).copy_(exact);
  }

  // Makes rows [sink, end) INT2 and puts the INT2 rows [end, end + band) at the front's end.
  // Returns [batch * Hkv, 1, band + visible rows, d]: band, then keys [begin, last).
  torch::Tensor view(int64_t end, int64_t band, int64_t begin, int64_t last) {
    if (end > converted) {
      buffer.slice(1, front + converted, front + end).copy_(int2.slice(1, converted, end));
      converted = end;
    }
    if (band == 0) return buffer.slice(1, front + begin, front + last).unsqueeze(1);
    if (begin > 0) {  // a sliding window leaves a gap between the front and what is visible
      return torch::cat(
                 {int2.slice(1, end, end + band), buffer.slice(1, front + begin, front + last)}, 1)
          .unsqueeze(1);
    }
    buffer.slice(1, front - band, front).copy_(int2.slice(1, end, end + band));
    return buffer.slice(1, front - band, front + last).unsqueeze(1);
  }
};

// 0 where query `first + row` reads column, -inf elsewhere. Columns: INT2 keys [end, end + band),
// then keys [begin, last).
torch::Tensor block_mask(const CacheView& view, const QueryBlock& block, int64_t end, int64_t band,
                         int64_t begin, const torch::Device& device) {
  const int64_t queries = block.last - block.first;
  std::vector<int64_t> ends, firsts;
  for (int64_t i = block.first; i < block.last; ++i) {
    ends.push_back(int2_end(view, i));
    firsts.push_back(first_visible(view, i));
  }
  const auto longs = torch::TensorOptions(torch::kInt64);
  const auto column = [&](std::vector<int64_t>& values) {
    return torch::from_blob(values.data(), {queries, 1}, longs).to(device, false, true);
  };
  const auto h = column(ends), lowest = column(firsts);
  const auto position = torch::arange(block.first, block.last, longs.device(device)).unsqueeze(1);
  auto mask = torch::zeros({queries, band + block.last - begin},
                           torch::TensorOptions(torch::kFloat32).device(device));
  const float hidden = -std::numeric_limits<float>::infinity();
  if (band > 0) {
    const auto key = torch::arange(end, end + band, longs.device(device)).unsqueeze(0);
    mask.slice(1, 0, band).masked_fill_(key.ge(h).logical_or(key.lt(lowest)), hidden);
  }
  // Without a sliding window, keys before both `end` and the block are visible to all of it.
  const int64_t plain = view.sliding_window > 0 ? begin : std::min(end, block.first);
  const auto key = torch::arange(plain, block.last, longs.device(device)).unsqueeze(0);
  auto not_read = key.gt(position).logical_or(key.lt(lowest));
  if (band > 0) not_read = not_read.logical_or(key.ge(end).logical_and(key.lt(h)));
  mask.slice(1, band + plain - begin).masked_fill_(not_read, hidden);
  return mask;
}

}  // namespace

torch::Tensor attend_cache_rows(const CacheView& view, const torch::Tensor& q,
                                const CacheRows& rows, double sm_scale) {
  const int64_t batch = q.size(0), num_qo_heads = q.size(1), queries = q.size(2);
  const int64_t num_kv_heads = rows.k_exact.size(1), tokens = rows.k_exact.size(2);
  const int64_t group = num_qo_heads / num_kv_heads;
  const int64_t start = tokens - queries;
  const int64_t max_block =
      std::clamp<int64_t>(kMaskElements / std::max<int64_t>(tokens, 1), 16, kMaxBlock);
  const auto blocks = query_blocks(view, start, tokens, max_block);
  MixedRows keys(rows.k_exact, rows.k_int2, max_block, view.sink);
  MixedRows values(rows.v_exact, rows.v_int2, max_block, view.sink);
  // One batch entry per KV head, its query heads as heads: keys are shared by a stride of zero.
  const auto grouped = q.reshape({batch * num_kv_heads, group, queries, q.size(3)});
  auto out =
      torch::empty({batch * num_kv_heads, group, queries, rows.v_exact.size(3)}, q.options());
  for (const QueryBlock& block : blocks) {
    const int64_t end = std::min(int2_end(view, block.first), block.last);
    const int64_t band = std::min(int2_end(view, block.last - 1), block.last) - end;
    const int64_t begin = first_visible(view, block.first);
    const auto mask = block_mask(view, block, end, band, begin, q.device());
    const auto k = keys.view(end, band, begin, block.last);
    const auto v = values.view(end, band, begin, block.last);
    const auto expand = [&](const torch::Tensor& t) {
      return t.expand({t.size(0), group, t.size(2), t.size(3)});
    };
    out.slice(2, block.first - start, block.last - start)
        .copy_(torch::scaled_dot_product_attention(
            grouped.slice(2, block.first - start, block.last - start), expand(k), expand(v), mask,
            0.0, false, sm_scale));
  }
  return out.view({batch, num_qo_heads, queries, -1});
}

Int2Attention::Int2Attention(std::vector<std::shared_ptr<const LayerCodec>> layers, CacheView view,
                             std::vector<int> sliding_windows)
    : layers_(std::move(layers)),
      view_(view),
      sliding_windows_(std::move(sliding_windows)),
      kept_(layers_.size()) {}

void Int2Attention::keep_cache(int64_t) {
  keep_ = true;
  kept_.assign(layers_.size(), {});
}

CacheRows Int2Attention::append(int layer, const CacheRows& rows) {
  CacheRows& kept = kept_[layer];
  if (!kept.k_exact.defined()) {
    kept = rows;
  } else {
    const auto join = [](const torch::Tensor& a, const torch::Tensor& b) {
      return torch::cat({a, b}, 2);
    };
    kept = {join(kept.k_exact, rows.k_exact), join(kept.k_int2, rows.k_int2),
            join(kept.v_exact, rows.v_exact), join(kept.v_int2, rows.v_int2)};
  }
  return kept;
}

torch::Tensor Int2Attention::attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                                    const torch::Tensor& v, double sm_scale) {
  CacheView view = view_;
  view.sliding_window = sliding_windows_[layer];
  const LayerCodec* const codec = layers_[layer].get();
  CacheRows rows;
  torch::Tensor queries;
  if (codec) {
    const std::string where = "layer " + std::to_string(layer);
    rows.k_exact = to_cache_basis(codec->key, k);
    rows.v_exact = to_cache_basis(codec->value, v);
    const int64_t before =
        keep_ && kept_[layer].k_exact.defined() ? kept_[layer].k_exact.size(2) : 0;
    const auto runs = segment_runs(codec->key, {before, first_position_, view.sink}, k.size(2));
    rows.k_int2 = codec->int2_keys
                      ? quantize_dequantize(codec->key, rows.k_exact, where + ", keys", runs)
                      : rows.k_exact;
    rows.v_int2 = codec->int2_values
                      ? quantize_dequantize(codec->value, rows.v_exact, where + ", values")
                      : rows.v_exact;
    queries = to_query_basis(*codec, q);
  } else {
    rows.k_exact = rows.k_int2 = k.to(torch::kFloat32);
    rows.v_exact = rows.v_int2 = v.to(torch::kFloat32);
    queries = q.to(torch::kFloat32);
  }
  auto out = attend_cache_rows(view, queries, keep_ ? append(layer, rows) : rows, sm_scale);
  if (codec) out = from_value_basis(*codec, out);
  return out.to(q.dtype());
}

}  // namespace oscar
