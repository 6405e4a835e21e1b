// Construction and addition of per-layer sums.
#include "oscar/fit/statistics.h"

#include "oscar/base/error.h"

namespace oscar {
namespace {

template <typename Stack>
void add_entries(Stack& total, const Stack& other) {
  for (size_t i = 0; i < total.data.size(); ++i) total.data[i] += other.data[i];
}

template <typename Stack>
void subtract_entries(Stack& total, const Stack& part) {
  for (size_t i = 0; i < total.data.size(); ++i) total.data[i] -= part.data[i];
}

}  // namespace

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

void add_statistics(LayerStatistics& total, const LayerStatistics& other) {
  if (!(total.geometry == other.geometry)) {
    throw Error({.what = "statistics of different attention shapes cannot be added",
                 .where = "layer " + std::to_string(total.geometry.layer_id)});
  }
  add_entries(total.q_moment, other.q_moment);
  add_entries(total.k_moment, other.k_moment);
  add_entries(total.v_moment, other.v_moment);
  add_entries(total.attn_out_moment, other.attn_out_moment);
  add_entries(total.q_sum, other.q_sum);
  add_entries(total.k_sum, other.k_sum);
  add_entries(total.v_sum, other.v_sum);
  add_entries(total.attn_out_sum, other.attn_out_sum);
  total.v_energy_moment = {};
  total.count_q += other.count_q;
  total.count_kv += other.count_kv;
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
  subtract_entries(rest.q_moment, part.q_moment);
  subtract_entries(rest.k_moment, part.k_moment);
  subtract_entries(rest.v_moment, part.v_moment);
  subtract_entries(rest.attn_out_moment, part.attn_out_moment);
  subtract_entries(rest.q_sum, part.q_sum);
  subtract_entries(rest.k_sum, part.k_sum);
  subtract_entries(rest.v_sum, part.v_sum);
  subtract_entries(rest.attn_out_sum, part.attn_out_sum);
  rest.v_energy_moment = {};
  rest.count_q -= part.count_q;
  rest.count_kv -= part.count_kv;
  return rest;
}

}  // namespace oscar
