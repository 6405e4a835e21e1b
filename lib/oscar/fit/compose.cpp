// Copies of heads, with the parts that no head needs left out.
#include "oscar/fit/compose.h"

#include <algorithm>

#include "oscar/cache/key_centres.h"

namespace oscar {

SideTransform compose_heads(const std::vector<FittedHead>& heads, Side side) {
  const int count = static_cast<int>(heads.size());
  const int d = heads.front().fit->forward.rows;
  const auto any = [&](auto&& wants) { return std::any_of(heads.begin(), heads.end(), wants); };
  SideTransform out;
  out.forward = MatrixStack<float>(count, d, d);
  out.mean = VectorStack<float>(count, d);
  out.eigenvalues = VectorStack<double>(count, d);
  if (any([](const FittedHead& h) { return h.fit->kind[h.head] == TransformKind::kBalanced; })) {
    out.partner = MatrixStack<float>(count, d, d);
  }
  if (any([](const FittedHead& h) {
        return h.recipe.scale_correction == ScaleCorrection::kMetric;
      })) {
    out.metric = MatrixStack<float>(count, d, d);
  }
  if (any([](const FittedHead& h) { return h.recipe.rounding == Rounding::kShaped; })) {
    out.feedback = MatrixStack<float>(count, d, d);
  }
  if (any([](const FittedHead& h) { return has_centres(*h.fit, h.head); })) {
    out.centres = MatrixStack<float>(count, kCentres, d);
  }
  for (int i = 0; i < count; ++i) {
    const FittedHead& source = heads[i];
    const SideTransform& fit = *source.fit;
    const int head = source.head;
    out.kind.push_back(fit.kind[head]);
    out.fallback.push_back(fit.fallback[head]);
    out.condition_number.push_back(fit.condition_number[head]);
    out.recipe.push_back(source.recipe);
    out.forward[i] = fit.forward[head];
    out.mean[i] = fit.mean[head];
    out.eigenvalues[i] = fit.eigenvalues[head];
    if (has_centres(fit, head)) out.centres[i] = fit.centres[head];
    if (!out.partner.empty()) {
      // Of a fit whose heads are all orthogonal, too: its partners are implied.
      out.partner[i] = partner_matrix(fit, side, head);
    }
    if (!out.metric.empty()) {
      if (source.recipe.scale_correction == ScaleCorrection::kMetric) {
        out.metric[i] = fit.metric[head];
      } else {
        // A codec that knows each head's correction does not read it: this keeps the file valid.
        out.metric[i].setIdentity();
      }
    }
    if (!out.feedback.empty()) {
      if (source.recipe.rounding == Rounding::kShaped) {
        out.feedback[i] = fit.feedback[head];
      } else {
        out.feedback[i].setIdentity();  // pushes nothing
      }
    }
  }
  return out;
}

}  // namespace oscar
