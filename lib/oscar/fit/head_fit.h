// The transform of one head, with the fallbacks of heads that can't have the asked kind (math 6.4).
#pragma once

#include <string>
#include <vector>

#include "oscar/fit/decompositions.h"
#include "oscar/fit/fit.h"

namespace oscar {

// What one side of a layer is fitted from; stacks over heads.
struct SideMoments {
  Side side;
  std::string name;                       // "layer 3, keys"
  const MatrixStack<double>& covariance;  // C_K or C_V
  const MatrixStack<double>& target;      // of OSCAR's rotation: C_Q, C_S or the energy moment
  const MatrixStack<double>& weight;      // of the balanced transform: C_Q or M_O
  int64_t covariance_rows, target_rows;
  bool weight_is_sampled;  // C_Q is, M_O is not
};

// What is asked of every head of a side.
struct HeadRequest {
  TransformKind kind;
  bool own_basis;  // of kOscar: eigenvectors of the covariance, not of the target
  bool shaped;     // of kBalanced: for shaped rounding (balanced_fit.h)
};

struct HeadTransform {
  TransformKind kind = TransformKind::kIdentity;
  MatrixD forward, inverse;  // [d, d]
  VectorD eigenvalues;       // [d]
  double condition_number = 1;
  std::string fallback;  // why `kind` is not the asked one
};

// `where` names the head in `warnings` and errors.
HeadTransform fit_head(const SideMoments& moments, int head, const HeadRequest& request,
                       const std::string& where, Decompositions& decompositions,
                       std::vector<std::string>& warnings);

}  // namespace oscar
