// CBOR, which keeps every number as it is; choices as they lie in memory.
#include "oscar/search/decision_bytes.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "oscar/base/error.h"

namespace oscar {
namespace {

static_assert(std::is_trivially_copyable_v<HeadChoice>);

Json choices_json(const std::vector<HeadChoice>& heads) {
  std::vector<uint8_t> bytes(heads.size() * sizeof(HeadChoice));
  if (!heads.empty()) std::memcpy(bytes.data(), heads.data(), bytes.size());
  return Json::binary(std::move(bytes));
}

std::vector<HeadChoice> choices_from(const Json& json, size_t heads) {
  const auto& bytes = json.get_binary();
  if (bytes.size() != heads * sizeof(HeadChoice)) throw std::length_error("choices");
  std::vector<HeadChoice> choices(heads);
  std::memcpy(choices.data(), bytes.data(), bytes.size());
  return choices;
}

Json losses_json(const std::optional<ClipLosses>& losses) {
  if (!losses) return nullptr;
  return {losses->ratio, losses->nmse.data};
}

std::optional<ClipLosses> losses_from(const Json& json, int heads) {
  if (json.is_null()) return std::nullopt;
  ClipLosses losses{.ratio = json.at(0).get<std::vector<float>>(), .nmse = {}};
  losses.nmse.count = static_cast<int>(losses.ratio.size());
  losses.nmse.cols = heads;
  losses.nmse.data = json.at(1).get<std::vector<double>>();
  return losses;
}

Json layer_json(const LayerTransforms& layer) {
  return {losses_json(layer.key.clip_losses), losses_json(layer.value.clip_losses),
          layer.predicted_output_nmse, layer.warnings, layer.search};
}

LayerTransforms layer_from(const Json& json, const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  layer.key.clip_losses = losses_from(json.at(0), geometry.num_kv_heads);
  layer.value.clip_losses = losses_from(json.at(1), geometry.num_kv_heads);
  layer.predicted_output_nmse = json.at(2).get<std::vector<double>>();
  layer.warnings = json.at(3).get<std::vector<std::string>>();
  layer.search = json.at(4);
  return layer;
}

}  // namespace

std::vector<uint8_t> decision_bytes(const LayerDecision& decision) {
  Json json = {layer_json(decision.main), layer_json(decision.portable.shared),
               layer_json(decision.portable.per_head), Json::array()};
  for (const VariantChoice& choice : decision.choices) {
    json[3].push_back({choices_json(choice.key), choices_json(choice.value)});
  }
  return Json::to_cbor(json);
}

LayerDecision decision_from_bytes(const std::vector<uint8_t>& bytes,
                                  const LayerGeometry& geometry) {
  try {
    const Json json = Json::from_cbor(bytes);
    LayerDecision decision{layer_from(json.at(0), geometry),
                           {layer_from(json.at(1), geometry), layer_from(json.at(2), geometry)}};
    const auto heads = static_cast<size_t>(geometry.num_kv_heads);
    for (const Json& choice : json.at(3)) {
      decision.choices.push_back(
          {choices_from(choice.at(0), heads), choices_from(choice.at(1), heads)});
    }
    return decision;
  } catch (const std::exception& error) {
    throw Error({.what = "what another process has decided cannot be read",
                 .where = "layer " + std::to_string(geometry.layer_id),
                 .found = error.what()});
  }
}

}  // namespace oscar
