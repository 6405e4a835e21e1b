// A bundle held against the rows of the table.
#include "oscar/stacks/stack_support.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "oscar/base/text_lines.h"
#include "oscar/fit/compose.h"
#include "oscar/fit/presets.h"
#include "oscar/stacks/clip_pool.h"
#include "oscar/stacks/stacks.h"

namespace oscar {
namespace {

constexpr const char* kAsIs = "as is";
constexpr const char* kPortable = "portable";
constexpr const char* kCannot = "cannot";

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

bool takes_head_dim(const Stack& stack, int dim) {
  return dim % stack.head_dim_multiple == 0 && dim <= stack.largest_head_dim &&
         (!stack.power_of_two_head || (dim & (dim - 1)) == 0);
}

bool takes_groups(const Stack& stack, const Bundle& bundle) {
  const auto has = [&](int size) {
    const auto& sizes = stack.quant_group_sizes;
    return std::find(sizes.begin(), sizes.end(), size) != sizes.end();
  };
  return has(bundle.quantizer.quant_group_size) || has(normalised(bundle).quant_group_size);
}

// Why a stack can run nothing of the bundle; "" when it can.
std::string obstacle_to_all(const Stack& stack, const Bundle& bundle) {
  const BundleModel& model = bundle.model;
  const auto& architectures = stack.architectures;
  if (!architectures.empty() && std::find(architectures.begin(), architectures.end(),
                                          model.architecture) == architectures.end()) {
    return fmt::format("reads transforms for {} only", fmt::join(architectures, ", "));
  }
  for (const int dim : {model.head_dim_k, model.head_dim_v}) {
    if (!takes_head_dim(stack, dim)) return fmt::format("does not take head_dim {}", dim);
  }
  for (const LayerTransforms& layer : bundle.layers) {
    if (layer.geometry.attention == AttentionKind::kSliding && !stack.sliding_layers) {
      return "takes no layers with a sliding window";
    }
  }
  // With levels of its own a stack has groups of its own, too.
  if (!stack.own_levels && !takes_groups(stack, bundle)) {
    return fmt::format("takes no quantization groups of {}", bundle.quantizer.quant_group_size);
  }
  for (const int tokens : {bundle.quantizer.sink_tokens, bundle.quantizer.recent_tokens}) {
    if (tokens % stack.window_multiple != 0) {
      return fmt::format("takes windows of multiples of {} tokens", stack.window_multiple);
    }
  }
  return "";
}

bool heads_differ(const SideTransform& side) {
  for (int head = 1; head < side.forward.count; ++head) {
    if (side.forward[head] != side.forward[0]) return true;
  }
  return false;
}

// What one side of a layer needs that the stack does not have; "" for nothing.
std::string obstacle_to_side(const Stack& stack, const LayerTransforms& layer, Side which) {
  const SideTransform& side = side_of(layer, which);
  const bool key = which == Side::kKey;
  const char* rows = key ? "keys" : "values";
  const auto has_kind = [&](TransformKind kind) {
    return std::find(side.kind.begin(), side.kind.end(), kind) != side.kind.end();
  };
  if (has_kind(TransformKind::kBalanced) && !(key ? stack.key_partner : stack.value_partner)) {
    return fmt::format("{} need {}", rows, key ? "q_rotation" : "o_rotation");
  }
  if (is_centred(side) && !(key ? stack.key_mean : stack.value_mean)) {
    return fmt::format("{} are centred", rows);
  }
  if (!stack.per_head && heads_differ(side)) return fmt::format("heads of {} differ", rows);
  for (int head = 0; head < side.forward.count; ++head) {
    if (!stack.shaped_rounding && side.recipe[head].rounding == Rounding::kShaped) {
      return "rounding is shaped";
    }
    if (!stack.scale_correction && side.recipe[head].scale_correction != ScaleCorrection::kNone) {
      return "scales are corrected";
    }
  }
  return "";
}

// Whether the bundle's own clipping ratios are as many as the stack has.
bool clips_fit(const Stack& stack, const Bundle& bundle) {
  if (stack.clip == ClipScope::kHead) return true;
  const LayerTransforms* first = nullptr;
  for (const LayerTransforms& layer : bundle.layers) {
    if (!layer.geometry.quantized) continue;
    if (first == nullptr || stack.clip == ClipScope::kLayer) first = &layer;
    const auto all = [](const SideTransform& side, float ratio) {
      return std::all_of(side.recipe.clip_ratio.begin(), side.recipe.clip_ratio.end(),
                         [ratio](float other) { return other == ratio; });
    };
    const float key = first->key.recipe.clip_ratio[0], value = first->value.recipe.clip_ratio[0];
    if (!all(layer.key, key) || !all(layer.value, value)) return false;
    if (stack.clip == ClipScope::kModelBoth && key != value) return false;
  }
  return true;
}

// Why a stack cannot run the bundle's own transforms; "" when it can.
std::string obstacle_to_own(const Stack& stack, const Bundle& bundle) {
  for (const LayerTransforms& layer : bundle.layers) {
    if (!layer.geometry.quantized) continue;
    for (const Side side : {Side::kKey, Side::kValue}) {
      const std::string reason = obstacle_to_side(stack, layer, side);
      if (!reason.empty()) return fmt::format("{} (layer {})", reason, layer.geometry.layer_id);
    }
  }
  if (!clips_fit(stack, bundle)) return "it has fewer clipping ratios";
  return codec_gap(stack, normalised(bundle));
}

// Sum over layers and heads; NaN where something was not predicted.
double predicted_error(const std::vector<const LayerTransforms*>& layers) {
  double sum = 0;
  for (const LayerTransforms* layer : layers) {
    for (const double nmse : layer->predicted_output_nmse) sum += nmse;
  }
  return sum;
}

// One variant of a bundle's quantized layers.
std::vector<const LayerTransforms*> quantized(const Bundle& bundle, const char* variant) {
  std::vector<const LayerTransforms*> layers;
  for (size_t i = 0; i < bundle.layers.size(); ++i) {
    if (!bundle.layers[i].geometry.quantized) continue;
    layers.push_back(variant == nullptr                  ? &bundle.layers[i]
                     : std::string(variant) == kPortable ? &bundle.portable[i].shared
                                                         : &bundle.portable[i].per_head);
  }
  return layers;
}

// The portable variant as a stack would run it.
struct PortablePlan {
  const char* variant = kPortable;
  std::optional<ClipPair> clip;  // one for the model
  double relative_error = NAN;
};

PortablePlan plan_portable(const Stack& stack, const Bundle& bundle, const char* variant) {
  PortablePlan plan{.variant = variant, .clip = {}};
  const auto layers = quantized(bundle, variant);
  double factor = 1;
  if (stack.clip == ClipScope::kModel || stack.clip == ClipScope::kModelBoth) {
    const PooledClip pooled = pool_clips(layers, stack.clip == ClipScope::kModelBoth);
    plan.clip = pooled.pair;
    factor = pooled.loss_factor;
  }
  if (!stack.own_levels) {
    plan.relative_error =
        factor * predicted_error(layers) / predicted_error(quantized(bundle, nullptr));
  }
  return plan;
}

PortablePlan best_portable(const Stack& stack, const Bundle& bundle) {
  PortablePlan shared = plan_portable(stack, bundle, kPortable);
  if (!stack.per_head) return shared;
  PortablePlan per_head = plan_portable(stack, bundle, "portable-perhead");
  return shared.relative_error <= per_head.relative_error ? shared : per_head;
}

std::string portable_line(const Stack& stack, const PortablePlan& plan) {
  std::string text = fmt::format("runs {}", plan.variant);
  if (!plan.clip) {
    text += ", clips by layer";
  } else if (stack.clip == ClipScope::kModelBoth) {
    text += ", clip " + clip_text(plan.clip->key);
  } else {
    text += fmt::format(", clip {},{}", clip_text(plan.clip->key), clip_text(plan.clip->value));
  }
  if (stack.own_levels) return text + ", coded in its own way: error unknown";
  if (!std::isfinite(plan.relative_error)) return text + ": error unknown";
  return text + fmt::format(": predicted error {:.{}f} times", plan.relative_error,
                            plan.relative_error < 9.95 ? 1 : 0);
}

Json verdict(const Stack& stack, const char* word, const std::string& reason,
             const std::string& line) {
  return {{"name", stack.name}, {"verdict", word}, {"reason", reason},
          {"variant", nullptr}, {"clip", nullptr}, {"relative_error", nullptr},
          {"line", line}};
}

Json support_of(const Stack& stack, const Bundle& bundle) {
  std::string reason = obstacle_to_all(stack, bundle);
  if (!reason.empty()) return verdict(stack, kCannot, reason, "cannot: " + reason);
  reason = obstacle_to_own(stack, bundle);
  if (reason.empty()) return verdict(stack, kAsIs, "", "runs as is");
  if (bundle.portable.empty()) {
    return verdict(stack, kCannot, reason + "; the file has no portable variant",
                   "cannot: " + reason);
  }
  const PortablePlan plan = best_portable(stack, bundle);
  Json result = verdict(stack, kPortable, reason, portable_line(stack, plan));
  result["variant"] = plan.variant;
  if (plan.clip) result["clip"] = {plan.clip->key, plan.clip->value};
  if (std::isfinite(plan.relative_error)) result["relative_error"] = plan.relative_error;
  return result;
}

}  // namespace

Json stack_support_json(const Bundle& bundle) {
  Json list = Json::array();
  for (const Stack& stack : stacks()) list.push_back(support_of(stack, bundle));
  return list;
}

std::string stack_support_text(const Json& support) {
  std::string text = "serving stacks\n", fitted;
  bool compared = false;
  for (const Json& stack : support) {
    const auto name = stack["name"].get<std::string>();
    add_line(text, name, stack["line"].get<std::string>());
    compared = compared || stack["relative_error"].is_number();
    if (stack["verdict"] == kPortable && is_served(find_stack(name))) {
      fitted += (fitted.empty() ? "" : ", ") + name;
    }
  }
  if (compared) {
    text +=
        "times: over the error of the attention output predicted for this bundle's own\n"
        "transforms, with this toolkit's codec; portable as in oscar-eval --compare\n";
  }
  if (!fitted.empty())
    text += "oscar-calibrate --for fits what runs as is on these:\n" + fitted + "\n";
  return text;
}

}  // namespace oscar
