// Gated DeltaNet: the linear attention of hybrid models (arXiv 2412.06464), in chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/model/checkpoint/config.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/torch.h"

namespace oscar {

// So many tokens go through products of matrices together, in the place of the recurrence.
inline constexpr int64_t kDeltaTokens = 64;

// What a layer remembers of the tokens before a call. Undefined tensors: there were none.
struct DeltaState {
  torch::Tensor rule;     // [batch, num_value_heads, key_dim, value_dim] float32
  torch::Tensor columns;  // [batch, taps - 1, channels]: what the convolution still sees
};

// The rows that the rule works on, float32. Value head h reads key head h / (value heads / key
// heads).
struct DeltaRows {
  torch::Tensor q, k;         // [batch, key heads, tokens, key_dim]
  torch::Tensor v;            // [batch, value heads, tokens, value_dim]
  torch::Tensor log_decay;    // [batch, value heads, tokens], at most 0
  torch::Tensor write_share;  // [batch, value heads, tokens], beta, 0 to 1
};

// The gated delta rule (arXiv 2412.06464, equation 10), with a state S [key_dim, value_dim] of each
// value head. Token by token it is
//   S <- exp(log_decay) S,   S <- S + k^T (beta (v - k S)),   o = q S,
// and within a chunk the same as triangular systems (the paper's section 3.3). Returns o [batch,
// value heads, tokens, value_dim]; `state` [batch, value heads, key_dim, value_dim] goes on.
torch::Tensor gated_delta_rule(const DeltaRows& rows, torch::Tensor& state,
                               int64_t together = kDeltaTokens);

// A layer in attention's place: x [batch, tokens, hidden] after the norm -> [batch, tokens,
// hidden]. Products and what lies between them are rounded to x's dtype, the rule is float32.
// Each sequence begins with a state of zero; with `state` it goes on from there, and `state` then
// is that behind its last token. Heads go through in sets, as many as `delta_heads_together`.
torch::Tensor gated_delta_net(const torch::Tensor& x, const DeltaNetWeights& weights,
                              const DeltaNetSpec& spec, double rms_norm_eps,
                              DeltaState* state = nullptr);

// Key heads, each with its value heads, that go through the rule at a time, and the bytes that a
// layer takes beside hidden states and weights.
int64_t delta_heads_together(const DeltaNetSpec& spec, int64_t batch_tokens, bool on_gpu);
int64_t delta_net_bytes(const DeltaNetSpec& spec, int64_t batch_tokens, int64_t element_bytes,
                        bool on_gpu);

// Bytes of a sequence's DeltaState.
int64_t delta_state_bytes(const DeltaNetSpec& spec, int64_t element_bytes);

// Of rows that are stored head by head (DeltaNetSpec::rows_by_head) the places, in the order in
// which the layer reads them: q, k, v, z, beta, decay. [input_rows]
std::vector<int64_t> delta_row_order(const DeltaNetSpec& spec);

}  // namespace oscar
