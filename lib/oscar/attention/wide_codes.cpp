// The codec of rows as operations of torch, for any width.
#include "oscar/attention/wide_codes.h"

#include <algorithm>

#include "oscar/base/error.h"

namespace oscar {
namespace {

using torch::Tensor;

torch::ScalarType scalar_type(MetadataDtype dtype) {
  return dtype == MetadataDtype::kFp16   ? torch::kHalf
         : dtype == MetadataDtype::kBf16 ? torch::kBFloat16
                                         : torch::kFloat32;
}

Tensor rounded(const Tensor& x, MetadataDtype dtype) {
  return x.to(scalar_type(dtype)).to(torch::kFloat32);
}

// What each head asks for, [Hkv, 1, 1] float32, 1 where `asks(head)` is true.
template <typename Asks>
Tensor by_head(size_t heads, const Tensor& like, const Asks& asks) {
  std::vector<float> flags;
  for (size_t h = 0; h < heads; ++h) flags.push_back(asks(h) ? 1.0f : 0.0f);
  return torch::tensor(flags).view({-1, 1, 1}).to(like.device());
}

// Magnitude at which a row is clipped, [batch, Hkv, tokens, 1]; infinite for heads without.
Tensor clip_thresholds(const SideCodec& side, const Tensor& x) {
  const int d = static_cast<int>(x.size(3));
  std::vector<int64_t> ranks;
  for (const float ratio : side.recipe.clip_ratio) ranks.push_back(clip_threshold_index(ratio, d));
  const auto rank = torch::tensor(ranks).view({1, -1, 1, 1}).to(x.device());
  const auto sorted = std::get<0>(x.abs().sort(3));
  const auto place = rank.clamp_min(0).expand({x.size(0), x.size(1), x.size(2), 1});
  return torch::where(rank.ge(0), sorted.gather(3, place), INFINITY);
}

struct Scales {
  Tensor scale, zero;  // of each element, as x
};

Scales scales_of(const SideCodec& side, const Tensor& x, const std::string& where) {
  const MetadataDtype dtype = side.format.metadata;
  const auto threshold = clip_thresholds(side, x);
  const auto groups = torch::minimum(torch::maximum(x, -threshold), threshold)
                          .unflatten(3, {-1, side.format.quant_group_size});
  const auto low = groups.amin(-1, true), high = groups.amax(-1, true);
  auto scale = ((high - low) / static_cast<double>((1 << side.code_bits) - 1)).clamp_min(kMinScale);
  if (dtype == MetadataDtype::kFp16) {
    scale = torch::maximum(scale.clamp_min(kMinScaleFp16), low.abs() * kMinScaleOfZeroFp16);
  }
  scale = rounded(scale, dtype);
  const auto zero = rounded(-low / scale, dtype);
  if (!x.isfinite().all().item<bool>()) refuse_rows(where, RowStatus::kNonFinite);
  if (!(scale.isfinite().all() & zero.isfinite().all()).item<bool>()) {
    refuse_rows(where, RowStatus::kMetadataOverflow);
  }
  const auto each = [&](const Tensor& t) { return t.expand_as(groups).flatten(3).contiguous(); };
  return {each(scale), each(zero)};
}

Tensor codes_of(const Tensor& x, const Tensor& scale, const Tensor& zero, int top) {
  return (x / scale + zero + 0.5).floor_().clamp_(0, top);
}

// Each column takes over what the columns before it erred by (shaped_codes), in blocks of columns:
// between blocks by one product, within a block column after column.
Tensor shaped_codes(const Tensor& x, const Scales& scales, const Tensor& feedback, int top) {
  constexpr int64_t kBlock = 32;
  const int64_t d = x.size(3);
  auto codes = torch::empty_like(x);
  const auto errors = torch::empty_like(x);
  for (int64_t begin = 0; begin < d; begin += kBlock) {
    const int64_t end = std::min(d, begin + kBlock);
    auto target = x.slice(3, begin, end).clone();
    if (begin > 0) {
      target -= torch::matmul(errors.slice(3, 0, begin),
                              feedback.slice(1, 0, begin).slice(2, begin, end));
    }
    for (int64_t i = begin; i < end; ++i) {
      const auto scale = scales.scale.slice(3, i, i + 1), zero = scales.zero.slice(3, i, i + 1);
      const auto code = codes_of(target.slice(3, i - begin, i - begin + 1), scale, zero, top);
      const auto error = (code - zero) * scale - x.slice(3, i, i + 1);
      codes.slice(3, i, i + 1).copy_(code);
      errors.slice(3, i, i + 1).copy_(error);
      if (i + 1 < end) {
        target.slice(3, i - begin + 1) -= error * feedback.slice(1, i, i + 1).slice(2, i + 1, end);
      }
    }
  }
  return codes;
}

// correction_factor of each row [batch, Hkv, tokens, 1], 1 for heads without a correction.
Tensor correction_factors(const SideCodec& side, const Tensor& x, const Tensor& y) {
  const size_t heads = side.recipe.size();
  const auto asks = [&](ScaleCorrection way) {
    return by_head(heads, x, [&](size_t h) { return side.recipe.scale_correction[h] == way; });
  };
  auto weighted = x;
  if (side.recipe.any(ScaleCorrection::kMetric)) {
    const auto metric = asks(ScaleCorrection::kMetric);
    weighted = torch::where(metric.gt(0), torch::matmul(x, side.metric), x);
  }
  const auto num = (weighted * x).sum(3, true), den = (weighted * y).sum(3, true);
  const auto means_something = num.gt(0) & den.gt(0) & den.gt(1e-6 * num);
  const auto corrected = asks(ScaleCorrection::kNone).eq(0) & means_something;
  return torch::where(corrected, (num / den).clamp(0.5, 2), 1.0);
}

}  // namespace

Tensor quantize_dequantize_wide(const SideCodec& side, const Tensor& x, const std::string& where) {
  if (!(side.format.rules == CodecRules{})) {
    throw Error({.what = "only this toolkit's codec has codes of other than 2 bits",
                 .where = where,
                 .hint = "leave out @bits for a bundle of another backend's codec"});
  }
  const int top = (1 << side.code_bits) - 1;
  Scales scales = scales_of(side, x, where);
  Tensor codes;
  if (side.recipe.any(Rounding::kShaped)) {
    const auto shaped = by_head(side.recipe.size(), x, [&](size_t h) {
      return side.recipe.rounding[h] == Rounding::kShaped;
    });
    codes = shaped_codes(x, scales, side.feedback * shaped, top);
  } else {
    codes = codes_of(x, scales.scale, scales.zero, top);
  }
  auto read = (codes - scales.zero) * scales.scale;
  if (!side.recipe.any(ScaleCorrection::kUnbiased) && !side.recipe.any(ScaleCorrection::kMetric)) {
    return read;
  }
  const auto scale =
      rounded(scales.scale * correction_factors(side, x, read), side.format.metadata);
  if (!scale.isfinite().all().item<bool>()) refuse_rows(where, RowStatus::kMetadataOverflow);
  return (codes - scales.zero) * scale;
}

}  // namespace oscar
