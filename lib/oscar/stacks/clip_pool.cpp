// The record of the search, summed over layers. Any program may have written it.
#include "oscar/stacks/clip_pool.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace oscar {
namespace {

// A ratio as the record writes it, in hundredths; 0 = off.
using Hundredths = int;

Hundredths hundredths(double ratio) { return static_cast<int>(std::lround(100 * ratio)); }

// Losses of one side by ratio, and with each layer's own ratio.
struct SideLosses {
  std::map<Hundredths, double> by_ratio;
  double own = 0;
};

const char* side_key(Side side) { return side == Side::kKey ? "key" : "value"; }

// Throws nlohmann's exceptions for a record of another shape.
std::optional<SideLosses> layer_losses(const LayerTransforms& layer, Side side) {
  for (const Json& stage : layer.search.at(side_key(side)).at("stages")) {
    if (stage.at("stage") != "clip") continue;
    SideLosses losses;
    const Json &variants = stage.at("variants"), &nmse = stage.at("nmse");
    const std::vector<float>& chosen = side_of(layer, side).recipe.clip_ratio;
    std::vector<bool> found(chosen.size());
    for (size_t i = 0; i < variants.size(); ++i) {
      const auto name = variants.at(i).get<std::string>();
      const double before = side == Side::kKey ? kPublishedClipK : kPublishedClipV;
      const double ratio = name == "before" ? before : name == "off" ? 0.0 : std::stod(name);
      double sum = 0;
      for (size_t head = 0; head < chosen.size(); ++head) {
        const double loss = nmse.at(i).at(head).get<double>();
        sum += loss;
        if (found[head] || hundredths(chosen[head]) != hundredths(ratio)) continue;
        losses.own += loss;
        found[head] = true;
      }
      losses.by_ratio[hundredths(ratio)] = sum;
    }
    if (std::find(found.begin(), found.end(), false) != found.end()) return std::nullopt;
    return losses;
  }
  return std::nullopt;
}

// Of the ratios that every layer was tried with.
std::optional<SideLosses> pooled_losses(const std::vector<const LayerTransforms*>& layers,
                                        Side side) {
  std::optional<SideLosses> total;
  try {
    for (const LayerTransforms* layer : layers) {
      const std::optional<SideLosses> losses = layer_losses(*layer, side);
      if (!losses) return std::nullopt;
      if (!total) {
        total = losses;
        continue;
      }
      total->own += losses->own;
      std::map<Hundredths, double> common;
      for (const auto& [ratio, loss] : total->by_ratio) {
        const auto other = losses->by_ratio.find(ratio);
        if (other != losses->by_ratio.end()) common[ratio] = loss + other->second;
      }
      total->by_ratio = std::move(common);
    }
  } catch (const std::exception&) {
    return std::nullopt;  // not this program's record
  }
  return total;
}

// The ratio of least loss; the published one wins ties.
Hundredths best_ratio(const std::map<Hundredths, double>& losses, Hundredths published) {
  const auto start = losses.find(published);
  auto best = start != losses.end() ? start : losses.begin();
  for (auto place = losses.begin(); place != losses.end(); ++place) {
    if (place->second < best->second) best = place;
  }
  return best->first;
}

// The pair that all layers have; none when they differ.
std::optional<ClipPair> common_pair(const std::vector<const LayerTransforms*>& layers) {
  if (layers.empty()) return std::nullopt;
  const float key = layers[0]->key.recipe.clip_ratio.at(0),
              value = layers[0]->value.recipe.clip_ratio.at(0);
  for (const LayerTransforms* layer : layers) {
    for (const float ratio : layer->key.recipe.clip_ratio) {
      if (ratio != key) return std::nullopt;
    }
    for (const float ratio : layer->value.recipe.clip_ratio) {
      if (ratio != value) return std::nullopt;
    }
  }
  const auto widened = [](float ratio) { return std::round(1e6 * double{ratio}) / 1e6; };
  return ClipPair{widened(key), widened(value)};
}

}  // namespace

PooledClip pool_clips(const std::vector<const LayerTransforms*>& layers, bool equal) {
  const auto common = common_pair(layers);
  if (common && (!equal || common->key == common->value)) return {.pair = *common};
  PooledClip unknown{.pair = {}, .loss_factor = NAN};
  if (equal) unknown.pair.value = unknown.pair.key;
  const auto keys = pooled_losses(layers, Side::kKey);
  const auto values = pooled_losses(layers, Side::kValue);
  if (!keys || !values || keys->by_ratio.empty() || values->by_ratio.empty()) return unknown;
  Hundredths key = best_ratio(keys->by_ratio, hundredths(kPublishedClipK));
  Hundredths value = best_ratio(values->by_ratio, hundredths(kPublishedClipV));
  if (equal) {
    std::map<Hundredths, double> both;
    for (const auto& [ratio, loss] : keys->by_ratio) {
      const auto other = values->by_ratio.find(ratio);
      if (other != values->by_ratio.end()) both[ratio] = loss + other->second;
    }
    if (both.empty()) return unknown;
    key = value = best_ratio(both, hundredths(kPublishedClipK));
  }
  const double own = keys->own + values->own;
  if (!(own > 0)) return unknown;
  return {.pair = {key / 100.0, value / 100.0},
          .loss_factor = (keys->by_ratio.at(key) + values->by_ratio.at(value)) / own};
}

Json pool_own_clips(Bundle& bundle, ClipScope scope) {
  if (scope == ClipScope::kHead) return nullptr;
  std::vector<std::vector<LayerTransforms*>> shares;  // layers that share their ratios
  for (LayerTransforms& layer : bundle.layers) {
    if (!layer.geometry.quantized) continue;
    if (shares.empty() || scope == ClipScope::kLayer) shares.emplace_back();
    shares.back().push_back(&layer);
  }
  Json record = Json::array();
  for (const auto& layers : shares) {
    const PooledClip pooled =
        pool_clips({layers.begin(), layers.end()}, scope == ClipScope::kModelBoth);
    for (LayerTransforms* layer : layers) {
      std::fill(layer->key.recipe.clip_ratio.begin(), layer->key.recipe.clip_ratio.end(),
                static_cast<float>(pooled.pair.key));
      std::fill(layer->value.recipe.clip_ratio.begin(), layer->value.recipe.clip_ratio.end(),
                static_cast<float>(pooled.pair.value));
      for (double& nmse : layer->predicted_output_nmse) nmse *= pooled.loss_factor;
    }
    record.push_back({{"first_layer", layers.front()->geometry.layer_id},
                      {"layers", layers.size()},
                      {"clip", {pooled.pair.key, pooled.pair.value}},
                      {"loss_factor", pooled.loss_factor}});
  }
  return record;
}

}  // namespace oscar
