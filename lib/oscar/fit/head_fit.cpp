// Balanced, then OSCAR's rotation, then Hadamard: the first that the head's moments can carry.
#include "oscar/fit/head_fit.h"

#include <fmt/format.h>

#include "oscar/fit/balanced_fit.h"
#include "oscar/fit/checks.h"
#include "oscar/fit/moments.h"
#include "oscar/fit/oscar_fit.h"
#include "oscar/linalg/hadamard.h"

namespace oscar {
namespace {

HeadTransform orthogonal_head(TransformKind kind, const MatrixD& rotation,
                              const VectorD& eigenvalues) {
  return {.kind = kind,
          .forward = rotation,
          .inverse = rotation.transpose(),
          .eigenvalues = eigenvalues,
          .condition_number = 1,
          .fallback = {}};
}

HeadTransform plain_head(TransformKind kind, int d) {
  const MatrixD rotation =
      kind == TransformKind::kIdentity ? MatrixD(MatrixD::Identity(d, d)) : hadamard(d);
  return orthogonal_head(kind, rotation, VectorD::Ones(d));
}

std::string join_reasons(const std::string& first, const std::string& second) {
  return first.empty() || second.empty() ? first + second : first + "; " + second;
}

// The moment, regularised where it has to be, with a note of that.
MatrixD regularised_and_noted(const MatrixD& moment, int64_t rows, const std::string& where,
                              Decompositions& decompositions, std::vector<std::string>& warnings) {
  RegularisedMoment result =
      regularised(moment, decompositions.of(moment, where).values, rows, where);
  if (!result.description.empty()) warnings.push_back(result.description);
  return std::move(result.moment);
}

HeadTransform oscar_head(const SideMoments& m, int head, bool own_basis, const std::string& where,
                         Decompositions& decompositions, std::vector<std::string>& warnings) {
  const bool key = m.side == Side::kKey;
  const MatrixD basis_of = own_basis ? m.covariance[head] : m.target[head];
  if (!(basis_of.trace() > 0)) {
    const char* what = own_basis ? "the covariance" : key ? "C_Q" : "the value target";
    HeadTransform h = plain_head(TransformKind::kHadamard, m.target.rows);
    h.fallback = fmt::format("{} is zero: Hadamard instead of OSCAR's rotation", what);
    return h;
  }
  const char* name = own_basis ? (key ? ", C_K" : ", C_V") : key ? ", C_Q" : ", value target";
  const MatrixD usable =
      regularised_and_noted(basis_of, own_basis ? m.covariance_rows : m.target_rows, where + name,
                            decompositions, warnings);
  const OscarRotation fitted = oscar_rotation(decompositions.of(usable, where + name));
  return orthogonal_head(TransformKind::kOscar, fitted.rotation, fitted.eigenvalues);
}

// Why `fitted` can't be served; "" when it can.
std::string problem_of(const BalancedTransform& fitted, Side side) {
  if (!(fitted.condition_number <= kLargestCondition)) {
    return fmt::format("cond_2(T) = {:.3g} is over {:g}", fitted.condition_number,
                       kLargestCondition);
  }
  const MatrixF forward = fitted.forward.cast<float>();
  const MatrixF partner =
      (side == Side::kKey ? MatrixD(fitted.inverse.transpose()) : fitted.inverse).cast<float>();
  return deviation_problem(transform_deviation(forward, partner, side, TransformKind::kBalanced),
                           TransformKind::kBalanced);
}

// "" and a transform, or the reason why this head can't have one.
std::string try_balanced_head(const SideMoments& m, int head, bool shaped, const std::string& where,
                              Decompositions& decompositions, std::vector<std::string>& warnings,
                              HeadTransform& result) {
  const bool key = m.side == Side::kKey;
  if (!(m.covariance[head].trace() > 0)) {
    return key ? "keys do not vary" : "values do not vary";
  }
  if (!(m.weight[head].trace() > 0)) return key ? "C_Q is zero" : "M_O is zero";
  const std::string covariance_name = where + (key ? ", C_K" : ", C_V");
  const MatrixD covariance = regularised_and_noted(m.covariance[head], m.covariance_rows,
                                                   covariance_name, decompositions, warnings);
  MatrixD weight = m.weight[head];
  if (m.weight_is_sampled) {
    weight =
        regularised_and_noted(weight, m.target_rows, where + ", C_Q", decompositions, warnings);
  }
  const BalancedBasis basis =
      balanced_basis(covariance, decompositions.of(covariance, covariance_name), weight, where);
  std::vector<BalancedTransform> tried;
  std::string problem;
  if (shaped) {
    for (const double exponent : kShapedExponents) {
      tried.push_back(shaped_balanced_transform(basis, exponent, where));
      problem = problem_of(tried.back(), m.side);
      if (problem.empty()) break;
    }
  } else {
    tried.push_back(plain_balanced_transform(basis, where));
    problem = problem_of(tried.back(), m.side);
  }
  if (!problem.empty()) return problem;
  BalancedTransform& fitted = tried.back();
  result = {.kind = TransformKind::kBalanced,
            .forward = std::move(fitted.forward),
            .inverse = std::move(fitted.inverse),
            .eigenvalues = std::move(fitted.eigenvalues),
            .condition_number = fitted.condition_number,
            .fallback = {}};
  return "";
}

}  // namespace

HeadTransform fit_head(const SideMoments& moments, int head, const HeadRequest& request,
                       const std::string& where, Decompositions& decompositions,
                       std::vector<std::string>& warnings) {
  if (request.kind == TransformKind::kIdentity || request.kind == TransformKind::kHadamard) {
    return plain_head(request.kind, moments.target.rows);
  }
  std::string reason;
  if (request.kind == TransformKind::kBalanced) {
    HeadTransform balanced;
    const std::string problem =
        try_balanced_head(moments, head, request.shaped, where, decompositions, warnings, balanced);
    if (problem.empty()) return balanced;
    reason = problem + ": OSCAR's rotation instead of the balanced transform";
  }
  HeadTransform h = oscar_head(moments, head, request.own_basis, where, decompositions, warnings);
  h.fallback = join_reasons(reason, h.fallback);
  return h;
}

}  // namespace oscar
