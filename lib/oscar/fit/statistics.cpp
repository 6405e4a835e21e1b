// Construction and addition of per-layer sums.
#include "oscar/fit/statistics.h"

#include "oscar/base/error.h"

namespace oscar {
namespace {

template <typename Stack>
void add_entries(Stack& total, const Stack& other) {
  for (size_t i = 0; i < total.data.size(); ++i) total.data[i] += other.data[i];
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

}  // namespace oscar
