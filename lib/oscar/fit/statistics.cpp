// Construction and addition of per-layer sums.
#include "oscar/fit/statistics.h"

#include <algorithm>
#include <functional>

#include "oscar/base/add_counts.h"

namespace oscar {

LayerStatistics make_statistics(const LayerGeometry& geometry) {
  const int heads = geometry.num_kv_heads, dk = geometry.head_dim_k, dv = geometry.head_dim_v;
  LayerStatistics s;
  s.geometry = geometry;
  s.q_moment = s.k_moment = MatrixStack<double>(heads, dk, dk);
  s.v_moment = s.attn_out_moment = s.o_proj_metric = MatrixStack<double>(heads, dv, dv);
  s.q_sum = s.k_sum = VectorStack<double>(heads, dk);
  s.v_sum = s.attn_out_sum = VectorStack<double>(heads, dv);
  return s;
}

AttendedSums make_attended_sums(const LayerGeometry& geometry) {
  const int heads = geometry.num_kv_heads, dk = geometry.head_dim_k, dv = geometry.head_dim_v;
  AttendedSums sums;
  sums.q_moment = sums.k_moment = MatrixStack<double>(heads, dk, dk);
  sums.v_moment = MatrixStack<double>(heads, dv, dv);
  sums.k_sum = sums.k_sink_sum = VectorStack<double>(heads, dk);
  sums.v_sum = VectorStack<double>(heads, dv);
  sums.q_weight.assign(static_cast<size_t>(heads), 0.0);
  sums.k_weight = sums.v_weight = sums.k_sink_weight = sums.q_weight;
  return sums;
}

MatrixStack<double> make_gate_moment(const LayerGeometry& geometry) {
  return {geometry.num_qo_heads, geometry.head_dim_v, geometry.head_dim_v};
}

void add_statistics(LayerStatistics& total, const LayerStatistics& other) {
  if (!(total.geometry == other.geometry)) {
    throw Error({.what = "statistics of different attention shapes cannot be added",
                 .where = "layer " + std::to_string(total.geometry.layer_id)});
  }
  const auto add = [](std::vector<double>& sum, const std::vector<double>& more) {
    std::transform(sum.begin(), sum.end(), more.begin(), sum.begin(), std::plus());
  };
  const bool weighted = !total.attended.empty() && !other.attended.empty();
  const bool gated = !total.gate_moment.empty() && !other.gate_moment.empty();
  if (!weighted) total.attended = {};
  if (!gated) total.gate_moment = {};
  if ((!weighted && !other.attended.empty()) || (!gated && !other.gate_moment.empty())) {
    LayerStatistics rest = other;
    if (!weighted) rest.attended = {};
    if (!gated) rest.gate_moment = {};
    visit_sums(add, total, rest);
  } else {
    visit_sums(add, total, other);
  }
  // Of the weights, and with a gate between attention and W_O also of the text (math 1.2).
  const bool both = !total.o_proj_metric.empty() && !other.o_proj_metric.empty();
  if (both && total.o_proj_metric.data != other.o_proj_metric.data) {
    const double rows = static_cast<double>(total.count_kv) + static_cast<double>(other.count_kv);
    const double share = static_cast<double>(other.count_kv) / rows;
    std::transform(total.o_proj_metric.data.begin(), total.o_proj_metric.data.end(),
                   other.o_proj_metric.data.begin(), total.o_proj_metric.data.begin(),
                   [share](double a, double b) { return a + share * (b - a); });
  }
  total.v_energy_moment = {};
  const std::string where = "layer " + std::to_string(total.geometry.layer_id);
  total.count_q = add_counts(total.count_q, other.count_q, where + ", count_q");
  total.count_kv = add_counts(total.count_kv, other.count_kv, where + ", count_kv");
}

LayerStatistics remaining_statistics(const LayerStatistics& total, const LayerStatistics& part) {
  if (!(total.geometry == part.geometry) || total.count_kv <= part.count_kv) {
    throw Error(
        {.what = "sums that are no earlier state of a layer's sums",
         .where = "layer " + std::to_string(total.geometry.layer_id),
         .expected = "the same shape and fewer than " + std::to_string(total.count_kv) + " tokens",
         .found = std::to_string(part.count_kv) + " tokens"});
  }
  LayerStatistics rest = total;
  const auto subtract = [](std::vector<double>& sum, const std::vector<double>& less) {
    std::transform(sum.begin(), sum.end(), less.begin(), sum.begin(), std::minus());
  };
  if (part.attended.empty() != total.attended.empty() ||
      part.gate_moment.empty() != total.gate_moment.empty()) {
    throw Error({.what = "sums of which only some are weighted by attention, or hold gates",
                 .where = "layer " + std::to_string(total.geometry.layer_id)});
  }
  visit_sums(subtract, rest, part);
  rest.v_energy_moment = {};
  rest.count_q -= part.count_q;
  rest.count_kv -= part.count_kv;
  return rest;
}

}  // namespace oscar
