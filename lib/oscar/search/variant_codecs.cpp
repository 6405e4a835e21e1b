// Heads picked from stacks, and the identity where a head has no such matrix.
#include "oscar/search/variant_codecs.h"

namespace oscar {
namespace {

// One matrix (or row) a head; what a head lacks is `missing`.
template <typename Of>
torch::Tensor picked(const SideVariant& heads, const torch::Tensor& missing, Of of) {
  std::vector<torch::Tensor> parts;
  for (const HeadChoice& head : heads) {
    const torch::Tensor stack = of(head);
    parts.push_back(stack.defined() ? stack.select(0, head.head) : missing);
  }
  return torch::stack(parts);
}

}  // namespace

const SideCodec& VariantCodecs::of_fit(const SideTransform& fit, Side side) {
  const auto found = fits_.find(&fit);
  if (found != fits_.end()) return found->second;
  const CacheSide cache_side = side == Side::kKey ? CacheSide::kKey : CacheSide::kValue;
  return fits_.emplace(&fit, make_side_codec(fit, cache_side, quantizer_, layer_, device_))
      .first->second;
}

SideCodec VariantCodecs::codec(const SideVariant& heads, Side side) {
  bool shaped = false, by_metric = false, centred = false;
  SideCodec result;
  for (const HeadChoice& head : heads) {
    shaped = shaped || head.rounding == Rounding::kShaped;
    by_metric = by_metric || head.scale_correction == ScaleCorrection::kMetric;
    centred = centred || of_fit(*head.fit, side).mean.defined();
    result.clip_ratio.push_back(head.clip_ratio);
    result.scale_correction.push_back(head.scale_correction);
  }
  const SideCodec& any = of_fit(*heads.front().fit, side);
  result.quant_group_size = any.quant_group_size;
  result.metadata = any.metadata;
  result.rules = any.rules;
  const auto fit = [&](const HeadChoice& head) -> const SideCodec& {
    return of_fit(*head.fit, side);
  };
  const int64_t d = any.forward.size(1);
  const auto identity = torch::eye(d, any.forward.options());
  result.forward = picked(heads, {}, [&](const HeadChoice& h) { return fit(h).forward; });
  result.partner = picked(heads, {}, [&](const HeadChoice& h) { return fit(h).partner; });
  if (centred) {
    const auto zero = torch::zeros({d}, any.forward.options());
    result.mean = picked(heads, zero, [&](const HeadChoice& h) { return fit(h).mean; });
  }
  if (shaped) {
    result.feedback = picked(heads, identity, [&](const HeadChoice& h) {
      return h.rounding == Rounding::kShaped ? fit(h).feedback : torch::Tensor();
    });
  }
  if (by_metric) {
    result.metric = picked(heads, identity, [&](const HeadChoice& h) {
      return h.scale_correction == ScaleCorrection::kMetric ? fit(h).metric : torch::Tensor();
    });
  }
  return result;
}

}  // namespace oscar
