// Dense attention of some queries over a whole sequence, to score many ways of writing it cheaply.
#pragma once

#include <vector>

#include "oscar/attention/int2_attention.h"
#include "oscar/model/torch.h"

namespace oscar {

// One side written as INT2, float32, for one sequence.
struct Int2Rows {
  // [Hkv, tokens, d] of keys: dequantized, in the cache's basis. Of values: what INT2 changes,
  // x^ - x, in the model's basis.
  torch::Tensor rows;
  torch::Tensor partner;  // of keys: [Hkv, d, d] q_rotation
  torch::Tensor mean;     // of keys: [Hkv, d]; undefined when not centered
};

// What is the same for all of them: the exact scores, attention weights and outputs of the chosen
// queries, and which keys each of them reads as INT2. One row per query head of a KV head and
// query: [Hkv, query heads * queries, ..], query heads outermost. Everything in float32.
class AttentionProbe {
 public:
  // `positions`: ascending indices into the sequence. q [Hq, queries, d_k] at those positions,
  // k [Hkv, tokens, d_k] and v [Hkv, tokens, d_v] up to the last of them or beyond, before any
  // transform. output_metric [Hq, d_v, d_v]: W_O,j W_O,j^T of each query head. gate [Hq, queries,
  // d_v]: what the model multiplies outputs by before W_O; undefined: nothing.
  AttentionProbe(const CacheView& view, const std::vector<int64_t>& positions,
                 const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                 const torch::Tensor& output_metric, double sm_scale,
                 const torch::Tensor& gate = {});

  // Keys [first_int2(), end_int2()) are INT2 for at least one query (none when equal).
  int64_t first_int2() const { return first_int2_; }
  int64_t end_int2() const { return end_int2_; }

  // Attention weights over all keys [Hkv, rows, tokens]: exact, and with INT2 keys where the rule
  // says so. Centering adds one constant per query, which is taken out again.
  const torch::Tensor& exact_weights() const { return weights_; }
  torch::Tensor weights(const Int2Rows& keys) const;

  // `weights` of the INT2 keys alone, zero elsewhere: [Hkv, rows, end_int2 - first_int2].
  torch::Tensor int2_part(const torch::Tensor& weights) const;

  // What weights other than the exact ones do to the output, values exact: [Hkv, rows, d_v].
  torch::Tensor key_error(const torch::Tensor& weights) const;
  // What INT2 values do to it, for weights whose int2_part this is.
  torch::Tensor value_error(const torch::Tensor& int2_part, const Int2Rows& values) const;
  // Both together.
  torch::Tensor pair_error(const torch::Tensor& weights, const Int2Rows& values) const;

  // [Hkv, queries] float64: sum over the KV head's query heads j of |error W_O,j|^2, of |(error s)
  // W_O,j|^2 where there is a gate s (math 9.2).
  torch::Tensor loss(const torch::Tensor& error) const;
  // The same of the exact output itself.
  torch::Tensor energy() const { return loss(output_); }

 private:
  int64_t num_kv_heads_, query_group_, queries_;
  int64_t first_int2_, end_int2_;
  int64_t end_shared_;  // keys [first_int2_, end_shared_) are INT2 for all queries that see them
  double sm_scale_;
  torch::Tensor q_;        // [Hkv, rows, d_k]
  torch::Tensor values_;   // [Hkv, tokens, d_v]
  torch::Tensor metric_;   // [Hq, d_v, d_v]
  torch::Tensor gate_;     // [Hq, queries, d_v] or undefined
  torch::Tensor is_int2_;  // [queries, end_int2 - first_int2] bool
  torch::Tensor scores_;   // [Hkv, rows, tokens] exact, scaled, -inf where hidden
  torch::Tensor weights_;  // softmax of them
  torch::Tensor output_;   // [Hkv, rows, d_v]
};

}  // namespace oscar
