// Recipes and the words for their parts.
#include "oscar/fit/presets.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar {
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
          .key_centres = true,
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

const char* key_centres_name(bool two) { return two ? "two" : "one"; }

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

}  // namespace oscar
