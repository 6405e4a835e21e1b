// Statistics to the transforms of all layers: presets, portable variants, checks.
#include "oscar/fit/fit.h"

#include <fmt/format.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/moments.h"

namespace oscar {

// Recipes and the words for their parts.

namespace {

constexpr int64_t kAllServedPositions = -1;

FitOptions published(ValueObjective objective) {
  return {.kind = TransformKind::kOscar,
          .objective_v = objective,
          .granularity = Granularity::kShared,
          .center = false,
          .rounding = Rounding::kPlain,
          .scale_correction = ScaleCorrection::kNone,
          .clip_k = kPublishedClipK,
          .clip_v = kPublishedClipV,
          .position_span = 0};
}

FitOptions best() {
  return {.kind = TransformKind::kBalanced,
          .objective_v = ValueObjective::kAttentionOutput,
          .granularity = Granularity::kPerHead,
          .row_weights = RowWeights::kAttention,
          .center = true,
          .key_centers = true,
          .rounding = Rounding::kShaped,
          .scale_correction = ScaleCorrection::kMetric,
          .clip_k = 0.92,
          .clip_v = 0.92,
          .position_span = kAllServedPositions};
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> table = {
      {"best",
       "balanced transform, rows by attention, two key centers, shaped rounding, metric scale",
       best(),
       {.clip = true, .fallback = true},
       {.kind = true,
        .center = true,
        .granularity = true,
        .clip = true,
        .rounding = true,
        .scale_correction = true,
        .fallback = true}},
      {"paper",
       "OSCAR as in arXiv 2605.17757",
       published(ValueObjective::kAttentionOutput),
       {},
       {}},
      {"released",
       "OSCAR as in its published v1 files",
       published(ValueObjective::kEnergy),
       {},
       {}},
  };
  return table;
}

const Preset& find_preset(std::string_view name) {
  std::string known;
  for (const Preset& preset : presets()) {
    if (name == preset.name) return preset;
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  throw Error({.what = "unknown preset",
               .where = "--preset",
               .expected = known,
               .found = std::string(name)});
}

const char* method_name(TransformKind kind) {
  switch (kind) {
    case TransformKind::kIdentity:
      return "identity";
    case TransformKind::kHadamard:
      return "hadamard";
    case TransformKind::kOscar:
      return "oscar";
    case TransformKind::kBalanced:
      break;
  }
  return "balanced";
}

const char* composition_name(TransformKind kind) {
  switch (kind) {
    case TransformKind::kIdentity:
      return "identity";
    case TransformKind::kHadamard:
      return "h";
    case TransformKind::kOscar:
      return "r_h_pbr";
    case TransformKind::kBalanced:
      break;
  }
  return "t_h";
}

const char* objective_name(ValueObjective objective) {
  return objective == ValueObjective::kEnergy ? "energy" : "sv";
}

const char* granularity_name(Granularity granularity) {
  return granularity == Granularity::kShared ? "shared" : "per-head";
}

const char* row_weights_name(RowWeights weights) {
  return weights == RowWeights::kAttention ? "attention" : "even";
}

const char* key_centers_name(bool two) { return two ? "two" : "one"; }

const char* scale_correction_name(ScaleCorrection correction) {
  switch (correction) {
    case ScaleCorrection::kUnbiased:
      return "unbiased";
    case ScaleCorrection::kMetric:
      return "metric";
    case ScaleCorrection::kNone:
      break;
  }
  return "none";
}

const char* rounding_name(Rounding rounding) {
  return rounding == Rounding::kShaped ? "shaped" : "plain";
}

std::string clip_text(double ratio) { return ratio > 0 ? fmt::format("{:.2f}", ratio) : "off"; }

// Deviations from the identity in float64, and the limits they are held to.

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

// Published values, and the fit with them.

FitOptions portable_options(const FitOptions& fixed, Granularity granularity) {
  return {.kind = TransformKind::kOscar,
          .objective_v = fixed.objective_v,
          .granularity = granularity,
          .row_weights = fixed.row_weights,
          .center = false,
          .rounding = Rounding::kPlain,
          .scale_correction = ScaleCorrection::kNone,
          .clip_k = kPublishedClipK,
          .clip_v = kPublishedClipV,
          .position_span = fixed.position_span};
}

LayerTransforms fit_portable(const LayerStatistics& statistics, const FitOptions& fixed,
                             Granularity granularity, const Rope& rope) {
  LayerTransforms layer = fit_layer(statistics, portable_options(fixed, granularity), rope);
  layer.warnings.clear();
  return layer;
}

// One layer, keys and values, head by head; several fits of it side by side.

namespace {

// Writes the heads out as stored: f32, partners only when some head is not orthogonal.
void store_heads(const std::vector<HeadTransform>& heads, Side side, SideTransform& out) {
  const int count = static_cast<int>(heads.size());
  const int d = static_cast<int>(heads.front().forward.rows());
  bool any_balanced = false;
  for (const HeadTransform& h : heads) any_balanced |= h.kind == TransformKind::kBalanced;
  out.forward = MatrixStack<float>(count, d, d);
  if (any_balanced) out.partner = MatrixStack<float>(count, d, d);
  out.eigenvalues = VectorStack<double>(count, d);
  for (int i = 0; i < count; ++i) {
    const HeadTransform& h = heads[i];
    out.kind.push_back(h.kind);
    out.fallback.push_back(h.fallback);
    out.condition_number.push_back(h.condition_number);
    out.eigenvalues[i] = h.eigenvalues;
    out.forward[i] = h.forward.cast<float>();
    if (any_balanced) {
      const MatrixD partner = side == Side::kKey ? MatrixD(h.inverse.transpose()) : h.inverse;
      out.partner[i] = partner.cast<float>();
    }
  }
}

SideTransform fit_side(const SideMoments& m, const VectorStack<double>& mean,
                       const MatrixStack<double>& centers, const FitRequest& request,
                       double clip_ratio, Decompositions& decompositions,
                       std::vector<std::string>& warnings) {
  const FitOptions& options = request.options;
  const HeadRequest wanted{options.kind, request.own_basis, options.rounding == Rounding::kShaped};
  const bool shared = options.granularity == Granularity::kShared;
  const int heads = m.target.count;
  std::vector<HeadTransform> fitted(static_cast<size_t>(heads));
  std::vector<std::vector<std::string>> of_head(fitted.size());
  parallel_for(shared ? 1 : heads, [&](int64_t index) {
    const int head = static_cast<int>(index);
    const std::string where =
        shared ? m.name + ", all heads" : fmt::format("{}, head {}", m.name, head);
    const auto i = static_cast<size_t>(index);
    fitted[i] = fit_head(m, head, wanted, where, decompositions, of_head[i]);
  });
  if (shared) std::fill(fitted.begin() + 1, fitted.end(), fitted.front());
  for (const auto& own : of_head) warnings.insert(warnings.end(), own.begin(), own.end());
  SideTransform out;
  store_heads(fitted, m.side, out);
  out.mean = VectorStack<float>(heads, mean.cols);
  for (int head = 0; head < heads; ++head) out.mean[head] = mean[head].cast<float>();
  if (!centers.empty()) {
    out.centers = MatrixStack<float>(heads, centers.rows, centers.cols);
    std::ranges::transform(centers.data, out.centers.data.begin(),
                           [](double entry) { return static_cast<float>(entry); });
  }
  out.recipe = SideRecipe(static_cast<size_t>(heads),
                          {.clip_ratio = static_cast<float>(clip_ratio),
                           .scale_correction = options.scale_correction});  // rounding: set_metric
  return out;
}

// A moment that two transforms looked at is reported once.
void drop_repeats(std::vector<std::string>& warnings) {
  std::vector<std::string> kept;
  for (const std::string& warning : warnings) {
    if (std::find(kept.begin(), kept.end(), warning) == kept.end()) kept.push_back(warning);
  }
  warnings = std::move(kept);
}

void warn_of_few_rows(const LayerGeometry& g, int64_t count_kv, TransformKind kind,
                      std::vector<std::string>& warnings) {
  const bool uses_statistics = kind == TransformKind::kOscar || kind == TransformKind::kBalanced;
  const int64_t wanted = kRowsPerDimension * std::max(g.head_dim_k, g.head_dim_v);
  if (!uses_statistics || count_kv >= wanted) return;
  warnings.push_back(
      fmt::format("layer {}: {} tokens are few for head dimension {}; calibrate on at least {}",
                  g.layer_id, count_kv, std::max(g.head_dim_k, g.head_dim_v), wanted));
}

LayerTransforms fit_one(const LayerStatistics& statistics, const FitRequest& request,
                        const Rope& rope, Decompositions& decompositions) {
  const FitOptions& options = request.options;
  const LayerMoments own = layer_moments(statistics, options, rope);
  const bool shared = options.granularity == Granularity::kShared;
  LayerMoments fitted = own;
  if (shared) {
    for (MatrixStack<double>* stack :
         {&fitted.query, &fitted.key, &fitted.value, &fitted.value_target, &fitted.output_metric}) {
      *stack = shared_over_heads(*stack);
    }
  }
  const int64_t pooled = shared ? statistics.geometry.num_kv_heads : 1;
  const int64_t rows_q = own.count_q * pooled, rows_kv = own.count_kv * pooled;
  const int64_t rows_target = options.objective_v == ValueObjective::kEnergy ? rows_kv : rows_q;

  LayerTransforms result;
  result.geometry = statistics.geometry;
  if (!own.warning.empty()) result.warnings.push_back(own.warning);
  warn_of_few_rows(result.geometry, own.count_kv, options.kind, result.warnings);
  const std::string layer = fmt::format("layer {}", result.geometry.layer_id);
  const SideMoments key{Side::kKey,   layer + ", keys", fitted.key, fitted.query,
                        fitted.query, rows_kv,          rows_q,     true};
  const SideMoments value{
      Side::kValue, layer + ", values", fitted.value, fitted.value_target, fitted.output_metric,
      rows_kv,      rows_target,        false};
  const bool with_metric = options.scale_correction == ScaleCorrection::kMetric;
  const bool with_feedback = options.rounding == Rounding::kShaped;
  std::vector<std::string> value_warnings;
  parallel_for(2, [&](int64_t side) {
    if (side == 0) {
      result.key = fit_side(key, own.key_mean, own.key_centers, request, options.clip_k,
                            decompositions, result.warnings);
      set_metric(result.key, Side::kKey, own.query, with_metric, with_feedback, key.name);
    } else {
      result.value = fit_side(value, own.value_mean, {}, request, options.clip_v, decompositions,
                              value_warnings);
      set_metric(result.value, Side::kValue, own.output_metric, with_metric, with_feedback,
                 value.name);
    }
  });
  result.warnings.insert(result.warnings.end(), value_warnings.begin(), value_warnings.end());
  drop_repeats(result.warnings);
  result.predicted_output_nmse.assign(static_cast<size_t>(result.geometry.num_kv_heads),
                                      std::numeric_limits<double>::quiet_NaN());
  return result;
}

}  // namespace

bool is_centered(const SideTransform& side) {
  return std::any_of(side.mean.data.begin(), side.mean.data.end(),
                     [](float entry) { return entry != 0; });
}

std::string key_centers_problem(const FitOptions& options) {
  if (options.row_weights == RowWeights::kEven) {
    return "they are made of rows weighted by attention";
  }
  if (!options.center) return "they are not centered";
  if (options.position_span == 0) return "they are not averaged over served positions";
  return "";
}

bool has_centers(const SideTransform& side, int head) {
  return !side.centers.empty() && (side.centers[head].array() != 0).any();
}

bool has_centers(const SideTransform& side) {
  return std::ranges::any_of(side.centers.data, [](float entry) { return entry != 0; });
}

MatrixF partner_matrix(const SideTransform& transform, Side side, int head) {
  if (!transform.partner.empty()) return transform.partner[head];
  return side == Side::kKey ? MatrixF(transform.forward[head])
                            : MatrixF(transform.forward[head].transpose());
}

LayerTransforms fit_layer(const LayerStatistics& statistics, const FitOptions& options,
                          const Rope& rope) {
  Decompositions decompositions;
  return fit_one(statistics, {options}, rope, decompositions);
}

std::vector<LayerTransforms> fit_layer_variants(const LayerStatistics& statistics,
                                                const std::vector<FitRequest>& requests,
                                                const Rope& rope) {
  Decompositions decompositions;
  std::vector<LayerTransforms> fits(requests.size());
  parallel_for(static_cast<int64_t>(requests.size()), [&](int64_t index) {
    const auto i = static_cast<size_t>(index);
    fits[i] = fit_one(statistics, requests[i], rope, decompositions);
  });
  return fits;
}

}  // namespace oscar
