// Who searches which layer; sums and decisions on their way.
#include "oscar/calibrate/shared_search.h"

#include <cstring>
#include <string>
#include <utility>

#include "oscar/base/parallel.h"
#include "oscar/calibrate/sent_sums.h"
#include "oscar/search/decision_bytes.h"

namespace oscar {
namespace {

// One of next to no tokens, as receive_sums needs it.
LayerStatistics shape_of(const LayerGeometry& geometry, bool attended) {
  LayerStatistics shape = make_statistics(geometry);
  if (attended) shape.attended = make_attended_sums(geometry);
  shape.count_q = geometry.num_qo_heads / geometry.num_kv_heads;
  shape.count_kv = 1;
  return shape;
}

LayerStatistics receive_statistics(Ranks& ranks, const LayerStatistics& shape, int64_t tokens,
                                   bool energy) {
  LayerStatistics statistics = receive_sums(ranks, 0, shape, tokens);
  if (!energy) return statistics;
  const std::vector<uint8_t> bytes = ranks.receive(0);
  MatrixStack<double> moment = shape.v_moment;
  if (bytes.size() != moment.data.size() * sizeof(double)) {
    throw Error({.what = "energies of another size than the layer's",
                 .where = "layer " + std::to_string(shape.geometry.layer_id)});
  }
  std::memcpy(moment.data.data(), bytes.data(), bytes.size());
  statistics.v_energy_moment = std::move(moment);
  return statistics;
}

}  // namespace

std::vector<int> layer_owners(const Ranks& ranks, const std::vector<LayerGeometry>& layers) {
  std::vector<int> owners;
  size_t searched = 0;
  for (const LayerGeometry& layer : layers) {
    owners.push_back(layer.quantized ? ranks.owner(searched++) : 0);
  }
  return owners;
}

std::vector<bool> own_layers(const Ranks& ranks, const std::vector<LayerGeometry>& layers) {
  std::vector<bool> own;
  for (const int owner : layer_owners(ranks, layers)) own.push_back(owner == ranks.rank());
  return own;
}

void send_statistics(Ranks& ranks, const std::vector<LayerStatistics>& statistics) {
  std::vector<LayerGeometry> layers;
  for (const LayerStatistics& layer : statistics) layers.push_back(layer.geometry);
  const std::vector<int> owners = layer_owners(ranks, layers);
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (owners[i] == 0) continue;
    send_sums(ranks, owners[i], statistics[i]);
    const std::vector<double>& energy = statistics[i].v_energy_moment.data;
    if (energy.empty()) continue;
    const auto* bytes = reinterpret_cast<const uint8_t*>(energy.data());
    ranks.send(owners[i], {bytes, bytes + energy.size() * sizeof(double)});
  }
}

void receive_decisions(Ranks& ranks, const std::vector<LayerGeometry>& layers,
                       std::vector<LayerDecision>& decisions) {
  const std::vector<int> owners = layer_owners(ranks, layers);
  for (size_t i = 0; i < decisions.size(); ++i) {
    if (owners[i] != 0) decisions[i] = decision_from_bytes(ranks.receive(owners[i]), layers[i]);
  }
}

void fit_decisions_of_others(const std::vector<bool>& own,
                             const std::vector<LayerStatistics>& statistics,
                             const FitOptions& fixed, const Rope& rope,
                             std::vector<LayerDecision>& decisions) {
  parallel_for(static_cast<int64_t>(decisions.size()), [&](int64_t index) {
    const auto layer = static_cast<size_t>(index);
    if (own[layer]) return;
    auto warnings = decisions[layer].main.warnings;  // of the fits that were compared
    decisions[layer] = fit_again(std::move(decisions[layer]), statistics[layer], fixed, rope);
    decisions[layer].main.warnings = std::move(warnings);
  });
}

void search_for_first(Ranks& ranks, Transformer& model, const SplitCorpus& split,
                      const RunPlan& plan, int layers_together, const CalibrateOptions& options) {
  const std::vector<LayerGeometry> layers = geometries(options, model.config());
  const std::vector<bool> own = own_layers(ranks, layers);
  const bool attended = attended_view(options).has_value();
  std::vector<LayerStatistics> statistics(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    statistics[i].geometry = layers[i];
    if (!own[i]) continue;
    statistics[i] = receive_statistics(ranks, shape_of(layers[i], attended),
                                       split.fit.record.tokens, wants_energy(options));
    statistics[i].o_proj_metric = model.o_proj_metric(layers[i].layer_id);
  }
  SearchPass search(model, statistics, search_settings(options), split.num_search,
                    split.num_confirm, layers_together, own);
  SilentProgress silent;
  run_layer_major(model, split.held_back, plan, {}, search, silent);
  const std::vector<LayerDecision> decisions = search.take_decisions();
  for (size_t i = 0; i < decisions.size(); ++i) {
    if (own[i]) ranks.send(0, decision_bytes(decisions[i]));
  }
  ranks.wait_until_taken();
}

}  // namespace oscar
