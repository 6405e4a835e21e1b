// What the rows of a sequence weigh: the attention that sampled queries pay to them as INT2 rows.
#pragma once

#include <vector>

#include "oscar/attention/int2_attention.h"
#include "oscar/model/torch.h"

namespace oscar {

// One query of each kQueryStride is looked at, at another place of every stride, so that texts with
// a period do not always show the same one.
inline constexpr int64_t kQueryStride = 16;
// Share of a query's weight that is spread evenly over the INT2 rows it reads.
inline constexpr double kEvenShare = 0.1;
// A sink receives this many times the mean weight of its sequence's INT2 rows.
inline constexpr double kSinkFactor = 10;

// Scores that are looked at together, beside a few tensors as large: few enough for a processor's
// cache, or enough to keep a GPU busy.
int64_t attended_scores(torch::Device device);

// What rows of one sequence weigh, float32 on the device of its queries.
struct ReceivedAttention {
  std::vector<int64_t> queries;  // positions of those that were looked at
  torch::Tensor key, value;      // [Hkv, tokens] weights of key and value rows
  torch::Tensor query;           // [Hq, queries] weights of query rows
  torch::Tensor sink;            // [Hkv, tokens] 1 where a key is one, else 0
  torch::Tensor attention;       // [Hkv, tokens] what the queries paid to each INT2 row
};

// q [Hq, tokens, d], k [Hkv, tokens, d], both after RoPE. `view` says which rows a query reads as
// INT2. All weights are 0 when no query reads any.
ReceivedAttention received_attention(const torch::Tensor& q, const torch::Tensor& k,
                                     const CacheView& view, double sm_scale);

}  // namespace oscar
