// What the forward pass hands out of each attention layer. The model knows nothing of statistics.
#pragma once

#include "oscar/model/torch.h"

namespace oscar {

// Tensors of one batch of sequences of equal length, in the compute dtype, on the compute device.
struct AttentionRecord {
  int layer = 0;
  int64_t first_position = 0;  // of the sequences' first tokens
  double sm_scale = 1;         // factor on the scores before softmax
  torch::Tensor q;  // [batch, num_qo_heads, tokens, head_dim_k], after norm and RoPE, unscaled
  torch::Tensor k;  // [batch, num_kv_heads, tokens, head_dim_k], after norm and RoPE
  torch::Tensor v;  // [batch, num_kv_heads, tokens, head_dim_v]
  torch::Tensor o;  // [batch, num_qo_heads, tokens, head_dim_v], softmax output before W_O
};

class AttentionObserver {
 public:
  virtual ~AttentionObserver() = default;
  virtual void observe(const AttentionRecord& record) = 0;
};

}  // namespace oscar
