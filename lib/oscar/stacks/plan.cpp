// A bundle held against rows of the table.
#include "oscar/stacks/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace oscar {
namespace {

using Found = std::optional<Obstacle>;

template <typename T>
bool has(const std::vector<T>& list, const T& wanted) {
  return std::find(list.begin(), list.end(), wanted) != list.end();
}

bool takes_head_dim(const Stack& stack, int dim) {
  return dim % stack.head_dim_multiple == 0 && dim <= stack.largest_head_dim &&
         (!stack.power_of_two_head || (dim & (dim - 1)) == 0);
}

// The bundle's settings with 0 for groups of a whole head.
QuantizerSettings normalised(const Bundle& bundle) {
  QuantizerSettings quantizer = bundle.quantizer;
  const BundleModel& model = bundle.model;
  if (quantizer.quant_group_size == model.head_dim_k &&
      quantizer.quant_group_size == model.head_dim_v) {
    quantizer.quant_group_size = 0;
  }
  return quantizer;
}

// Why a stack can run nothing of the bundle.
Found obstacle_to_all(const Stack& stack, const Bundle& bundle) {
  using enum ObstacleKind;
  const BundleModel& model = bundle.model;
  const QuantizerSettings& quantizer = bundle.quantizer;
  if (!stack.architectures.empty() && !has(stack.architectures, model.architecture)) {
    return Obstacle{kArchitecture, fmt::format("reads transforms for {} only",
                                               fmt::join(stack.architectures, ", "))};
  }
  for (const int dim : {model.head_dim_k, model.head_dim_v}) {
    if (!takes_head_dim(stack, dim)) {
      return Obstacle{kHeadDim, fmt::format("does not take head_dim {}", dim)};
    }
  }
  for (const LayerTransforms& layer : bundle.layers) {
    if (layer.geometry.attention != AttentionKind::kFull && !stack.sliding_layers) {
      return Obstacle{kSlidingLayers, "takes no layers with a sliding window"};
    }
  }
  // With levels of its own a stack has groups of its own, too.
  if (!stack.own_levels && !has(stack.quant_group_sizes, quantizer.quant_group_size) &&
      !has(stack.quant_group_sizes, normalised(bundle).quant_group_size)) {
    return Obstacle{kQuantGroupSize,
                    fmt::format("takes no quantization groups of {}", quantizer.quant_group_size)};
  }
  for (const int tokens : {quantizer.sink_tokens, quantizer.recent_tokens}) {
    if (tokens % stack.window_multiple != 0) {
      return Obstacle{kWindowMultiple, fmt::format("takes windows of multiples of {} tokens",
                                                   stack.window_multiple)};
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

// What one side of a layer needs that the stack does not have.
Found obstacle_to_side(const Stack& stack, const LayerTransforms& layer, Side which) {
  using enum ObstacleKind;
  const SideTransform& side = side_of(layer, which);
  const bool key = which == Side::kKey;
  const char* rows = key ? "keys" : "values";
  if (has(side.kind, TransformKind::kBalanced) &&
      !(key ? stack.key_partner : stack.value_partner)) {
    return Obstacle{kPartner, fmt::format("{} need {}", rows, key ? "q_rotation" : "o_rotation")};
  }
  if (is_centred(side) && !(key ? stack.key_mean : stack.value_mean)) {
    return Obstacle{kMean, fmt::format("{} are centred", rows)};
  }
  if (has_centres(side) && !stack.key_centres)
    return Obstacle{kMean, fmt::format("{} have two centres", rows)};
  if (!stack.per_head && heads_differ(side)) {
    return Obstacle{kHeadsDiffer, fmt::format("heads of {} differ", rows)};
  }
  for (size_t head = 0; head < side.recipe.size(); ++head) {
    const RowRecipe recipe = side.recipe[head];
    if (!stack.shaped_rounding && recipe.rounding == Rounding::kShaped) {
      return Obstacle{kShapedRounding, "rounding is shaped"};
    }
    if (!stack.scale_correction && recipe.scale_correction != ScaleCorrection::kNone) {
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

// Whether the layers have no more clipping ratios than the stack.
bool clips_fit(const Stack& stack, const Layers& layers) {
  if (stack.clip == ClipScope::kHead) return true;
  for (const LayerTransforms* layer : layers) {
    const LayerTransforms* first = stack.clip == ClipScope::kLayer ? layer : layers.front();
    const float key = first->key.recipe.clip_ratio[0], value = first->value.recipe.clip_ratio[0];
    const auto all = [](const SideTransform& side, float ratio) {
      return std::all_of(side.recipe.clip_ratio.begin(), side.recipe.clip_ratio.end(),
                         [ratio](float other) { return other == ratio; });
    };
    if (!all(layer->key, key) || !all(layer->value, value)) return false;
    if (stack.clip == ClipScope::kModelBoth && key != value) return false;
  }
  return true;
}

// Why a stack cannot run the bundle's own transforms.
Found obstacle_to_own(const Stack& stack, const Bundle& bundle) {
  const Layers layers = quantized(bundle, BundleVariant::kOwn);
  for (const LayerTransforms* layer : layers) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      Found obstacle = obstacle_to_side(stack, *layer, side);
      if (!obstacle) continue;
      obstacle->text += fmt::format(" (layer {})", layer->geometry.layer_id);
      return obstacle;
    }
  }
  if (!clips_fit(stack, layers)) {
    return Obstacle{ObstacleKind::kClipRatios, "it has fewer clipping ratios"};
  }
  std::string gap = codec_gap(stack, normalised(bundle));
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

std::optional<RowFormat> format_for(const Stack& stack, const Bundle& bundle) {
  if (stack.own_levels) return std::nullopt;
  QuantizerSettings quantizer = normalised(bundle);
  const auto takes = [&](const StackMetadata& metadata) {
    return !metadata.whole_head_only || quantizer.quant_group_size == 0;
  };
  const auto& all = stack.metadata;
  const bool has_dtype = std::any_of(all.begin(), all.end(), [&](const StackMetadata& metadata) {
    return metadata.dtype == quantizer.metadata_dtype && takes(metadata);
  });
  if (!has_dtype) quantizer.metadata_dtype = std::find_if(all.begin(), all.end(), takes)->dtype;
  take_rules_of(stack, quantizer);
  quantizer.quant_group_size = bundle.quantizer.quant_group_size;
  return quantizer.row_format();
}

StackRun run_of(const Stack& stack, const Bundle& bundle, BundleVariant variant) {
  const Layers layers = quantized(bundle, variant);
  StackRun run{.variant = variant,
               .clips = {.scope = stack.clip, .pair = {}},
               .format = format_for(stack, bundle),
               .packing = stack.packing,
               .relative_error = {},
               .unknown = {},
               .kl_factor = {}};
  std::optional<double> factor = 1.0;
  if (stack.clip == ClipScope::kModel || stack.clip == ClipScope::kModelBoth) {
    const PooledClips pooled = pool_clips(layers, stack.clip == ClipScope::kModelBoth);
    run.clips.pair = pooled.pair;
    factor = pooled.loss_factor;
  }
  const std::optional<double> error =
      variant == BundleVariant::kOwn ? 1.0 : error_over_own(bundle, layers);
  if (stack.own_levels) {
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
StackRun best_portable(const Stack& stack, const Bundle& bundle) {
  StackRun shared = run_of(stack, bundle, BundleVariant::kPortableShared);
  if (!stack.per_head) return shared;
  StackRun per_head = run_of(stack, bundle, BundleVariant::kPortablePerHead);
  const bool known = shared.relative_error && per_head.relative_error;
  return known && *shared.relative_error <= *per_head.relative_error ? shared : per_head;
}

// Of one method of a report; absent where it was not compared or is not finite.
std::optional<double> kl_of(const Json& methods, const char* name) {
  if (!methods.is_object() || !methods.contains(name)) return std::nullopt;
  const Json& method = methods[name];
  if (!method.is_object() || !method.contains("kl") || !method["kl"].is_object()) {
    return std::nullopt;
  }
  const Json& kl = method["kl"];
  if (!kl.contains("mean") || !kl["mean"].is_number()) return std::nullopt;
  const double mean = kl["mean"].get<double>();
  return std::isfinite(mean) ? std::optional(mean) : std::nullopt;
}

std::optional<double> factor_of(const MeasuredKl& measured, BundleVariant variant) {
  const auto& kl = variant == BundleVariant::kPortableShared ? measured.shared : measured.per_head;
  if (!kl || !(*kl >= 0) || !measured.own || !(*measured.own > 0)) return std::nullopt;
  return *kl / *measured.own;
}

}  // namespace

MeasuredKl measured_kl(const Json& report) {
  if (!report.is_object() || !report.contains("methods")) return {};
  const Json& methods = report["methods"];
  return {.own = kl_of(methods, "bundle"),
          .shared = kl_of(methods, "portable"),
          .per_head = kl_of(methods, "portable-perhead")};
}

StackPlan plan_for(const Stack& stack, const Bundle& bundle) {
  return plan_for(stack, bundle,
                  bundle.evaluation ? measured_kl(*bundle.evaluation) : MeasuredKl{});
}

StackPlan plan_for(const Stack& stack, const Bundle& bundle, const MeasuredKl& measured) {
  StackPlan plan{.stack = &stack, .obstacles = {}, .run = {}};
  if (Found obstacle = obstacle_to_all(stack, bundle)) {
    plan.obstacles = {std::move(*obstacle)};
    return plan;
  }
  if (Found obstacle = obstacle_to_own(stack, bundle)) {
    plan.obstacles = {std::move(*obstacle)};
  } else {
    plan.run = run_of(stack, bundle, BundleVariant::kOwn);
    return plan;
  }
  if (bundle.portable.empty()) {
    Obstacle& missing = plan.obstacles.emplace_back();
    missing.kind = ObstacleKind::kNoPortable;
    missing.text = "the file has no portable variant";
  } else {
    plan.run = best_portable(stack, bundle);
    if (!stack.own_levels) plan.run->kl_factor = factor_of(measured, plan.run->variant);
  }
  return plan;
}

std::vector<StackPlan> plan_for_all(const Bundle& bundle, const MeasuredKl& measured) {
  std::vector<StackPlan> plans;
  for (const Stack& stack : stacks()) plans.push_back(plan_for(stack, bundle, measured));
  return plans;
}

std::vector<StackPlan> plan_for_all(const Bundle& bundle) {
  return plan_for_all(bundle, bundle.evaluation ? measured_kl(*bundle.evaluation) : MeasuredKl{});
}

}  // namespace oscar
