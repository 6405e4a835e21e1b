// The portable variant of a bundle for a backend, what it is predicted to cost, and how that is
// told.
#include "oscar/bundle/backend_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "oscar/base/strings.h"
#include "oscar/fit/fit.h"

namespace oscar {

// Losses of single ratios, summed over heads and layers.

namespace {

using Layers = std::vector<const LayerTransforms*>;

// Losses of one side by ratio, and with each head's own ratio.
struct SideLosses {
  float start = 0;  // what the search began with
  std::map<float, double> by_ratio;
  double own = 0;
};

// Absent: not measured, or not with the ratio that a head has.
std::optional<SideLosses> layer_losses(const SideTransform& side) {
  if (!side.clip_losses) return std::nullopt;
  const ClipLosses& tried = *side.clip_losses;
  SideLosses losses{.start = tried.ratio.front(), .by_ratio = {}};
  for (size_t i = 0; i < tried.ratio.size(); ++i) {
    losses.by_ratio[tried.ratio[i]] = tried.nmse[static_cast<int>(i)].sum();
  }
  for (size_t head = 0; head < side.recipe.size(); ++head) {
    const auto own =
        std::find(tried.ratio.begin(), tried.ratio.end(), side.recipe.clip_ratio[head]);
    if (own == tried.ratio.end()) return std::nullopt;
    losses.own += tried.nmse[static_cast<int>(own - tried.ratio.begin())](head);
  }
  return losses;
}

// Sums of what both have.
std::map<float, double> common_sums(const std::map<float, double>& a,
                                    const std::map<float, double>& b) {
  std::map<float, double> sums;
  for (const auto& [ratio, loss] : a) {
    if (const auto other = b.find(ratio); other != b.end()) sums[ratio] = loss + other->second;
  }
  return sums;
}

// Of the ratios that every layer was tried with; absent when there is none.
std::optional<SideLosses> summed_losses(const Layers& layers, Side side) {
  std::optional<SideLosses> total;
  for (const LayerTransforms* layer : layers) {
    std::optional<SideLosses> losses = layer_losses(side_of(*layer, side));
    if (!losses) return std::nullopt;
    if (!total) {
      total = std::move(losses);
      continue;
    }
    total->own += losses->own;
    total->by_ratio = common_sums(total->by_ratio, losses->by_ratio);
  }
  if (total && total->by_ratio.empty()) return std::nullopt;
  return total;
}

// The ratio of least loss; `start` wins ties.
float best_ratio(const std::map<float, double>& losses, float start) {
  const auto begin = losses.find(start);
  auto best = begin != losses.end() ? begin : losses.begin();
  for (auto place = losses.begin(); place != losses.end(); ++place) {
    if (place->second < best->second) best = place;
  }
  return best->first;
}

// 0.96 instead of the nearest float's digits.
double as_decimal(float ratio) { return std::round(1e6 * double{ratio}) / 1e6; }

// The pair that all heads of all layers have; absent when they differ.
std::optional<ClipPair> common_pair(const Layers& layers) {
  if (layers.empty()) return std::nullopt;
  const auto one_of = [&](Side side) -> std::optional<float> {
    const float first = side_of(*layers.front(), side).recipe.clip_ratio.at(0);
    for (const LayerTransforms* layer : layers) {
      for (const float ratio : side_of(*layer, side).recipe.clip_ratio) {
        if (ratio != first) return std::nullopt;
      }
    }
    return first;
  };
  const auto key = one_of(Side::kKey), value = one_of(Side::kValue);
  if (!key || !value) return std::nullopt;
  return ClipPair{as_decimal(*key), as_decimal(*value)};
}

}  // namespace

PooledClips pool_clips(const Layers& layers, bool one_ratio) {
  const auto common = common_pair(layers);
  if (common && (!one_ratio || common->key == common->value)) return {.pair = *common};
  PooledClips unknown{.pair = {}, .loss_factor = std::nullopt};
  if (one_ratio) unknown.pair.value = unknown.pair.key;
  if (layers.empty()) return {.pair = unknown.pair};  // nothing is clipped
  const auto keys = summed_losses(layers, Side::kKey);
  const auto values = summed_losses(layers, Side::kValue);
  if (!keys || !values) return unknown;
  const double own = keys->own + values->own;
  if (!(own > 0)) return unknown;
  float key = best_ratio(keys->by_ratio, keys->start);
  float value = best_ratio(values->by_ratio, values->start);
  if (one_ratio) {
    const auto both = common_sums(keys->by_ratio, values->by_ratio);
    if (both.empty()) return unknown;
    key = value = best_ratio(both, keys->start);
  }
  return {.pair = {as_decimal(key), as_decimal(value)},
          .loss_factor = (keys->by_ratio.at(key) + values->by_ratio.at(value)) / own};
}

std::vector<ClipShare> pool_own_clips(Bundle& bundle, ClipScope scope) {
  if (scope == ClipScope::kHead) return {};
  std::vector<std::vector<LayerTransforms*>> groups;
  for (LayerTransforms& layer : bundle.layers) {
    if (!layer.geometry.quantized) continue;
    if (groups.empty() || scope == ClipScope::kLayer) groups.emplace_back();
    groups.back().push_back(&layer);
  }
  std::vector<ClipShare> shares;
  for (const auto& layers : groups) {
    const PooledClips clips =
        pool_clips({layers.begin(), layers.end()}, scope == ClipScope::kModelBoth);
    const double factor = clips.loss_factor.value_or(std::numeric_limits<double>::quiet_NaN());
    for (LayerTransforms* layer : layers) {
      auto &keys = layer->key.recipe.clip_ratio, &values = layer->value.recipe.clip_ratio;
      std::fill(keys.begin(), keys.end(), static_cast<float>(clips.pair.key));
      std::fill(values.begin(), values.end(), static_cast<float>(clips.pair.value));
      for (double& nmse : layer->predicted_output_nmse) nmse *= factor;
    }
    shares.push_back({.first_layer = layers.front()->geometry.layer_id,
                      .layers = layers.size(),
                      .clips = clips});
  }
  return shares;
}

Json pooled_clip_record(const std::vector<ClipShare>& shares) {
  Json record = Json::array();
  for (const ClipShare& share : shares) {
    const PooledClips& clips = share.clips;
    record.push_back(
        {{"first_layer", share.first_layer},
         {"layers", share.layers},
         {"clip", {clips.pair.key, clips.pair.value}},
         {"loss_factor", clips.loss_factor ? Json(*clips.loss_factor) : Json(nullptr)}});
  }
  return record;
}

// A bundle held against rows of the table.

namespace {

using Found = std::optional<Obstacle>;

template <typename T>
bool has(const std::vector<T>& list, const T& wanted) {
  return std::find(list.begin(), list.end(), wanted) != list.end();
}

bool takes_head_dim(const Backend& backend, int dim) {
  return dim % backend.head_dim_multiple == 0 && dim <= backend.largest_head_dim &&
         (!backend.power_of_two_head || (dim & (dim - 1)) == 0);
}

// The bundle's settings with 0 for groups of a whole head.
CacheFormat normalised(const Bundle& bundle) {
  CacheFormat quantizer = bundle.quantizer;
  const BundleModel& model = bundle.model;
  if (quantizer.quant_group_size == model.head_dim_k &&
      quantizer.quant_group_size == model.head_dim_v) {
    quantizer.quant_group_size = 0;
  }
  return quantizer;
}

// Why a backend can run nothing of the bundle.
Found obstacle_to_all(const Backend& backend, const Bundle& bundle) {
  using enum ObstacleKind;
  const BundleModel& model = bundle.model;
  const CacheFormat& quantizer = bundle.quantizer;
  if (!backend.architectures.empty() && !has(backend.architectures, model.architecture)) {
    return Obstacle{kArchitecture, fmt::format("reads transforms for {} only",
                                               fmt::join(backend.architectures, ", "))};
  }
  for (const int dim : {model.head_dim_k, model.head_dim_v}) {
    if (!takes_head_dim(backend, dim)) {
      return Obstacle{kHeadDim, fmt::format("does not take head_dim {}", dim)};
    }
  }
  for (const LayerTransforms& layer : bundle.layers) {
    const AttentionKind kind = layer.geometry.attention;
    if (backend.other_layers && !layer.geometry.quantized) continue;
    if (kind == AttentionKind::kNone) {
      return Obstacle{kSlidingLayers, "takes no layers without keys and values of their own"};
    }
    if (kind != AttentionKind::kFull) {
      return Obstacle{kSlidingLayers, "takes no layers with a sliding window"};
    }
  }
  // With levels of its own a backend has groups of its own, too.
  if (!backend.own_levels && !has(backend.quant_group_sizes, quantizer.quant_group_size) &&
      !has(backend.quant_group_sizes, normalised(bundle).quant_group_size)) {
    return Obstacle{kQuantGroupSize,
                    fmt::format("takes no quantization groups of {}", quantizer.quant_group_size)};
  }
  for (const int tokens : {quantizer.sink_tokens, quantizer.recent_tokens}) {
    if (tokens % backend.window_multiple != 0) {
      return Obstacle{kWindowMultiple, fmt::format("takes windows of multiples of {} tokens",
                                                   backend.window_multiple)};
    }
  }
  return std::nullopt;
}

bool heads_differ(const SideTransform& side) {
  for (int head = 1; head < side.forward.count; ++head) {
    if (side.forward[head] != side.forward[0]) return true;
  }
  return false;
}

// What one side of a layer needs that the backend does not have.
Found obstacle_to_side(const Backend& backend, const LayerTransforms& layer, Side which) {
  using enum ObstacleKind;
  const SideTransform& side = side_of(layer, which);
  const bool key = which == Side::kKey;
  const char* rows = key ? "keys" : "values";
  if (has(side.kind, TransformKind::kBalanced) &&
      !(key ? backend.key_partner : backend.value_partner)) {
    return Obstacle{kPartner, fmt::format("{} need {}", rows, key ? "q_rotation" : "o_rotation")};
  }
  if (is_centered(side) && !(key ? backend.key_mean : backend.value_mean)) {
    return Obstacle{kMean, fmt::format("{} are centered", rows)};
  }
  if (has_centers(side) && !backend.key_centers)
    return Obstacle{kMean, fmt::format("{} have two centers", rows)};
  if (!backend.per_head && heads_differ(side)) {
    return Obstacle{kHeadsDiffer, fmt::format("heads of {} differ", rows)};
  }
  for (size_t head = 0; head < side.recipe.size(); ++head) {
    const RowRecipe recipe = side.recipe[head];
    if (!backend.shaped_rounding && recipe.rounding == Rounding::kShaped) {
      return Obstacle{kShapedRounding, "rounding is shaped"};
    }
    if (!backend.scale_correction && recipe.scale_correction != ScaleCorrection::kNone) {
      return Obstacle{kScaleCorrection, "scales are corrected"};
    }
  }
  return std::nullopt;
}

using Layers = std::vector<const LayerTransforms*>;

// One variant of the bundle's quantized layers.
Layers quantized(const Bundle& bundle, BundleVariant variant) {
  Layers layers;
  for (size_t i = 0; i < bundle.layers.size(); ++i) {
    if (!bundle.layers[i].geometry.quantized) continue;
    layers.push_back(variant == BundleVariant::kOwn              ? &bundle.layers[i]
                     : variant == BundleVariant::kPortableShared ? &bundle.portable[i].shared
                                                                 : &bundle.portable[i].per_head);
  }
  return layers;
}

// Whether the layers have no more clipping ratios than the backend.
bool clips_fit(const Backend& backend, const Layers& layers) {
  if (backend.clip == ClipScope::kHead) return true;
  for (const LayerTransforms* layer : layers) {
    const LayerTransforms* first = backend.clip == ClipScope::kLayer ? layer : layers.front();
    const float key = first->key.recipe.clip_ratio[0], value = first->value.recipe.clip_ratio[0];
    const auto all = [](const SideTransform& side, float ratio) {
      return std::all_of(side.recipe.clip_ratio.begin(), side.recipe.clip_ratio.end(),
                         [ratio](float other) { return other == ratio; });
    };
    if (!all(layer->key, key) || !all(layer->value, value)) return false;
    if (backend.clip == ClipScope::kModelBoth && key != value) return false;
  }
  return true;
}

// Why a backend cannot run the bundle's own transforms.
Found obstacle_to_own(const Backend& backend, const Bundle& bundle) {
  const Layers layers = quantized(bundle, BundleVariant::kOwn);
  for (const LayerTransforms* layer : layers) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      Found obstacle = obstacle_to_side(backend, *layer, side);
      if (!obstacle) continue;
      obstacle->text += fmt::format(" (layer {})", layer->geometry.layer_id);
      return obstacle;
    }
  }
  if (!clips_fit(backend, layers)) {
    return Obstacle{ObstacleKind::kClipRatios, "it has fewer clipping ratios"};
  }
  std::string gap = codec_gap(backend, normalised(bundle));
  if (!gap.empty()) return Obstacle{ObstacleKind::kCodec, std::move(gap)};
  return std::nullopt;
}

// Sum over layers and heads; absent where something was not measured.
std::optional<double> predicted_error(const Layers& layers) {
  double sum = 0;
  for (const LayerTransforms* layer : layers) {
    for (const double nmse : layer->predicted_output_nmse) {
      if (std::isnan(nmse)) return std::nullopt;
      sum += nmse;
    }
  }
  return sum;
}

std::optional<double> error_over_own(const Bundle& bundle, const Layers& layers) {
  const auto error = predicted_error(layers);
  const auto own = predicted_error(quantized(bundle, BundleVariant::kOwn));
  if (!error || !own || !(*own > 0)) return std::nullopt;
  return *error / *own;
}

std::optional<RowFormat> format_for(const Backend& backend, const Bundle& bundle) {
  if (backend.own_levels) return std::nullopt;
  CacheFormat quantizer = normalised(bundle);
  const auto takes = [&](const BackendMetadata& metadata) {
    return !metadata.whole_head_only || quantizer.quant_group_size == 0;
  };
  const auto& all = backend.metadata;
  const bool has_dtype = std::any_of(all.begin(), all.end(), [&](const BackendMetadata& metadata) {
    return metadata.dtype == quantizer.metadata_dtype && takes(metadata);
  });
  if (!has_dtype) quantizer.metadata_dtype = std::find_if(all.begin(), all.end(), takes)->dtype;
  take_rules_of(backend, quantizer);
  quantizer.quant_group_size = bundle.quantizer.quant_group_size;
  return quantizer.row_format();
}

BackendRun run_of(const Backend& backend, const Bundle& bundle, BundleVariant variant) {
  const Layers layers = quantized(bundle, variant);
  BackendRun run{.variant = variant,
                 .clips = {.scope = backend.clip, .pair = {}},
                 .format = format_for(backend, bundle),
                 .packing = backend.packing,
                 .relative_error = {},
                 .unknown = {},
                 .kl_factor = {},
                 .on_calibration_text = false};
  std::optional<double> factor = 1.0;
  if (backend.clip == ClipScope::kModel || backend.clip == ClipScope::kModelBoth) {
    const PooledClips pooled = pool_clips(layers, backend.clip == ClipScope::kModelBoth);
    run.clips.pair = pooled.pair;
    factor = pooled.loss_factor;
  }
  const std::optional<double> error =
      variant == BundleVariant::kOwn ? 1.0 : error_over_own(bundle, layers);
  if (backend.own_levels) {
    run.unknown = ErrorUnknown::kOwnLevels;
  } else if (!factor) {
    run.unknown = ErrorUnknown::kNoClipLosses;
  } else if (!error) {
    run.unknown = ErrorUnknown::kNotMeasured;
  } else {
    run.relative_error = *factor * *error;
  }
  return run;
}

// The variant of less error; one rotation a KV head where that is not known.
BackendRun best_portable(const Backend& backend, const Bundle& bundle) {
  BackendRun shared = run_of(backend, bundle, BundleVariant::kPortableShared);
  if (!backend.per_head) return shared;
  BackendRun per_head = run_of(backend, bundle, BundleVariant::kPortablePerHead);
  const bool known = shared.relative_error && per_head.relative_error;
  return known && *shared.relative_error <= *per_head.relative_error ? shared : per_head;
}

std::optional<double> factor_of(const MeasuredKl& measured, BundleVariant variant) {
  const auto& kl = variant == BundleVariant::kPortableShared ? measured.shared : measured.per_head;
  if (!kl || !(*kl >= 0) || !measured.own || !(*measured.own > 0)) return std::nullopt;
  return *kl / *measured.own;
}

}  // namespace

BackendPlan plan_for(const Backend& backend, const Bundle& bundle) {
  return plan_for(backend, bundle, measured_kl(bundle));
}

BackendPlan plan_for(const Backend& backend, const Bundle& bundle, const MeasuredKl& measured) {
  BackendPlan plan{.backend = &backend, .obstacles = {}, .run = {}};
  if (Found obstacle = obstacle_to_all(backend, bundle)) {
    plan.obstacles = {std::move(*obstacle)};
    return plan;
  }
  if (Found obstacle = obstacle_to_own(backend, bundle)) {
    plan.obstacles = {std::move(*obstacle)};
  } else {
    plan.run = run_of(backend, bundle, BundleVariant::kOwn);
    return plan;
  }
  if (bundle.portable.empty()) {
    Obstacle& missing = plan.obstacles.emplace_back();
    missing.kind = ObstacleKind::kNoPortable;
    missing.text = "the file has no portable variant";
  } else {
    plan.run = best_portable(backend, bundle);
    if (!backend.own_levels) plan.run->kl_factor = factor_of(measured, plan.run->variant);
    plan.run->on_calibration_text = plan.run->kl_factor && measured.on_calibration_text;
  }
  return plan;
}

bool is_not_to_serve(const BackendRun& run) {
  return run.kl_factor && *run.kl_factor >= kTooManyTimes;
}

std::vector<BackendPlan> plan_for_all(const Bundle& bundle, const MeasuredKl& measured) {
  std::vector<BackendPlan> plans;
  for (const Backend& backend : backends()) plans.push_back(plan_for(backend, bundle, measured));
  return plans;
}

std::vector<BackendPlan> plan_for_all(const Bundle& bundle) {
  return plan_for_all(bundle, measured_kl(bundle));
}

// Words for each value of the table, of a choice and of a plan.

namespace {

const char* clip_name(ClipScope scope) {
  switch (scope) {
    case ClipScope::kHead:
      return "a ratio for each layer, KV head and side";
    case ClipScope::kLayer:
      return "a ratio for each layer and side";
    case ClipScope::kModel:
      return "one ratio for all keys, one for all values";
    case ClipScope::kModelBoth:
      break;
  }
  return "one ratio";
}

const char* span_name(const Backend& backend) {
  if (backend.own_levels) return "each 128 values less their mean";
  return backend.rules.clip_span == ClipSpan::kHeadRow ? "the head's row"
                                                       : "each quantization group";
}

const char* zero_name(const Backend& backend) {
  if (backend.own_levels) return "mean and spread of the row";
  return backend.rules.zero == ZeroForm::kCodeUnits ? "zero point in code units"
                                                    : "minimum of the row";
}

const char* rounding_rule(const Backend& backend) {
  if (backend.own_levels) return "fixed thresholds";
  return backend.rules.ties == CodeTies::kUp ? "nearest, halves up" : "nearest, halves to even";
}

std::string joined(const Json& list, const char* separator = ", ") {
  std::string text;
  for (const Json& entry : list) {
    text += (text.empty() ? "" : separator) + entry.get<std::string>();
  }
  return text;
}

Json group_names(const Backend& backend) {
  Json names = Json::array();
  for (const int size : backend.quant_group_sizes) {
    names.push_back(size == 0 ? std::string("head_dim") : std::to_string(size));
  }
  return names;
}

Json metadata_names(const Backend& backend) {
  Json names = Json::array();
  for (const BackendMetadata& metadata : backend.metadata) {
    std::string name = codec_word(metadata.dtype);
    if (metadata.dtype != MetadataDtype::kFp32) {
      name += metadata.rounding == MetadataRounding::kBeforeCoding ? " rounded before coding"
                                                                   : " rounded after coding";
    }
    if (metadata.whole_head_only) name += " for whole heads";
    names.push_back(std::move(name));
  }
  return names;
}

Json describe(const Backend& backend) {
  const auto either = [](bool yes) { return yes ? "yes" : "no"; };
  return {{"name", backend.name},
          {"summary", backend.summary},
          {"source", backend.source},
          {"served", is_served(backend)},
          {"not_served_because", codec_gap(backend, default_codec(backend))},
          {"rotation", backend.per_head ? "one a KV head" : "one a layer"},
          {"file_holds", backend.transposed_file ? "R^T" : "R"},
          {"keys_not_orthogonal", either(backend.key_partner)},
          {"values_not_orthogonal", either(backend.value_partner)},
          {"mean_of_keys", either(backend.key_mean)},
          {"mean_of_values", either(backend.value_mean)},
          {"two_centers_of_keys", either(backend.key_centers)},
          {"shaped_rounding", either(backend.shaped_rounding)},
          {"scale_correction", either(backend.scale_correction)},
          {"quant_group_sizes", group_names(backend)},
          {"metadata", metadata_names(backend)},
          {"zero", zero_name(backend)},
          {"code_rounding", rounding_rule(backend)},
          {"packing", backend.packing == PackOrder::kQuartered ? "quartered" : "consecutive"},
          {"clip", clip_name(backend.clip)},
          {"clip_span", span_name(backend)},
          {"windows", backend.windows == WindowBasis::kTransformed ? "transformed" : "original"},
          {"window_multiple", backend.window_multiple},
          {"head_dim_multiple", backend.head_dim_multiple},
          {"largest_head_dim", backend.largest_head_dim},
          {"power_of_two_head", backend.power_of_two_head},
          {"other_layers", backend.other_layers},
          {"architectures", backend.architectures}};
}

std::string head_dims(const Json& j) {
  return fmt::format("{}multiples of {} up to {}",
                     j["power_of_two_head"].get<bool>() ? "powers of two, " : "",
                     j["head_dim_multiple"].get<int>(), j["largest_head_dim"].get<int>());
}

}  // namespace

Json backends_json() {
  Json list = Json::array();
  for (const Backend& backend : backends()) list.push_back(describe(backend));
  return list;
}

std::string backends_text() {
  std::string text;
  for (const Json& j : backends_json()) {
    const auto word = [&j](const char* name) { return j[name].get<std::string>(); };
    if (!text.empty()) text += '\n';
    add_line(text, "", word("name") + ": " + word("summary"), 0);
    add_line(text, "  --for",
             j["served"].get<bool>() ? "served"
                                     : "not served yet, because " + word("not_served_because"));
    add_line(text, "  rotation",
             fmt::format("{}, stored as {}; others than orthogonal: keys {}, values {}",
                         word("rotation"), word("file_holds"), word("keys_not_orthogonal"),
                         word("values_not_orthogonal")));
    add_line(text, "  mean",
             fmt::format("of keys {}, of values {}; two centers of keys {}", word("mean_of_keys"),
                         word("mean_of_values"), word("two_centers_of_keys")));
    add_line(text, "  writer",
             fmt::format("{}, shaped {}, scale correction {}", word("code_rounding"),
                         word("shaped_rounding"), word("scale_correction")));
    add_line(text, "  groups", joined(j["quant_group_sizes"]));
    add_line(text, "  metadata", joined(j["metadata"]) + "; scale and " + word("zero"));
    add_line(text, "  packing", word("packing"));
    add_line(text, "  clipping", word("clip") + ", over " + word("clip_span"));
    add_line(text, "  windows",
             fmt::format("in the {} basis, multiples of {} tokens", word("windows"),
                         j["window_multiple"].get<int>()));
    add_line(text, "  head_dim", head_dims(j));
    add_line(text, "  models",
             fmt::format("{}, {}", j["architectures"].empty() ? "any" : joined(j["architectures"]),
                         j["other_layers"].get<bool>()
                             ? "beside full attention windows in BF16 and linear attention"
                             : "full attention in every layer"));
    add_line(text, "  source", word("source"));
  }
  return text;
}

namespace {

const char* clip_searched(ClipScope scope) {
  switch (scope) {
    case ClipScope::kHead:
      return "clipping";
    case ClipScope::kLayer:
      return "clipping of each layer";
    case ClipScope::kModel:
      return "one clipping pair";
    case ClipScope::kModelBoth:
      break;
  }
  return "one clipping ratio";
}

std::string groups_in_words(const BackendChoice& choice) {
  const std::vector<int>& sizes = choice.quant_group_sizes;
  if (sizes.size() > 1) {
    return fmt::format("groups of {}, whichever first divides head_dim", fmt::join(sizes, ", "));
  }
  const int size = choice.quantizer.quant_group_size;
  return size == 0 ? "groups of head_dim" : fmt::format("groups of {}", size);
}

}  // namespace

std::vector<std::string> describe_choice(const BackendChoice& choice) {
  const FitOptions& fit = choice.fit;
  const SearchOptions& search = choice.search;
  const auto part = [](bool searched, const char* name, const std::string& fixed) {
    return searched ? fmt::format("{} searched", name) : fixed;
  };
  const CacheFormat& q = choice.quantizer;
  return {
      part(search.kind, search.orthogonal ? "orthogonal transform" : "transform",
           method_name(fit.kind)),
      part(search.granularity, "granularity", granularity_name(fit.granularity)),
      part(search.center, "centering", fit.center ? "centered" : "not centered"),
      part(search.row_weights, "row weights",
           fit.row_weights == RowWeights::kAttention ? "rows by attention" : "rows alike"),
      part(search.key_centers, "key centers",
           fit.key_centers ? "two key centers" : "one key center"),
      part(search.rounding, "rounding", fmt::format("{} rounding", rounding_name(fit.rounding))),
      part(search.scale_correction, "scale correction",
           fmt::format("scale correction {}", scale_correction_name(fit.scale_correction))),
      part(search.clip, clip_searched(search.clip_scope),
           fmt::format("clipping {},{} everywhere", clip_text(fit.clip_k), clip_text(fit.clip_v))),
      fmt::format("{} metadata", codec_word(q.metadata_dtype)),
      groups_in_words(choice),
  };
}

namespace {

const char* verdict_word(BackendVerdict verdict) {
  switch (verdict) {
    case BackendVerdict::kAsIs:
      return "as is";
    case BackendVerdict::kPortable:
      return "portable";
    case BackendVerdict::kCannot:
      break;
  }
  return "cannot";
}

// Of portable ones, as in oscar-eval --compare.
const char* variant_word(BundleVariant variant) {
  return variant == BundleVariant::kPortablePerHead ? "portable-perhead" : "portable";
}

std::string times_words(double factor) {
  return fmt::format("{:.{}f} times", factor, factor < 9.95 ? 1 : 0);
}

std::string error_words(const BackendRun& run) {
  if (run.kl_factor) {
    return fmt::format(": KL about {}{}{}", times_words(*run.kl_factor),
                       run.on_calibration_text ? " on calibration text" : "",
                       is_not_to_serve(run) ? ", do not serve" : "");
  }
  if (run.relative_error) {
    return fmt::format(": predicted error {}{}", times_words(*run.relative_error),
                       *run.relative_error >= kTooManyTimes ? ", measure first" : "");
  }
  switch (run.unknown.value_or(ErrorUnknown::kNotMeasured)) {
    case ErrorUnknown::kOwnLevels:
      return ", coded in its own way: error unknown";
    case ErrorUnknown::kNoClipLosses:
      return ": error unknown: no clip losses";
    case ErrorUnknown::kNotMeasured:
      break;
  }
  return ": error unknown: nothing was searched";
}

std::string plan_line(const BackendPlan& plan) {
  switch (plan.verdict()) {
    case BackendVerdict::kAsIs:
      return "runs as is";
    case BackendVerdict::kPortable:
      return fmt::format("runs {}{}", variant_word(plan.run->variant), error_words(*plan.run));
    case BackendVerdict::kCannot:
      break;
  }
  return "cannot: " + plan.obstacles.front().text;
}

Json describe(const BackendPlan& plan) {
  std::string reason;
  for (const Obstacle& obstacle : plan.obstacles) {
    reason += (reason.empty() ? "" : "; ") + obstacle.text;
  }
  Json json = {{"name", plan.backend->name},
               {"verdict", verdict_word(plan.verdict())},
               {"reason", reason},
               {"variant", nullptr},
               {"clip", nullptr},
               {"relative_error", nullptr},
               {"kl_factor", nullptr},
               {"do_not_serve", false},
               {"line", plan_line(plan)}};
  if (plan.verdict() != BackendVerdict::kPortable) return json;
  const BackendRun& run = *plan.run;
  json["variant"] = variant_word(run.variant);
  if (run.clips.pair) json["clip"] = {run.clips.pair->key, run.clips.pair->value};
  if (run.relative_error) json["relative_error"] = *run.relative_error;
  if (run.kl_factor) {
    json["kl_factor"] = *run.kl_factor;
    json["do_not_serve"] = is_not_to_serve(run);
  }
  return json;
}

}  // namespace

Json plans_json(const std::vector<BackendPlan>& plans) {
  Json list = Json::array();
  for (const BackendPlan& plan : plans) list.push_back(describe(plan));
  return list;
}

std::string plans_summary(const std::vector<BackendPlan>& plans) {
  std::string text;
  for (const auto& [verdict, label] : {std::pair{BackendVerdict::kAsIs, "runs as is"},
                                       std::pair{BackendVerdict::kPortable, "portable"},
                                       std::pair{BackendVerdict::kCannot, "cannot run"}}) {
    std::string names;
    for (const BackendPlan& plan : plans) {
      if (plan.verdict() == verdict)
        names += (names.empty() ? "" : ", ") + std::string(plan.backend->name);
    }
    if (!names.empty()) add_line(text, label, names);
  }
  return text;
}

std::string plans_text(const std::vector<BackendPlan>& plans) {
  std::string text = "backends\n", fitted;
  bool predicted = false, measured = false, without_losses = false;
  size_t widest = 0;
  for (const BackendPlan& plan : plans) widest = std::max(widest, std::strlen(plan.backend->name));
  for (const BackendPlan& plan : plans) {
    add_line(text, plan.backend->name, plan_line(plan), widest + 2);
    if (plan.verdict() != BackendVerdict::kPortable) continue;
    measured = measured || plan.run->kl_factor;
    predicted = predicted || (!plan.run->kl_factor && plan.run->relative_error);
    without_losses = without_losses || plan.run->unknown == ErrorUnknown::kNoClipLosses;
    if (is_served(*plan.backend))
      fitted += (fitted.empty() ? "" : ", ") + std::string(plan.backend->name);
  }
  text +=
      "oscar_int2: this toolkit's package, in transformers and as a plugin of vLLM;\n"
      "vllm-pr46774: that pull request of vLLM, no release\n";
  if (measured) {
    text += "KL: measured by oscar-eval, over that of this bundle; in this toolkit's codec\n";
  }
  if (predicted) {
    text += fmt::format(
        "predicted error: of the attention output, over this bundle's, from calibration.\n"
        "It gives the order alone: measured KL was {} such a figure.\n"
        "oscar-eval MODEL --bundle FILE --corpus HELDOUT --write-back measures it\n",
        kPredictionWorth);
  }
  if (without_losses) {
    text += "no clip losses: the file keeps none, so the clipping pair is the published one\n";
  }
  if (!fitted.empty()) {
    text += "oscar-calibrate --for NAME fits what runs as is on these:\n";
    add_line(text, "", fitted, 0);
  }
  return text;
}

}  // namespace oscar
