// From statistics to transforms: rotations, balanced transforms, metrics and feedback factors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/cache/row_recipe.h"
#include "oscar/checkpoint/rope.h"
#include "oscar/fit/statistics.h"

namespace oscar {

enum class TransformKind : uint8_t { kIdentity = 0, kHadamard = 1, kOscar = 2, kBalanced = 3 };
enum class ValueObjective { kAttentionOutput, kEnergy };  // "sv" and "energy"
enum class Granularity { kPerHead, kShared };
// How much a row counts in what a fit is made from: all alike, or by the attention that it receives
// as an INT2 row, and queries by what they pay (math 2.6).
enum class RowWeights { kEven, kAttention };

// Clipping ratios of the paper and of its released files, the same for every model.
inline constexpr double kPublishedClipK = 0.96, kPublishedClipV = 0.92;

// One fully decided way of fitting a layer. "auto" choices are made above, by held-out loss.
struct FitOptions {
  TransformKind kind = TransformKind::kOscar;
  ValueObjective objective_v = ValueObjective::kAttentionOutput;
  Granularity granularity = Granularity::kPerHead;
  RowWeights row_weights = RowWeights::kEven;
  bool center = false;
  // Keys about the nearer of two centres a segment of positions (math 4.9). Needs `center`, rows
  // weighted by attention and served positions; fits fall back to one mean and say why.
  bool key_centres = false;
  Rounding rounding = Rounding::kPlain;
  ScaleCorrection scale_correction = ScaleCorrection::kNone;
  double clip_k = kPublishedClipK, clip_v = kPublishedClipV;  // 0 = off
  int64_t position_span = 0;  // average over [0, span]; 0 = positions as collected

  bool operator==(const FitOptions&) const = default;
};

// Why keys fitted with these options can't have two centres, whatever `key_centres` says; "" when
// they can.
std::string key_centres_problem(const FitOptions& options);

enum class Side { kKey, kValue };

// What a search measured of one side's clipping ratios, the other side exact: what a later choice
// of fewer ratios than heads needs (math 9.6).
struct ClipLosses {
  // [ratios], each once, 0 = off; the first is what the search began with.
  std::vector<float> ratio;
  VectorStack<double> nmse;  // [ratios, Hkv], loss as a share of the head's energy (math 9.2)

  bool operator==(const ClipLosses&) const = default;
};

// Transform of keys or of values of one layer. Row vectors: x' = (x - mean) forward.
// Keys: q' = q partner with partner = forward^-T, so that q' k'^T = q (k - mean)^T.
// Values: o = o' partner + mean with partner = forward^-1.
struct SideTransform {
  std::vector<TransformKind> kind;    // [Hkv], what each head really has
  std::vector<std::string> fallback;  // [Hkv], reason when kind is not the asked one, else ""
  MatrixStack<float> forward;         // [Hkv, d, d]  k_rotation / v_rotation
  // [Hkv, d, d]  q_rotation = forward^-T for keys, o_rotation = forward^-1 for values; absent when
  // every head is orthogonal (then it equals forward, or forward^T).
  MatrixStack<float> partner;
  VectorStack<float> mean;  // [Hkv, d], zeros when not centred
  // [Hkv, 2, d] of keys: what stays of the two centres over a segment, before RoPE, in the model's
  // basis (key_centres.h). Absent, or zeros for a head: its rows are coded as they are.
  MatrixStack<float> centres;
  VectorStack<double> eigenvalues;       // [Hkv, d] ascending
  SideRecipe recipe;                     // [Hkv], how rows are written
  MatrixStack<float> metric;             // [Hkv, d, d] M, undamped, mean diagonal 1; may be absent
  MatrixStack<float> feedback;           // [Hkv, d, d] unit upper triangular U; may be absent
  std::vector<double> condition_number;  // [Hkv], cond_2 of forward; 1 when orthogonal
  // Absent: ratios were not searched.
  std::optional<ClipLosses> clip_losses;
};

struct LayerTransforms {
  LayerGeometry geometry;
  SideTransform key, value;
  std::vector<double> predicted_output_nmse;  // [Hkv]; NaN until measured by the search
  std::vector<std::string> warnings;          // rank deficiency and the like, with numbers
  Json search;  // what was compared and why this was chosen (bundle/SCHEMA.md); null: nothing was
};

inline const SideTransform& side_of(const LayerTransforms& layer, Side side) {
  return side == Side::kKey ? layer.key : layer.value;
}

// Whether a mean is taken off some head's rows, and whether some head has centres.
bool is_centred(const SideTransform& side);
bool has_centres(const SideTransform& side);
bool has_centres(const SideTransform& side, int head);

// Fits one layer. `rope` is needed when position_span > 0. Throws Error for zero counts and for
// non-finite sums (naming layer and moment).
// A head whose statistics can't carry the asked kind gets the next simpler one (balanced, OSCAR,
// Hadamard) and the reason in `fallback`.
LayerTransforms fit_layer(const LayerStatistics& statistics, const FitOptions& options,
                          const Rope& rope);

// [d, d] q_rotation or o_rotation of one head: the stored partner, or what `forward` implies when
// every head is orthogonal and none is stored.
MatrixF partner_matrix(const SideTransform& transform, Side side, int head);

}  // namespace oscar
