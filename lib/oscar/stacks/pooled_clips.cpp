// Losses of single ratios, summed over heads and layers.
#include "oscar/stacks/pooled_clips.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace oscar {
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

}  // namespace oscar
