// Statistics to the transforms of all layers: presets, portable variants, checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/statistics.h"
#include "oscar/model/checkpoint/rope.h"

namespace oscar {

// What held-out loss may decide instead of the preset.

// How many clipping ratios there are: what a backend has places for.
enum class ClipScope : uint8_t {
  kHead,      // a ratio for each layer, KV head and side
  kLayer,     // a ratio for each layer and side
  kModel,     // one ratio for all keys, one for all values
  kModelBoth  // one ratio
};

// A part that is not searched keeps its value of FitOptions, which is also what ties go to.
struct SearchOptions {
  bool kind = false;        // the orthogonal transforms and the balanced one
  bool orthogonal = false;  // of kinds only orthogonal ones, for backends with one matrix a side
  bool center = false;
  bool granularity = false;  // per KV head or per layer
  bool row_weights = false;  // even or by attention
  bool key_centers = false;  // one mean, or the nearer of two centers a segment
  bool clip = false;
  ClipScope clip_scope = ClipScope::kHead;  // other: losses are pooled when all layers are searched
  bool rounding = false, scale_correction = false;
  // Of a KV head that the default makes worse than Hadamard with the published clipping ratios
  // does, that instead. Rides along: by itself it asks for no search.
  bool fallback = false;

  bool any() const {
    return kind || center || granularity || row_weights || key_centers || clip || rounding ||
           scale_correction;
  }
  bool operator==(const SearchOptions&) const = default;
};

// From statistics to transforms: rotations, balanced transforms, metrics and feedback factors.

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
  // Keys about the nearer of two centers a segment of positions (math 4.9). Needs `center`, rows
  // weighted by attention and served positions; fits fall back to one mean and say why.
  bool key_centers = false;
  Rounding rounding = Rounding::kPlain;
  ScaleCorrection scale_correction = ScaleCorrection::kNone;
  double clip_k = kPublishedClipK, clip_v = kPublishedClipV;  // 0 = off
  int64_t position_span = 0;  // average over [0, span]; 0 = positions as collected

  bool operator==(const FitOptions&) const = default;
};

// Why keys fitted with these options can't have two centers, whatever `key_centers` says; "" when
// they can.
std::string key_centers_problem(const FitOptions& options);

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
  VectorStack<float> mean;  // [Hkv, d], zeros when not centered
  // [Hkv, 2, d] of keys: what stays of the two centers over a segment, before RoPE, in the model's
  // basis (head_fit.h). Absent, or zeros for a head: its rows are coded as they are.
  MatrixStack<float> centers;
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

// Whether a mean is taken off some head's rows, and whether some head has centers.
bool is_centered(const SideTransform& side);
bool has_centers(const SideTransform& side);
bool has_centers(const SideTransform& side, int head);

// Fits one layer. `rope` is needed when position_span > 0. Throws Error for zero counts and for
// non-finite sums (naming layer and moment).
// A head whose statistics can't carry the asked kind gets the next simpler one (balanced, OSCAR,
// Hadamard) and the reason in `fallback`.
LayerTransforms fit_layer(const LayerStatistics& statistics, const FitOptions& options,
                          const Rope& rope);

// [d, d] q_rotation or o_rotation of one head: the stored partner, or what `forward` implies when
// every head is orthogonal and none is stored.
MatrixF partner_matrix(const SideTransform& transform, Side side, int head);

// The named recipes: every default of the fit in one table.

struct Preset {
  const char* name;
  const char* summary;  // one line for --help
  FitOptions fit;       // position_span -1 = every position the model serves
  // What held-out loss chooses instead of `fit`, and what it chooses with --for, as a server may
  // take less than `fit`.
  SearchOptions search, server_search;
};

// "best" (default), "paper" (arXiv 2605.17757) and "released" (the published v1 files).
const std::vector<Preset>& presets();

// Throws Error listing the names when there is none of this name.
const Preset& find_preset(std::string_view name);

// Names as used on the command line and in the bundle. A composition is the bundle's word for the
// product that the kind stands for: t_h also where shaped rounding puts another mixing matrix in
// the place of H (head_fit.h).
const char* method_name(TransformKind kind);            // balanced, oscar, hadamard, identity
const char* composition_name(TransformKind kind);       // t_h, r_h_pbr, h, identity
const char* objective_name(ValueObjective objective);   // sv, energy
const char* granularity_name(Granularity granularity);  // per-head, shared
const char* row_weights_name(RowWeights weights);       // even, attention
const char* key_centers_name(bool two);                 // one, two
const char* scale_correction_name(ScaleCorrection correction);  // none, unbiased, metric
const char* rounding_name(Rounding rounding);                   // shaped, plain

// A clipping ratio in words: "0.96", or "off" for 0.
std::string clip_text(double ratio);

// The numerical checks that a bundle's transforms must pass, when fitted and when loaded.

// Largest absolute entries allowed (math 12.5).
inline constexpr double kInverseLimit = 1e-5;              // as stored, f32
inline constexpr double kInverseLimitBf16 = 5e-3;          // rounded to bf16, orthogonal heads
inline constexpr double kInverseLimitBf16Balanced = 2e-2;  // rounded to bf16, balanced heads

// Largest absolute entries of one head's deviations from the identity.
struct TransformDeviation {
  double inverse = 0;        // q_rotation^T k_rotation - I, or v_rotation o_rotation - I
  double inverse_bf16 = 0;   // the same after rounding both matrices to bf16
  double orthogonality = 0;  // forward^T forward - I; 0 for balanced heads
};

// `forward` and `partner` [d, d] as stored.
TransformDeviation transform_deviation(const MatrixF& forward, const MatrixF& partner, Side side,
                                       TransformKind kind);

// [Hkv] deviations of a whole side.
std::vector<TransformDeviation> transform_deviations(const SideTransform& transform, Side side);

// "" when `deviation` is within the limits of `kind`, else what is wrong, with both numbers.
std::string deviation_problem(const TransformDeviation& deviation, TransformKind kind);

// A search tries some ten.
inline constexpr uint64_t kMostClipRatios = 1024;

// "" when `losses` are those of `heads` heads: 1 to kMostClipRatios ratios, each within 0 and 1 and
// there once, and of each finite losses that are not negative. Else what is wrong.
std::string clip_losses_problem(const ClipLosses& losses, int heads);

// Throws Error, naming `where` and the head, when a deviation is over its limit, an entry is not
// finite, eigenvalues are not ascending or a feedback factor is not unit upper triangular.
void require_valid(const SideTransform& transform, Side side, const std::string& where);

// The recipe of transforms that every server can run, whatever else is fitted.

// OSCAR's rotation with a plain writer, uncentered, clipping ratios as published; objective and
// positions as in `fixed`.
FitOptions portable_options(const FitOptions& fixed, Granularity granularity);

// That fit of one layer; its warnings are those of the layer's main fit and are left out.
LayerTransforms fit_portable(const LayerStatistics& statistics, const FitOptions& fixed,
                             Granularity granularity, const Rope& rope);

// Several ways of fitting one layer, for a choice among them.

// One way of fitting a layer.
struct FitRequest {
  FitOptions options;
  // Of kind kOscar (math 3.5): U of R = U H P is the eigenbasis of what a side stores (C_K, C_V)
  // instead of what attention weighs (C_Q, C_S). After H all channels then have the same variance,
  // so one scale fits the whole row; what attention weighs is left to shaped rounding. For backends
  // that serve rotations only: KL of INT2 keys alone is .84 of that with OSCAR's U, standard error
  // .03, both shaped, measured as in head_fit.h.
  bool own_basis = false;

  bool operator==(const FitRequest&) const = default;
};

// The fits in the order of `requests`, each equal to fit_layer's where that has the option. A
// thread for each request; eigenvectors that several need are computed once. Throws as fit_layer
// does.
std::vector<LayerTransforms> fit_layer_variants(const LayerStatistics& statistics,
                                                const std::vector<FitRequest>& requests,
                                                const Rope& rope);

// Lists with an entry for every layer of a model, of which local ones are empty.

// The first layer with statistics and transforms, of `layers` with a `geometry`. Throws Error,
// naming `where`, when there is none.
template <typename Layers>
const auto& first_fitted(const Layers& layers, const std::string& where) {
  const auto found =
      std::ranges::find_if(layers, [](const auto& layer) { return layer.geometry.fitted(); });
  if (found == layers.end()) {
    throw Error({.what = "no layer has statistics or transforms", .where = where});
  }
  return *found;
}

// The entry of a local layer among transforms.
inline LayerTransforms without_transforms(const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  return layer;
}

}  // namespace oscar
