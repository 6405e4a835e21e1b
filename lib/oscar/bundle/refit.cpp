// The fit of a calibration run, without the run.
#include "oscar/bundle/refit.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/bundle/attribute_reader.h"
#include "oscar/bundle/merge.h"
#include "oscar/checkpoint/rope.h"
#include "oscar/fit/fitted_layers.h"
#include "oscar/fit/portable.h"
#include "oscar/fit/presets.h"

namespace oscar {
namespace {

// The positions to fit for: as asked, else as recorded. A file fitted to positions as collected
// (preset paper) records none, and gets all that the model serves, as a calibration does.
int64_t served_positions(const Bundle& input, int64_t asked, const std::string& name) {
  if (asked > kMostPositions) {
    throw Error({.what = "positions beyond what any model serves",
                 .where = "--position-span",
                 .expected = "at most " + std::to_string(kMostPositions),
                 .found = std::to_string(asked)});
  }
  if (asked >= 0) return asked;
  if (input.position_span > 0) return input.position_span;
  const Json& rope = input.model.rope;
  const auto served = rope.find("max_positions");
  if (served != rope.end() && served->is_number_integer() && served->get<int64_t>() > 0) {
    return served->get<int64_t>();
  }
  throw Error({.what = "the file does not say which positions are served",
               .where = name,
               .hint = "say so with --position-span N (0: fit for the positions as collected)"});
}

QuantizerSettings settled(QuantizerSettings quantizer, const BundleModel& model) {
  if (quantizer.quant_group_size == 0) quantizer.quant_group_size = model.head_dim_k;
  if (model.head_dim_k % quantizer.quant_group_size != 0 ||
      model.head_dim_v % quantizer.quant_group_size != 0) {
    throw Error({.what = "the quantization group does not divide the head",
                 .where = "--quant-group-size",
                 .expected = "a divisor of " + std::to_string(model.head_dim_k),
                 .found = std::to_string(quantizer.quant_group_size)});
  }
  return quantizer;
}

}  // namespace

Rope recorded_rope(const Bundle& input, const std::string& name) {
  // As make_rope wrote it: behind the parameters stands the length that is served, which is none.
  Json parameters = input.model.rope;
  if (parameters.is_object()) parameters.erase("max_positions");
  const int64_t positions = std::max<int64_t>(1, input.position_span);
  return make_rope(parameters, input.model.head_dim_k, static_cast<int>(positions), name);
}

Bundle refit_bundle(Bundle input, const RefitOptions& options, const std::string& name) {
  require_statistics(input, name);
  FitOptions fit = options.fit;
  fit.position_span = served_positions(input, fit.position_span, name);
  const bool energy = fit.objective_v == ValueObjective::kEnergy;
  if (energy && first_fitted(input.statistics, name).v_energy_moment.empty()) {
    throw Error({.what = "the file holds no value energy moment",
                 .where = name,
                 .hint = "calibrate with --objective-v energy, or fit with --objective-v sv"});
  }
  const Rope rope = recorded_rope(input, name);
  Json held_back = held_back_part(input);
  Bundle out = std::move(input);
  out.statistics_only = false;
  out.preset = options.preset;
  out.method = method_name(fit.kind);
  out.composition = composition_name(fit.kind);
  out.objective_v = objective_name(fit.objective_v);
  out.granularity = granularity_name(fit.granularity);
  out.row_weights = row_weights_name(fit.row_weights);
  out.position_span = fit.position_span;
  out.quantizer = settled(options.quantizer, out.model);
  out.evaluation.reset();
  out.search = std::move(held_back);
  out.run_key.clear();  // no run made this
  out.created_utc.clear();
  out.fitted_by.clear();
  out.layers.clear();
  out.portable.clear();
  for (LayerStatistics& layer : out.statistics) {
    stop_if_requested("stopped; nothing was written");
    // The recent window decides whether a sliding layer is ever quantized.
    layer.geometry.quantized = layer.geometry.quantized_beyond(out.quantizer.recent_tokens);
    if (!layer.geometry.fitted()) {
      const LayerTransforms none = without_transforms(layer.geometry);
      out.layers.push_back(none);
      out.portable.push_back({none, none});
      continue;
    }
    out.layers.push_back(fit_layer(layer, fit, rope));
    out.portable.push_back({fit_portable(layer, fit, Granularity::kShared, rope),
                            fit_portable(layer, fit, Granularity::kPerHead, rope)});
  }
  if (!options.keep_statistics) out.statistics.clear();
  return out;
}

}  // namespace oscar
