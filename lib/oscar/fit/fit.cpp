// One layer, keys and values, head by head; several fits of it side by side.
#include "oscar/fit/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "oscar/base/parallel.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/layer_fits.h"
#include "oscar/fit/metric.h"
#include "oscar/fit/moments.h"

namespace oscar {
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
                       const MatrixStack<double>& centres, const FitRequest& request,
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
  if (!centres.empty()) {
    out.centres = MatrixStack<float>(heads, centres.rows, centres.cols);
    std::ranges::transform(centres.data, out.centres.data.begin(),
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
      result.key = fit_side(key, own.key_mean, own.key_centres, request, options.clip_k,
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

bool is_centred(const SideTransform& side) {
  return std::any_of(side.mean.data.begin(), side.mean.data.end(),
                     [](float entry) { return entry != 0; });
}

std::string key_centres_problem(const FitOptions& options) {
  if (options.row_weights == RowWeights::kEven) {
    return "they are made of rows weighted by attention";
  }
  if (!options.center) return "they are not centred";
  if (options.position_span == 0) return "they are not averaged over served positions";
  return "";
}

bool has_centres(const SideTransform& side, int head) {
  return !side.centres.empty() && (side.centres[head].array() != 0).any();
}

bool has_centres(const SideTransform& side) {
  return std::ranges::any_of(side.centres.data, [](float entry) { return entry != 0; });
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
