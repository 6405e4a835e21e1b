// The INT2 codec on whole layers: cache library on the CPU, a kernel or torch operations elsewhere.
#include "oscar/int2/side_codec.h"

#include <algorithm>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/int2/device_rows.h"
#include "oscar/int2/rule_rows.h"
#include "oscar/int2/torch_codec.h"

namespace oscar {
namespace {

constexpr int64_t kShapedColumns = 16;  // at most so many solved one by one between products

torch::Tensor to_device(const float* data, at::IntArrayRef shape, torch::Device device) {
  // The blob is only read: clone before the bundle may go away.
  return torch::from_blob(const_cast<float*>(data), shape, torch::kFloat32).clone().to(device);
}

torch::Tensor stack(const MatrixStack<float>& m, torch::Device device) {
  return to_device(m.data.data(), {m.count, m.rows, m.cols}, device);
}

struct RowScales {
  torch::Tensor scale, zero;  // [batch, Hkv, tokens, groups, 1]
};

// Step 1 and 2 of the codec's definition.
RowScales row_scales(const SideCodec& side, const torch::Tensor& x) {
  const int64_t heads = x.size(1), d = x.size(3), groups = d / side.quant_group_size;
  auto [lo, hi] =
      torch::aminmax(x.view({x.size(0), heads, x.size(2), groups, -1}), /*dim=*/-1, true);
  const auto threshold = clip_thresholds(side.clip_ratio, x.unsqueeze(-2));
  if (threshold.defined()) {
    lo = lo.clamp(-threshold, threshold);
    hi = hi.clamp(-threshold, threshold);
  }
  auto scale = scale_of_range(lo, hi);
  if (side.metadata == MetadataDtype::kFp16) {
    scale = scale.maximum(lo.abs().mul(kMinScaleOfZeroFp16)).clamp_min(kMinScaleFp16);
  }
  scale = round_to_metadata(scale, side.metadata);
  // Adding +0 turns -0 into +0 and changes nothing else.
  return {scale, round_to_metadata(lo.neg().div(scale), side.metadata).add(0.0f)};
}

torch::Tensor codes_of(const torch::Tensor& x, const torch::Tensor& scale,
                       const torch::Tensor& zero) {
  return x.div(scale).add_(zero).add_(0.5f).floor_().clamp_(0.0f, 3.0f);
}

// Codes of shaped rounding; x [heads, d, rows], scale and zero [heads, groups, rows]. In code units
// while a block of columns is solved, so that each column costs few operations: all columns of a
// block share a scale.
torch::Tensor shaped_codes_of(const SideCodec& side, const torch::Tensor& x,
                              const torch::Tensor& scale, const torch::Tensor& zero) {
  const int64_t d = x.size(1), columns = std::gcd(kShapedColumns, int64_t{side.quant_group_size});
  auto codes = torch::empty_like(x);
  auto errors = torch::empty_like(x);
  for (int64_t begin = 0; begin < d; begin += columns) {
    const int64_t end = begin + columns;
    const auto s = scale.select(1, begin / side.quant_group_size).unsqueeze(1);
    const auto z = zero.select(1, begin / side.quant_group_size).unsqueeze(1);
    const auto exact = x.slice(1, begin, end).div(s).add_(z);
    auto targets = exact.add(0.5f);
    if (begin > 0) {  // what the columns before this block push into it
      const auto u = side.feedback.slice(1, 0, begin).slice(2, begin, end);
      targets.sub_(torch::matmul(u.transpose(1, 2), errors.slice(1, 0, begin)).div_(s));
    }
    auto block_errors = errors.slice(1, begin, end);
    for (int64_t i = 0; i < columns; ++i) {
      auto code = codes.select(1, begin + i), error = block_errors.select(1, i);
      at::floor_out(code, targets.select(1, i)).clamp_(0.0f, 3.0f);
      at::sub_out(error, code, exact.select(1, i));
      if (i + 1 < columns) {
        const auto u = side.feedback.select(1, begin + i).slice(1, begin + i + 1, end);
        targets.slice(1, i + 1).addcmul_(error.unsqueeze(1), u.unsqueeze(-1), -1);
      }
    }
    block_errors.mul_(s);
  }
  return codes;
}

// [Hkv, 1] true where a head corrects as `kind`.
torch::Tensor heads_with(const SideCodec& side, ScaleCorrection kind, torch::Device device) {
  std::vector<int64_t> flags;
  for (const ScaleCorrection c : side.scale_correction) flags.push_back(c == kind ? 1 : 0);
  return torch::tensor(flags, torch::kInt64).to(device, torch::kBool).unsqueeze(-1);
}

// One factor per row, [batch, Hkv, tokens, 1, 1] (MATH: section 4b).
torch::Tensor correction_factors(const SideCodec& side, const torch::Tensor& x,
                                 const torch::Tensor& y) {
  auto weighted = x;
  if (side.metric.defined()) {
    const auto by_metric = heads_with(side, ScaleCorrection::kMetric, x.device()).unsqueeze(-1);
    weighted = torch::where(by_metric, torch::matmul(x, side.metric), x);
  }
  const auto num = weighted.mul(x).sum(-1), den = weighted.mul(y).sum(-1);
  const auto usable =
      num.gt(0)
          .logical_and(den.gt(0))
          .logical_and(den.gt(num.mul(1e-6f)))
          .logical_and(heads_with(side, ScaleCorrection::kNone, x.device()).logical_not());
  return torch::where(usable, num.div(den).clamp(0.5f, 2.0f), torch::ones_like(num))
      .unsqueeze(-1)
      .unsqueeze(-1);
}

// One head's rows on the host, through this toolkit's codec or under another stack's rules.
RowsStatus head_rows(const SideCodec& side, int64_t head, const float* x, int64_t rows,
                     float* out) {
  const RowQuantizer quantizer = row_quantizer(side, head);
  const int threads = at::get_num_threads();
  if (side.rules == CodecRules{}) {
    return quantize_rows(quantizer, x, rows, {.dequantized = out}, threads);
  }
  return write_and_read_rows(side.rules, quantizer, x, rows, out, threads);
}

torch::Tensor quantize_dequantize_host(const SideCodec& side, const torch::Tensor& x,
                                       const std::string& where) {
  const int64_t heads = x.size(1), tokens = x.size(2), d = x.size(3);
  auto out = torch::empty_like(x);
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t offset = (b * heads + h) * tokens * d;
      const RowsStatus status =
          head_rows(side, h, x.data_ptr<float>() + offset, tokens, out.data_ptr<float>() + offset);
      if (status.status != RowStatus::kOk) {
        refuse_rows(where + ", head " + std::to_string(h) + ", token " + std::to_string(status.row),
                    status.status);
      }
    }
  }
  return out;
}

// Other stacks' codecs neither shape rounding nor correct scales.
void require_plain(const SideCodec& side, const std::string& where) {
  const auto& corrections = side.scale_correction;
  const bool corrects = std::any_of(corrections.begin(), corrections.end(),
                                    [](ScaleCorrection c) { return c != ScaleCorrection::kNone; });
  if (side.rules == CodecRules{} || (!side.feedback.defined() && !corrects)) return;
  throw Error({.what = "only this toolkit's codec shapes rounding and corrects scales",
               .where = where,
               .hint = "calibrate with --for the stack that is to serve it"});
}

torch::Tensor as_bf16(const torch::Tensor& rows) {
  return rows.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
}

}  // namespace

void refuse_rows(const std::string& where, RowStatus status) {
  const bool finite = status == RowStatus::kMetadataOverflow;
  throw Error({.what = finite ? "the range of a cache row does not fit the metadata dtype"
                              : "a cache row holds values that are not finite",
               .where = where,
               .hint = finite ? "use --metadata-dtype bf16 or fp32"
                              : "check the weights, or run with --dtype fp32"});
}

SideCodec make_side_codec(const SideTransform& transform, CacheSide side,
                          const QuantizerSettings& quantizer, int layer, torch::Device device) {
  const std::string where = "layer " + std::to_string(layer);
  const int d = transform.forward.rows;
  SideCodec codec;
  codec.quant_group_size = quantizer.quant_group_size > 0 ? quantizer.quant_group_size : d;
  if (codec.quant_group_size > d || d % codec.quant_group_size != 0 || d % 8 != 0 ||
      d > kMaxHeadDim) {
    throw Error({.what = "quantization groups do not fit the head",
                 .where = where,
                 .expected = "a group size that divides head_dim " + std::to_string(d) +
                             " (a multiple of 8, at most " + std::to_string(kMaxHeadDim) + ")",
                 .found = std::to_string(codec.quant_group_size)});
  }
  if (!parse_metadata_name(quantizer.metadata_dtype, codec.metadata)) {
    throw Error({.what = "unknown metadata dtype",
                 .expected = "fp16, bf16 or fp32",
                 .found = quantizer.metadata_dtype});
  }
  codec.rules = codec_rules(quantizer);
  codec.forward = stack(transform.forward, device);
  if (!transform.partner.empty()) {
    codec.partner = stack(transform.partner, device);
  } else {
    codec.partner =
        side == CacheSide::kKey ? codec.forward : codec.forward.transpose(1, 2).contiguous();
  }
  if (is_centred(transform)) {
    const auto& mean = transform.mean;
    codec.mean = to_device(mean.data.data(), {mean.count, mean.cols}, device);
  }
  if (!transform.feedback.empty()) codec.feedback = stack(transform.feedback, device);
  codec.clip_ratio = transform.clip_ratio;
  codec.scale_correction = transform.scale_correction;
  const bool by_metric = std::find(codec.scale_correction.begin(), codec.scale_correction.end(),
                                   ScaleCorrection::kMetric) != codec.scale_correction.end();
  if (by_metric) {
    if (transform.metric.empty()) {
      throw Error({.what = "the metric of the scale correction is missing", .where = where});
    }
    codec.metric = stack(transform.metric, device);
  }
  return codec;
}

RowQuantizer row_quantizer(const SideCodec& side, int64_t head) {
  const int64_t d = side.forward.size(2), matrix = head * d * d;
  const auto of_head = [&](const torch::Tensor& stacked) {
    return stacked.defined() ? stacked.data_ptr<float>() + matrix : nullptr;
  };
  return {.head_dim = static_cast<int>(d),
          .quant_group_size = side.quant_group_size,
          .clip_ratio = side.clip_ratio[static_cast<size_t>(head)],
          .metadata = side.metadata,
          .correction = side.scale_correction[static_cast<size_t>(head)],
          .feedback = of_head(side.feedback),
          .metric = of_head(side.metric)};
}

torch::Tensor to_cache_basis(const SideCodec& side, const torch::Tensor& x) {
  auto rows = x.to(torch::kFloat32);
  if (side.mean.defined()) rows = rows - side.mean.unsqueeze(1);
  return torch::matmul(rows, side.forward);
}

torch::Tensor quantize_dequantize(const SideCodec& side, const torch::Tensor& rows,
                                  const std::string& where) {
  require_plain(side, where);
  if (rows.is_cuda() && has_device_rows() && side.rules == CodecRules{}) {
    return quantize_dequantize_device(side, as_bf16(rows), where);
  }
  if (!rows.is_cpu()) return quantize_dequantize_torch(side, rows, where);
  return quantize_dequantize_host(side, as_bf16(rows), where);
}

torch::Tensor quantize_dequantize_torch(const SideCodec& side, const torch::Tensor& rows,
                                        const std::string& where) {
  const auto x = as_bf16(rows);
  const int64_t batch = x.size(0), heads = x.size(1), tokens = x.size(2), d = x.size(3);
  const int64_t groups = d / side.quant_group_size;
  if (!x.isfinite().all().item<bool>()) refuse_rows(where, RowStatus::kNonFinite);
  if (side.rules != CodecRules{}) return write_and_read_torch(side, x, where);
  auto [scale, zero] = row_scales(side, x);
  const auto grouped = x.view({batch, heads, tokens, groups, -1});
  torch::Tensor codes;
  if (side.feedback.defined()) {
    // Columns first, so that each step touches contiguous memory.
    const auto columns = [&](const torch::Tensor& t) {
      return t.view({batch, heads, tokens, -1})
          .permute({1, 3, 0, 2})
          .reshape({heads, -1, batch * tokens});
    };
    codes = shaped_codes_of(side, columns(x), columns(scale), columns(zero))
                .view({heads, d, batch, tokens})
                .permute({2, 0, 3, 1})
                .reshape({batch, heads, tokens, groups, -1});
  } else {
    codes = codes_of(grouped, scale, zero);
  }
  const auto unscaled = codes.sub(zero);
  const bool corrected = std::any_of(side.scale_correction.begin(), side.scale_correction.end(),
                                     [](ScaleCorrection c) { return c != ScaleCorrection::kNone; });
  if (corrected) {
    const auto y = unscaled.mul(scale).view({batch, heads, tokens, d});
    scale = round_to_metadata(scale.mul(correction_factors(side, x, y)), side.metadata);
  }
  if (!scale.isfinite().all().item<bool>() || !zero.isfinite().all().item<bool>()) {
    refuse_rows(where, RowStatus::kMetadataOverflow);
  }
  return unscaled.mul(scale).view({batch, heads, tokens, d});
}

}  // namespace oscar
