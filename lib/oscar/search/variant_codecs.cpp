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
  return fits_.emplace(&fit, make_side_codec(fit, side, quantizer_, layer_, device_)).first->second;
}

SideCodec VariantCodecs::codec(const SideVariant& heads, Side side) {
  bool centred = false;
  SideCodec result;
  for (const HeadChoice& head : heads) {
    centred = centred || of_fit(*head.fit, side).mean.defined();
    result.recipe.push_back(head.recipe);
  }
  const SideCodec& any = of_fit(*heads.front().fit, side);
  result.format = any.format;
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
  if (result.recipe.any(Rounding::kShaped)) {
    result.feedback = picked(heads, identity, [&](const HeadChoice& h) {
      return h.recipe.rounding == Rounding::kShaped ? fit(h).feedback : torch::Tensor();
    });
  }
  if (result.recipe.any(ScaleCorrection::kMetric)) {
    result.metric = picked(heads, identity, [&](const HeadChoice& h) {
      return h.recipe.scale_correction == ScaleCorrection::kMetric ? fit(h).metric
                                                                   : torch::Tensor();
    });
  }
  return result;
}

}  // namespace oscar
