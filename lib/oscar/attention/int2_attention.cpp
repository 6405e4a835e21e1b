// Attention over rows that went through the codec, block by block.
#include "oscar/attention/int2_attention.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "oscar/attention/device_rows.h"
#include "oscar/attention/wide_codes.h"
#include "oscar/base/error.h"
#include "oscar/cache/pages.h"
#include "oscar/fit/head_fit.h"

namespace oscar {

// The INT2 codec on whole layers: the cache library on the CPU, a kernel on a GPU.

namespace {

torch::Tensor to_device(const float* data, at::IntArrayRef shape, torch::Device device) {
  // The blob is only read: clone before the bundle may go away.
  return torch::from_blob(const_cast<float*>(data), shape, torch::kFloat32).clone().to(device);
}

torch::Tensor quantize_dequantize_host(const SideCodec& side, const torch::Tensor& x,
                                       const std::string& where) {
  const int64_t heads = x.size(1), tokens = x.size(2), d = x.size(3);
  auto out = torch::empty_like(x);
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t offset = (b * heads + h) * tokens * d;
      const RowsStatus status =
          quantize_rows(row_quantizer(side, h), x.data_ptr<float>() + offset, tokens,
                        {.dequantized = out.data_ptr<float>() + offset}, at::get_num_threads());
      if (status.status != RowStatus::kOk) {
        refuse_rows(where + ", head " + std::to_string(h) + ", token " + std::to_string(status.row),
                    status.status);
      }
    }
  }
  return out;
}

// Other backends' codecs neither shape rounding nor correct scales.
void require_plain(const SideCodec& side, const std::string& where) {
  const SideRecipe& recipe = side.recipe;
  const bool plain = !recipe.any(Rounding::kShaped) && !recipe.any(ScaleCorrection::kUnbiased) &&
                     !recipe.any(ScaleCorrection::kMetric);
  if (side.format.rules == CodecRules{} || plain) return;
  throw Error({.what = "only this toolkit's codec shapes rounding and corrects scales",
               .where = where,
               .hint = "calibrate with --for the backend that is to serve it"});
}

// What writing rows needs of a codec, in host memory.
SideCodec on_host(const SideCodec& side) {
  const auto host = [](const torch::Tensor& t) { return t.defined() ? t.to(torch::kCPU) : t; };
  SideCodec result = side;
  result.forward = host(side.forward);
  result.feedback = host(side.feedback);
  result.metric = host(side.metric);
  return result;
}

// Rows less the nearer center of their segment through the codec, and the center added again.
torch::Tensor about_centers(const SideCodec& side, const torch::Tensor& rows,
                            const std::string& where, const std::vector<SegmentRun>& runs) {
  assert(!runs.empty() && runs.back().end == rows.size(2));
  const auto z = rows.to(torch::kBFloat16).to(torch::kFloat32);
  std::vector<torch::Tensor> parts;
  for (const SegmentRun& run : runs) {
    const auto centers = side.centers[run.segment];  // [Hkv, 2, d]
    const auto own = z.slice(2, run.begin, run.end);
    const auto scores = torch::matmul(own, centers.transpose(1, 2)) -
                        0.5 * centers.square().sum(2).unsqueeze(1);  // [batch, Hkv, tokens, 2]
    const auto second = scores.select(3, 1).gt(scores.select(3, 0)).unsqueeze(3);
    parts.push_back(
        torch::where(second, centers.select(1, 1).unsqueeze(1), centers.select(1, 0).unsqueeze(1)));
  }
  const auto nearer = torch::cat(parts, 2);
  SideCodec plain = side;
  plain.centers = torch::Tensor();
  return quantize_dequantize(plain, z - nearer, where).add_(nearer);
}

}  // namespace

void refuse_rows(const std::string& where, RowStatus status) {
  const bool finite = status == RowStatus::kMetadataOverflow;
  throw Error({.what = finite ? "the range of a cache row does not fit the metadata dtype"
                              : "a cache row holds values that are not finite",
               .where = where,
               .hint = finite ? "use --metadata-dtype fp32"
                              : "check the weights, or run with --dtype fp32"});
}

SideCodec make_side_codec(const SideTransform& transform, Side side, const CacheFormat& quantizer,
                          int layer, const Rope& rope, torch::Device device) {
  const std::string where = "layer " + std::to_string(layer);
  const int d = transform.forward.rows;
  SideCodec codec;
  codec.format = quantizer.row_format();
  int& size = codec.format.quant_group_size;
  if (size <= 0) size = d;
  if (size > d || d % size != 0 || d % 8 != 0 || d > kMaxHeadDim) {
    throw Error({.what = "quantization groups do not fit the head",
                 .where = where,
                 .expected = "a group size that divides head_dim " + std::to_string(d) +
                             " (a multiple of 8, at most " + std::to_string(kMaxHeadDim) + ")",
                 .found = std::to_string(size)});
  }
  codec.forward = to_tensor(transform.forward, device);
  if (!transform.partner.empty()) {
    codec.partner = to_tensor(transform.partner, device);
  } else {
    codec.partner = side == Side::kKey ? codec.forward : codec.forward.transpose(1, 2).contiguous();
  }
  if (is_centered(transform)) {
    const auto& mean = transform.mean;
    codec.mean = to_device(mean.data.data(), {mean.count, mean.cols}, device);
  }
  if (has_centers(transform)) {
    const std::vector<float> rows = center_rows(transform, rope);
    const int64_t heads = transform.forward.count;
    const auto segments = static_cast<int64_t>(rows.size()) / (heads * kCenters * d);
    codec.centers = to_device(rows.data(), {segments, heads, kCenters, d}, device);
  }
  codec.recipe = transform.recipe;
  if (codec.recipe.any(Rounding::kShaped)) codec.feedback = to_tensor(transform.feedback, device);
  if (codec.recipe.any(ScaleCorrection::kMetric)) {
    if (transform.metric.empty()) {
      throw Error({.what = "the metric of the scale correction is missing", .where = where});
    }
    codec.metric = to_tensor(transform.metric, device);
  }
  return codec;
}

RowQuantizer row_quantizer(const SideCodec& side, int64_t head) {
  const int64_t d = side.forward.size(2), matrix = head * d * d;
  const auto of_head = [&](const torch::Tensor& stacked) {
    return stacked.defined() ? stacked.data_ptr<float>() + matrix : nullptr;
  };
  return {.head_dim = static_cast<int>(d),
          .format = side.format,
          .recipe = side.recipe[static_cast<size_t>(head)],
          .feedback = of_head(side.feedback),
          .metric = of_head(side.metric)};
}

torch::Tensor to_cache_basis(const SideCodec& side, const torch::Tensor& x) {
  auto rows = x.to(torch::kFloat32);
  if (side.mean.defined()) rows = rows - side.mean.unsqueeze(1);
  return torch::matmul(rows, side.forward);
}

torch::Tensor to_tensor(const MatrixStack<float>& stack, torch::Device device) {
  return to_device(stack.data.data(), {stack.count, stack.rows, stack.cols}, device);
}

torch::Tensor to_tensor(const MatrixStack<double>& stack, torch::Device device) {
  return torch::from_blob(const_cast<double*>(stack.data.data()),
                          {stack.count, stack.rows, stack.cols}, torch::kFloat64)
      .to(torch::kFloat32)
      .to(device);
}

std::vector<SegmentRun> segment_runs(const SideCodec& side, const RowPlaces& places, int64_t rows) {
  std::vector<SegmentRun> runs;
  if (!side.centers.defined()) return runs;
  const int64_t segments = side.centers.size(0);
  const auto segment_of = [&](int64_t token) {
    const int64_t page = std::max<int64_t>(0, token - places.sink) / kPageTokens;
    return static_cast<int64_t>(
        segment_of_page(static_cast<int>(places.first_position), static_cast<int>(places.sink),
                        static_cast<int>(page), static_cast<int>(segments)));
  };
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t segment = segment_of(places.first_token + i);
    if (runs.empty() || runs.back().segment != segment) runs.push_back({i, i, segment});
    runs.back().end = i + 1;
  }
  return runs;
}

torch::Tensor quantize_dequantize(const SideCodec& side, const torch::Tensor& rows,
                                  const std::string& where, const std::vector<SegmentRun>& runs) {
  if (side.other) return side.other(rows.to(torch::kBFloat16).to(torch::kFloat32));
  require_plain(side, where);
  if (side.centers.defined()) return about_centers(side, rows, where, runs);
  const auto x = rows.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
  if (side.code_bits != 2) return quantize_dequantize_wide(side, x, where);
  if (x.is_cpu()) return quantize_dequantize_host(side, x, where);
  if (x.is_cuda() && has_device_rows()) return quantize_dequantize_device(side, x, where);
  return quantize_dequantize_host(on_host(side), x.to(torch::kCPU), where).to(x.device());
}

// The INT2 rule of each mode.

namespace {

int64_t decode_end(const CacheView& view, int64_t i) {
  const int64_t demoted = i + 1 - view.recent - view.sink;
  if (demoted <= 0) return view.sink;
  return view.sink + demoted / view.demote_block * view.demote_block;
}

}  // namespace

CacheView cache_view(const CacheFormat& quantizer, int sliding_window) {
  return {.sink = quantizer.sink_tokens,
          .recent = quantizer.recent_tokens,
          .demote_block = quantizer.demote_block,
          .sliding_window = sliding_window};
}

int64_t int2_end(const CacheView& view, int64_t i) {
  if (i >= view.prompt || view.mode == CacheModeKind::kDecode) return decode_end(view, i);
  if (view.mode == CacheModeKind::kPrefill) return view.sink;
  return decode_end(view, i / view.prefill_chunk * view.prefill_chunk - 1);
}

int64_t first_visible(const CacheView& view, int64_t i) {
  return view.sliding_window > 0 ? std::max<int64_t>(0, i - view.sliding_window + 1) : 0;
}

std::vector<QueryBlock> query_blocks(const CacheView& view, int64_t first, int64_t last,
                                     int64_t max_queries) {
  std::vector<QueryBlock> blocks;
  int64_t begin = first;
  for (int64_t i = first + 1; i <= last; ++i) {
    if (i == last || i - begin == max_queries ||
        int2_end(view, i) - int2_end(view, begin) > max_queries) {
      blocks.push_back({begin, i});
      begin = i;
    }
  }
  return blocks;
}

void parse_cache_mode(const std::string& text, CacheView& view) {
  view.prefill_chunk = 0;
  if (text == "decode") {
    view.mode = CacheModeKind::kDecode;
    return;
  }
  if (text == "prefill") {
    view.mode = CacheModeKind::kPrefill;
    return;
  }
  const std::string prefix = "chunked:";
  const char* const end = text.data() + text.size();
  if (text.rfind(prefix, 0) == 0) {
    const auto [stop, status] =
        std::from_chars(text.data() + prefix.size(), end, view.prefill_chunk);
    if (status == std::errc() && stop == end && view.prefill_chunk > 0) {
      view.mode = CacheModeKind::kChunked;
      return;
    }
  }
  throw UsageError({.what = "unknown cache mode",
                    .where = "--mode",
                    .expected = "decode, prefill or chunked:N with N > 0",
                    .found = text});
}

std::string cache_mode_name(const CacheView& view) {
  switch (view.mode) {
    case CacheModeKind::kPrefill:
      return "prefill";
    case CacheModeKind::kChunked:
      return "chunked:" + std::to_string(view.prefill_chunk);
    case CacheModeKind::kDecode:
      break;
  }
  return "decode";
}

// Names of the engines, and the changes of basis around them.

torch::Tensor to_query_basis(const LayerCodec& codec, const torch::Tensor& q) {
  const int64_t group = q.size(1) / codec.key.partner.size(0);
  return torch::matmul(q.to(torch::kFloat32),
                       codec.key.partner.repeat_interleave(group, /*dim=*/0));
}

torch::Tensor from_value_basis(const LayerCodec& codec, const torch::Tensor& o) {
  const int64_t group = o.size(1) / codec.value.partner.size(0);
  const auto out = torch::matmul(o, codec.value.partner.repeat_interleave(group, /*dim=*/0));
  if (!codec.value.mean.defined()) return out;
  return out + codec.value.mean.repeat_interleave(group, 0).unsqueeze(1);
}

EngineKind parse_engine_kind(const std::string& name) {
  for (const auto kind : {EngineKind::kSimulate, EngineKind::kReference, EngineKind::kKernel}) {
    if (name == engine_name(kind)) return kind;
  }
  throw Error({.what = "unknown engine",
               .where = "--engine",
               .expected = "simulate, reference or kernel",
               .found = name});
}

const char* engine_name(EngineKind kind) {
  switch (kind) {
    case EngineKind::kReference:
      return "reference";
    case EngineKind::kKernel:
      return "kernel";
    case EngineKind::kSimulate:
      break;
  }
  return "simulate";
}

// Block-wise attention with a mixed cache: one buffer of rows, overwritten by INT2 as they age.

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

void Int2Attention::read_back(const LayerCodec& codec, int layer, int64_t before,
                              CacheRows& rows) const {
  const std::string where = "layer " + std::to_string(layer);
  const auto runs =
      segment_runs(codec.key, {before, first_position_, view_.sink}, rows.k_exact.size(2));
  rows.k_int2 = codec.int2_keys
                    ? quantize_dequantize(codec.key, rows.k_exact, where + ", keys", runs)
                    : rows.k_exact;
  rows.v_int2 = codec.int2_values
                    ? quantize_dequantize(codec.value, rows.v_exact, where + ", values")
                    : rows.v_exact;
}

torch::Tensor Int2Attention::attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                                    const torch::Tensor& v, double sm_scale) {
  CacheView view = view_;
  view.sliding_window = sliding_windows_[layer];
  const LayerCodec* const codec = layers_[layer].get();
  CacheRows rows;
  torch::Tensor queries;
  if (codec) {
    rows.k_exact = to_cache_basis(codec->key, k);
    rows.v_exact = to_cache_basis(codec->value, v);
    const int64_t before =
        keep_ && kept_[layer].k_exact.defined() ? kept_[layer].k_exact.size(2) : 0;
    read_back(*codec, layer, before, rows);
    queries = to_query_basis(*codec, q);
  } else {
    rows.k_exact = rows.k_int2 = k.to(torch::kFloat32);
    rows.v_exact = rows.v_int2 = v.to(torch::kFloat32);
    queries = q.to(torch::kFloat32);
  }
  if (keep_) {
    rows = append(layer, rows);
    // Other codecs look at tokens together: all anew, as the sequence is now.
    if (codec && codec->key.other) read_back(*codec, layer, 0, rows);
  }
  auto out = attend_cache_rows(view, queries, rows, sm_scale);
  if (codec) out = from_value_basis(*codec, out);
  return out.to(q.dtype());
}

}  // namespace oscar
