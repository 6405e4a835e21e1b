// Deviations from the identity in float64, and the limits they are held to.
#include "oscar/fit/checks.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <set>

#include "oscar/base/error.h"

namespace oscar {
namespace {

// Nearest bf16, ties to even; for finite values.
float rounded_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

MatrixD widened(const MatrixF& m) { return m.cast<double>(); }
MatrixD through_bf16(const MatrixF& m) { return m.unaryExpr(&rounded_to_bf16).cast<double>(); }

double from_identity(const MatrixD& product) {
  const double largest =
      (product - MatrixD::Identity(product.rows(), product.cols())).cwiseAbs().maxCoeff();
  return product.allFinite() ? largest : INFINITY;
}

MatrixD paired(const MatrixD& forward, const MatrixD& partner, Side side) {
  return side == Side::kKey ? MatrixD(partner.transpose() * forward) : MatrixD(forward * partner);
}

}  // namespace

TransformDeviation transform_deviation(const MatrixF& forward, const MatrixF& partner, Side side,
                                       TransformKind kind) {
  TransformDeviation result;
  if (forward.size() == 0) return result;
  result.inverse = from_identity(paired(widened(forward), widened(partner), side));
  result.inverse_bf16 = from_identity(paired(through_bf16(forward), through_bf16(partner), side));
  if (kind != TransformKind::kBalanced) {
    result.orthogonality = from_identity(widened(forward).transpose() * widened(forward));
  }
  return result;
}

std::vector<TransformDeviation> transform_deviations(const SideTransform& transform, Side side) {
  std::vector<TransformDeviation> result;
  for (int head = 0; head < transform.forward.count; ++head) {
    result.push_back(transform_deviation(transform.forward[head],
                                         partner_matrix(transform, side, head), side,
                                         transform.kind[head]));
  }
  return result;
}

std::string deviation_problem(const TransformDeviation& deviation, TransformKind kind) {
  const double limit_bf16 =
      kind == TransformKind::kBalanced ? kInverseLimitBf16Balanced : kInverseLimitBf16;
  const auto over = [](const char* name, double found, double limit) {
    return fmt::format("{} is {:.3g} from the identity, over {:g}", name, found, limit);
  };
  if (!(deviation.inverse <= kInverseLimit)) {
    return over("the transform times its inverse in f32", deviation.inverse, kInverseLimit);
  }
  if (!(deviation.orthogonality <= kInverseLimit)) {
    return over("R^T R in f32", deviation.orthogonality, kInverseLimit);
  }
  if (!(deviation.inverse_bf16 <= limit_bf16)) {
    return over("the transform times its inverse in bf16", deviation.inverse_bf16, limit_bf16);
  }
  return "";
}

std::string clip_losses_problem(const ClipLosses& losses, int heads) {
  const auto ratios = losses.ratio.size();
  if (ratios == 0 || ratios > kMostClipRatios) return fmt::format("{} ratios", ratios);
  if (losses.nmse.count != static_cast<int>(ratios) || losses.nmse.cols != heads ||
      losses.nmse.data.size() != ratios * static_cast<size_t>(heads)) {
    return fmt::format("losses of {} ratios and {} heads for {} ratios and {} heads",
                       losses.nmse.count, losses.nmse.cols, ratios, heads);
  }
  std::set<float> seen;
  for (const float ratio : losses.ratio) {
    if (!(ratio >= 0 && ratio <= 1)) return fmt::format("a ratio of {}", ratio);
    if (!seen.insert(ratio).second) return fmt::format("the ratio {} twice", ratio);
  }
  for (const double loss : losses.nmse.data) {
    if (!std::isfinite(loss) || loss < 0) return fmt::format("a loss of {}", loss);
  }
  return "";
}

void require_valid(const SideTransform& transform, Side side, const std::string& where) {
  const char* name = side == Side::kKey ? "keys" : "values";
  const auto fail = [&](int head, const std::string& found) {
    throw Error({.what = "a transform failed its numerical checks",
                 .where = fmt::format("{}, {}, head {}", where, name, head),
                 .found = found,
                 .hint = "the file is damaged or was not made by this tool; fit it again"});
  };
  const std::vector<TransformDeviation> deviations = transform_deviations(transform, side);
  for (int head = 0; head < transform.forward.count; ++head) {
    const std::string problem = deviation_problem(deviations[head], transform.kind[head]);
    if (!problem.empty()) fail(head, problem);
    const auto eigenvalues = transform.eigenvalues[head];
    if (!eigenvalues.allFinite()) fail(head, "an eigenvalue that is not finite");
    for (int i = 1; i < eigenvalues.size(); ++i) {
      if (eigenvalues[i] < eigenvalues[i - 1]) fail(head, "eigenvalues that do not ascend");
    }
    if (!transform.mean[head].allFinite()) fail(head, "a mean that is not finite");
    if (!transform.metric.empty() && !transform.metric[head].allFinite()) {
      fail(head, "a metric that is not finite");
    }
    if (!transform.feedback.empty()) {
      const MatrixF u = transform.feedback[head];
      if (!u.allFinite() || !u.isUpperTriangular(0) || (u.diagonal().array() != 1.0f).any()) {
        fail(head, "a feedback factor that is not unit upper triangular");
      }
    }
  }
}

}  // namespace oscar
