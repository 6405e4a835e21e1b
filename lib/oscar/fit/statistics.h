// What is collected for one attention layer: sums and counts, never means, so that runs add up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/fit/linalg.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// Sums in which a row counts by the attention that it receives as an INT2 row, and a query by the
// attention that it pays to INT2 rows (math 2.6). Keys are taken before RoPE. A sink is a key that
// receives more than kSinkFactor times the mean of its sequence.
struct AttendedSums {
  MatrixStack<double> q_moment, k_moment;  // [Hkv, d, d]  sum of a q^T q, of w k^T k
  MatrixStack<double> v_moment;            // [Hkv, d, d]  sum of w v^T v
  VectorStack<double> k_sum, v_sum;        // [Hkv, d]  sum of w k, of w v
  VectorStack<double> k_sink_sum;          // [Hkv, d]  the part of k_sum that is of sinks
  std::vector<double> q_weight, k_weight, v_weight, k_sink_weight;  // [Hkv]  sums of the weights

  bool empty() const { return q_moment.empty(); }
  bool operator==(const AttendedSums&) const = default;
};

// Sums over tokens t and the query heads j of each KV head (math 2.1).
// d is head_dim_k for q and k, head_dim_v for v and the attention output. Heads come first.
struct LayerStatistics {
  LayerGeometry geometry;
  MatrixStack<double> q_moment;         // [Hkv, d, d]  sum of q^T q, q after RoPE, unscaled
  MatrixStack<double> k_moment;         // [Hkv, d, d]  sum of k^T k, k after RoPE
  MatrixStack<double> v_moment;         // [Hkv, d, d]  sum of v^T v
  MatrixStack<double> attn_out_moment;  // [Hkv, d, d]  sum of o^T o, o = softmax output before W_O
  VectorStack<double> q_sum, k_sum, v_sum, attn_out_sum;  // [Hkv, d]
  MatrixStack<double> o_proj_metric;  // [Hkv, d, d]  M_O = sum over j of W_O,j W_O,j^T
  // [Hq, d, d] sum of s^T s, s what outputs are multiplied by before W_O, while a run collects;
  // with it M_O gets its gates (math 1.2). Absent without gates and in finished files.
  MatrixStack<double> gate_moment = {};
  // [Hkv, d, d] sum of w_t v_t^T v_t, w_t = k_t C_Q k_t^T scaled to sum N; only with the energy
  // objective, otherwise absent. Belongs to one run and is not mergeable.
  MatrixStack<double> v_energy_moment;
  AttendedSums attended;  // of quantized layers of runs with row weights; empty otherwise
  int64_t count_q = 0;    // rows in the q and attention-output sums: tokens x query heads
  int64_t count_kv = 0;   // rows in the k and v sums: tokens
  bool operator==(const LayerStatistics&) const = default;
};

// Calls `visit` with the entries (std::vector<double>) of each sum over tokens in turn: moments,
// then sums, in the order of checkpoints. Of several statistics, which must agree in whether they
// have attended sums and those of gates, it gets them side by side. Counts, o_proj_metric and
// v_energy_moment are no such sums.
template <typename Visit, typename... Statistics>
void visit_sums(Visit&& visit, Statistics&... statistics) {
  visit(statistics.q_moment.data...);
  visit(statistics.k_moment.data...);
  visit(statistics.v_moment.data...);
  visit(statistics.attn_out_moment.data...);
  visit(statistics.q_sum.data...);
  visit(statistics.k_sum.data...);
  visit(statistics.v_sum.data...);
  visit(statistics.attn_out_sum.data...);
  visit(statistics.attended.q_moment.data...);
  visit(statistics.attended.k_moment.data...);
  visit(statistics.attended.v_moment.data...);
  visit(statistics.attended.k_sum.data...);
  visit(statistics.attended.v_sum.data...);
  visit(statistics.attended.k_sink_sum.data...);
  visit(statistics.attended.q_weight...);
  visit(statistics.attended.k_weight...);
  visit(statistics.attended.v_weight...);
  visit(statistics.attended.k_sink_weight...);
  visit(statistics.gate_moment.data...);
}

// Statistics of the given shape with every sum zero (v_energy_moment, gate_moment and attended
// absent).
LayerStatistics make_statistics(const LayerGeometry& geometry);
MatrixStack<double> make_gate_moment(const LayerGeometry& geometry);
AttendedSums make_attended_sums(const LayerGeometry& geometry);

// Adds `other` to `total`. Drops v_energy_moment, and attended or gate_moment where one of them
// lacks it. Throws Error when the geometries differ.
void add_statistics(LayerStatistics& total, const LayerStatistics& other);

// What has been added to `part`, an earlier state of the same running sums, to make `total`; the
// output projection's metric is that of `total`. Each batch added since has rounded an entry by
// 2^-53 of it at most, so entry (i, j) of a moment M is off by at most B 2^-53 sqrt(M_ii M_jj) of
// `total` for B batches (1e-11 for 100,000 of them), and no diagonal becomes negative. Throws Error
// when the geometries differ or `total` counts no more rows than `part`.
LayerStatistics remaining_statistics(const LayerStatistics& total, const LayerStatistics& part);

}  // namespace oscar
