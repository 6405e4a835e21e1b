// What one layer of a model computes. The files in families/ make it of config.json; the forward
// pass, the table of weights and the plans of memory know it instead of families.
#pragma once

#include <variant>

#include "oscar/checkpoint/layer_geometry.h"

namespace oscar {

// Head counts, head_dim and the softmax scale are those of the model (ModelConfig): a bundle has
// one of each.
struct AttentionSpec {
  int window = 0;         // keys that a query sees, itself included; 0: all before it
  bool qkv_bias = false;  // bias on the q, k and v projections
  bool o_bias = false;    // bias on the output projection
  bool qk_norm = false;   // RMSNorm over head_dim on q and k, before RoPE
  // A local layer among global ones: turned by ModelConfig::local_rope, its window stays in BF16.
  bool local = false;

  bool operator==(const AttentionSpec&) const = default;
  AttentionKind kind() const {
    if (local) return AttentionKind::kLocal;
    return window > 0 ? AttentionKind::kSliding : AttentionKind::kFull;
  }
};

// kGeluTanh: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
enum class Activation { kSilu, kGeluTanh };

// down(activation(gate x) * up x).
struct DenseSpec {
  int intermediate_size = 0;
  bool bias = false;  // on all three projections
  Activation activation = Activation::kSilu;
  bool operator==(const DenseSpec&) const = default;
};

// How scores of experts are made of the router's logits.
enum class RouterScore { kSoftmax, kSigmoid };

// The `top_k` experts with the highest scores, summed with their scores as weights, and beside them
// a shared one that every token passes through. Each expert is as DenseSpec, with silu and without
// biases.
struct ExpertsSpec {
  int num_experts = 0, top_k = 0;
  int intermediate_size = 0;         // of one expert
  int shared_intermediate_size = 0;  // of the shared expert; 0: there is none
  RouterScore score = RouterScore::kSoftmax;
  // A number for each expert that is added to its score for the choice, and not to its weight.
  bool choice_bias = false;
  // Experts in order form so many sets; only those of `top_sets` sets may be chosen, the ones whose
  // two highest scores have the highest sums.
  int num_sets = 1, top_sets = 1;
  bool normalize = false;  // weights are divided by their sum
  double scaling = 1.0;    // factor on the weights, after that
  bool operator==(const ExpertsSpec&) const = default;
};

struct LayerSpec {
  AttentionSpec attention;
  std::variant<DenseSpec, ExpertsSpec> mlp;
  // Norms also behind attention and behind the MLP, before what they return is added.
  bool output_norms = false;

  bool operator==(const LayerSpec&) const = default;
  const ExpertsSpec* experts() const { return std::get_if<ExpertsSpec>(&mlp); }
  // Width of the MLP that every token passes through; 0: there are only chosen experts.
  int dense_intermediate_size() const {
    if (const ExpertsSpec* spec = experts()) return spec->shared_intermediate_size;
    return std::get<DenseSpec>(mlp).intermediate_size;
  }
};

}  // namespace oscar
