// The forward pass, a layer at a time, and who watches it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/fit/linalg.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/model/checkpoint/config.h"
#include "oscar/model/delta_net.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/torch.h"

namespace oscar {

// What the forward pass hands out of each attention layer. The model knows nothing of statistics.

// Tensors of one batch of sequences of equal length, in the compute dtype, on the compute device.
struct AttentionRecord {
  int layer = 0;
  int64_t first_position = 0;  // of the sequences' first tokens
  double sm_scale = 1;         // factor on the scores before softmax
  torch::Tensor q;  // [batch, num_qo_heads, tokens, head_dim_k], after norm, RoPE and QueryScaling
  torch::Tensor k;  // [batch, num_kv_heads, tokens, head_dim_k], after norm and RoPE
  torch::Tensor v;  // [batch, num_kv_heads, tokens, head_dim_v]
  torch::Tensor o;  // [batch, num_qo_heads, tokens, head_dim_v], softmax output before W_O
  // As o: what the model multiplies it by before W_O; undefined where it does not.
  torch::Tensor gate = {};
};

class AttentionObserver {
 public:
  virtual ~AttentionObserver() = default;
  virtual void observe(const AttentionRecord& record) = 0;
};

// What a layer does between its matrix products: a kernel of one pass over memory for bf16 rows on
// a GPU (oscar_kernels/forward.h), operations of torch elsewhere, rounded at the same places.

// x [.., width], weight [width] in x's dtype or float32: RMSNorm in fp32, rounded once to x's
// dtype.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x + added, and the norm of that.
struct NormedSum {
  torch::Tensor sum, norm;
};
NormedSum add_and_norm(const torch::Tensor& x, const torch::Tensor& added,
                       const torch::Tensor& weight, double eps);

// Queries, keys and values [batch, heads, tokens, d] out of their joined product qkv [batch,
// tokens, num_qo_heads + 2 num_kv_heads, d]: queries and keys normed where there is a weight, [d]
// for each head or [heads * d] for all together, then rotated by cos, sin [tokens, n/2]
// (attention.h). Values are a view of qkv.
struct HeadNorms {
  torch::Tensor q, k;  // undefined: none
  double eps = 0;
};
struct RotatedRows {
  torch::Tensor q, k, v;
};
RotatedRows split_and_rotate(const torch::Tensor& qkv, int64_t num_kv_heads, const HeadNorms& norms,
                             const torch::Tensor& cos, const torch::Tensor& sin);

// What `op` makes of each element: bits do not depend on the number of threads.
using ElementOp = std::function<void(torch::Tensor& out, const torch::Tensor& in)>;
torch::Tensor by_pieces(const torch::Tensor& x, const ElementOp& op);
torch::Tensor activated(const torch::Tensor& x, Activation activation);
torch::Tensor logistic(const torch::Tensor& x);  // 1 / (1 + exp(-x))

// activation(gate) up of gate_up [.., 2 width]: [.., width].
torch::Tensor gated(const torch::Tensor& gate_up, Activation activation);

// One decoder-only transformer for every supported family, run layer by layer.

// Replaces the attention of one layer (INT2 evaluation): from q, k, v as in AttentionRecord to o.
class AttentionEngine {
 public:
  virtual ~AttentionEngine() = default;
  virtual torch::Tensor attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, double sm_scale) = 0;
};

// Weights of one layer on the device (layer_weights.h; names in the file: weights.h).
struct LayerWeights;

class Transformer {
 public:
  // Keeps a reference to the checkpoint, which must outlive it. Loads nothing yet, but throws Error
  // when a tensor is missing, of another shape, or not accounted for. Not for use by two threads.
  Transformer(const Checkpoint& checkpoint, ComputeOptions options);
  ~Transformer();

  const ModelConfig& config() const;
  const ComputeOptions& compute() const;

  // ids [batch, tokens] int64 on any device -> hidden [batch, tokens, hidden_size].
  torch::Tensor embed(const torch::Tensor& ids);

  // Loads one layer's weights onto the device; another thread may run layers meanwhile. Throws
  // Error naming a missing tensor, a wrong shape or a tensor with non-finite values.
  std::shared_ptr<const LayerWeights> load_layer(int layer) const;
  // Has the system begin to read what load_layer will ask for.
  void read_ahead(int layer) const;
  // Layers that stay on the device from one pass to the next, null where none does: [num_layers].
  // Filled and emptied by model/layer_major.h.
  std::vector<std::shared_ptr<const LayerWeights>>& kept_layers();
  // Bytes that load_layer puts on the device.
  size_t layer_bytes(int layer) const;

  // hidden -> hidden through one layer; positions are position_offset .. + tokens - 1.
  // The observer sees what attention used. `engine` replaces the attention itself. Neither hears of
  // linear layers. These begin each sequence at zero, or go on with `state`, one of each layer.
  torch::Tensor forward_layer(int layer, const LayerWeights& weights, const torch::Tensor& hidden,
                              AttentionObserver* observer = nullptr,
                              AttentionEngine* engine = nullptr, int64_t position_offset = 0,
                              DeltaState* state = nullptr) const;

  // Final norm and output projection: hidden [batch, tokens, hidden] -> logits fp32 [.., vocab].
  torch::Tensor logits(const torch::Tensor& hidden);

  // M_O = sum over the query heads j of a KV head of W_O,j W_O,j^T, [Hkv, d, d], in float64 from
  // weights in the compute dtype; W_O,j is the [head_dim_v, hidden] slice of query head j.
  MatrixStack<double> o_proj_metric(int layer) const;
  // W_O,j W_O,j^T of every query head, [Hq, d, d]: what the sum above is made of.
  MatrixStack<double> o_proj_head_metrics(int layer) const;

 private:
  MatrixStack<double> output_metrics(int layer, int joined) const;

  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// Sampling from the model with a plain key-value cache.

struct GenerateOptions {
  int64_t num_sequences = 1;
  int64_t length = 0;        // tokens of each sequence, the first one included
  int32_t first_token = 0;   // starts every sequence
  double temperature = 1.0;  // 1 = the model's own distribution
  uint64_t seed = 0;
};

// Samples [num_sequences, length] tokens. All layers' weights stay on the device. The same seed,
// device and thread count give the same tokens.
std::vector<std::vector<int32_t>> generate(Transformer& model, const GenerateOptions& options,
                                           Progress& progress);

}  // namespace oscar
