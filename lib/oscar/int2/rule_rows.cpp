// The steps of oscar/cache/codec_rules.cpp on whole tensors.
#include "oscar/int2/rule_rows.h"

#include "oscar/int2/torch_codec.h"

namespace oscar {
namespace {

torch::Tensor codes_of(const CodecRules& rules, const torch::Tensor& x, const torch::Tensor& scale,
                       const torch::Tensor& zero) {
  const auto t =
      rules.zero == ZeroForm::kCodeUnits ? x.div(scale).add_(zero) : x.sub(zero).div_(scale);
  if (rules.ties == CodeTies::kUp) return t.add(0.5f).floor_().clamp_(0.0f, 3.0f);
  return t.round().clamp_(0.0f, 3.0f);  // torch rounds halves to even
}

}  // namespace

torch::Tensor write_and_read_torch(const SideCodec& side, const torch::Tensor& x,
                                   const std::string& where) {
  const CodecRules& rules = side.rules;
  const bool fp16 = side.metadata == MetadataDtype::kFp16;
  const bool before = rules.metadata_rounding == MetadataRounding::kBeforeCoding;
  const auto grouped = x.view({x.size(0), x.size(1), x.size(2), -1, side.quant_group_size});
  auto [lo, hi] = torch::aminmax(grouped, /*dim=*/-1, /*keepdim=*/true);
  const bool by_group = rules.clip_span == ClipSpan::kQuantGroup;
  const auto threshold = clip_thresholds(side.clip_ratio, by_group ? grouped : x.unsqueeze(-2));
  if (threshold.defined()) {
    lo = lo.clamp(-threshold, threshold);
    hi = hi.clamp(-threshold, threshold);
  }
  auto scale = scale_of_range(lo, hi);
  if (fp16) scale = scale.clamp_min(kMinScaleFp16);
  auto zero = lo;
  if (rules.zero == ZeroForm::kCodeUnits) {
    if (fp16) scale = scale.maximum(lo.abs().mul(kMinScaleOfZeroFp16));
    if (before) scale = round_to_metadata(scale, side.metadata);
    zero = lo.neg().div(scale);
  }
  // Adding +0 turns -0 into +0 and changes nothing else.
  const auto stored_scale = round_to_metadata(scale, side.metadata);
  const auto stored_zero = round_to_metadata(zero, side.metadata).add(0.0f);
  if (!stored_scale.isfinite().all().item<bool>() || !stored_zero.isfinite().all().item<bool>()) {
    refuse_rows(where, RowStatus::kMetadataOverflow);
  }
  const auto codes =
      codes_of(rules, grouped, before ? stored_scale : scale, before ? stored_zero : zero);
  const auto out = rules.zero == ZeroForm::kCodeUnits ? codes.sub(stored_zero).mul_(stored_scale)
                                                      : codes.mul(stored_scale).add_(stored_zero);
  return out.view_as(x);
}

}  // namespace oscar
