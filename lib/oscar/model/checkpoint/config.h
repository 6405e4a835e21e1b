// config.json to a ModelConfig: layers, heads, windows, experts, and how weights are quantized.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/model/checkpoint/rope.h"

namespace oscar {

// The shape of one layer's attention, as the fit and the file need it.

// A local layer is a sliding one that keeps its whole window in BF16 whatever the recent tokens
// are. A layer of kind none holds no rows of its own: its attention is linear, or it reads those of
// another layer. Nothing is collected of either, and they have no transforms.
enum class AttentionKind { kFull, kSliding, kLocal, kNone };

struct LayerGeometry {
  int layer_id = 0;  // global index in the checkpoint
  AttentionKind attention = AttentionKind::kFull;
  int sliding_window = 0;  // keys visible to a query; 0 for full attention
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim_k = 0;
  int head_dim_v = 0;
  bool quantized = true;  // as of quantized_beyond
  bool turned = true;     // by the model's RoPE; false: the layer's keys do not turn (NoPE)

  // Whether there are statistics and transforms of the layer.
  bool fitted() const {
    return attention == AttentionKind::kFull || attention == AttentionKind::kSliding;
  }
  // Whether rows ever leave the exact windows: the window of a sliding layer may fit into the
  // recent tokens that stay in BF16.
  bool quantized_beyond(int recent_tokens) const {
    return fitted() && (sliding_window == 0 || sliding_window > recent_tokens);
  }
  bool operator==(const LayerGeometry&) const = default;
};

// What one layer of a model computes. families.cpp makes it of config.json; the forward
// pass, the table of weights and the plans of memory know it instead of families.

// Head counts, head_dim and the softmax scale are those of the model (ModelConfig): a bundle has
// one of each.
struct AttentionSpec {
  int window = 0;           // keys that a query sees, itself included; 0: all before it
  bool qkv_bias = false;    // bias on the q, k and v projections
  bool o_bias = false;      // bias on the output projection
  bool qk_norm = false;     // RMSNorm over head_dim on q and k, before RoPE
  bool joint_norm = false;  // qk_norm is one over all query heads, and one over all KV heads
  // Outputs are multiplied by sigmoid(gate) before the output projection; the gate's rows lie in
  // q_proj, those of each head behind its queries.
  bool gated = false;
  // A local layer among global ones: turned by ModelConfig::local_rope, its window stays in BF16.
  bool local = false;

  bool operator==(const AttentionSpec&) const = default;
  AttentionKind kind() const {
    if (local) return AttentionKind::kLocal;
    return window > 0 ? AttentionKind::kSliding : AttentionKind::kFull;
  }
};

// Gated DeltaNet (arXiv 2412.06464): linear attention whose state is a matrix for each value head.
// Value head h reads the queries and keys of key head h / (num_value_heads / num_key_heads).
struct DeltaNetSpec {
  int num_key_heads = 0, num_value_heads = 0;
  int key_dim = 0, value_dim = 0;  // of one head
  int taps = 0;                    // tokens that the convolution before it sees
  // Rows of its input projections are stored head by head (Qwen3-Next), not part by part.
  bool rows_by_head = false;
  bool operator==(const DeltaNetSpec&) const = default;

  int value_heads_per_key() const { return num_value_heads / num_key_heads; }
  // Rows of the queries and keys together; of all that passes through the convolution; of values.
  int64_t key_rows() const { return int64_t{2} * num_key_heads * key_dim; }
  int64_t value_rows() const { return int64_t{num_value_heads} * value_dim; }
  int64_t channels() const { return key_rows() + value_rows(); }
  // Rows of all input projections: the channels, the gate z, then beta and decay of each head.
  int64_t input_rows() const { return channels() + value_rows() + 2 * int64_t{num_value_heads}; }
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
  bool normalize = false;    // weights are divided by their sum
  double scaling = 1.0;      // factor on the weights, after that
  bool shared_gate = false;  // the shared expert is multiplied by a sigmoid of the token
  bool operator==(const ExpertsSpec&) const = default;
};

struct LayerSpec {
  AttentionSpec attention;
  std::variant<DenseSpec, ExpertsSpec> mlp;
  // Norms also behind attention and behind the MLP, before what they return is added.
  bool output_norms = false;
  // In the place of attention, of which then nothing is there.
  std::optional<DeltaNetSpec> delta_net = std::nullopt;

  bool operator==(const LayerSpec&) const = default;
  AttentionKind kind() const { return delta_net ? AttentionKind::kNone : attention.kind(); }
  const ExpertsSpec* experts() const { return std::get_if<ExpertsSpec>(&mlp); }
  // Width of the MLP that every token passes through; 0: there are only chosen experts.
  int dense_intermediate_size() const {
    if (const ExpertsSpec* spec = experts()) return spec->shared_intermediate_size;
    return std::get<DenseSpec>(mlp).intermediate_size;
  }
};

// Values of config.json: each one checked, every error with file and key.

// Bounds that no real model comes near; they keep products of sizes inside 64 bits.
inline constexpr int64_t kMaxLayers = 4096, kMaxHeads = 8192, kMaxConfigHeadDim = 4096;
inline constexpr int64_t kMaxWidth = int64_t{1} << 22, kMaxVocab = int64_t{1} << 26;
inline constexpr int64_t kMaxLength = int64_t{1} << 30, kMaxExperts = 2048;

// Types of layers in layer_types and, of some families, in rope_parameters.
inline constexpr const char *kFullAttention = "full_attention",
                            *kSlidingAttention = "sliding_attention";

struct ConfigReader {
  const Json& json;
  const std::string& source;  // the file, for messages

  // Throws Error naming file and key.
  [[noreturn]] void refuse(const std::string& key, const std::string& what,
                           const std::string& expected) const;

  // Present and not null.
  bool has(const std::string& key) const { return json.contains(key) && !json[key].is_null(); }

  // An integer from min to max; none where the key is absent or null.
  std::optional<int> size(const std::string& key, int64_t max, int64_t min = 1) const;
  bool flag(const std::string& key, bool fallback) const;
  double number(const std::string& key, double fallback, double low, double high) const;
  std::string text(const std::string& key, const std::string& fallback) const;
};

// What config.json says about quantized weights: which FP8 layout, or by name why not.

// What shares one scale: a whole matrix, each row (an output channel), or each block. kNone: no
// weight has scales (config.fp8 never is that).
enum class ScaleLayout { kTensor, kChannel, kBlock, kNone };

// Weights stored in FP8 E4M3, each with a tensor of scales beside it. Biases, norms and whatever
// else is not stored in FP8 are as in any checkpoint.
struct Fp8Layout {
  ScaleLayout layout = ScaleLayout::kTensor;
  int64_t block_rows = 0, block_columns = 0;  // kBlock
  // A weight's scales have its name with one of these behind it.
  std::vector<std::string> scale_suffixes = {};
  std::vector<std::string> left_out = {};  // names or patterns of modules that are not quantized
};

// "a scale a tensor", "a scale a channel", "a scale for every 128 x 128".
std::string describe(const Fp8Layout& layout);

// Reads the quantization_config (or compression_config) of a config.json: `quant_method` "fp8", in
// blocks or with one scale a tensor; "compressed-tensors" of format "float-quantized", with one
// scale a tensor, a channel or a block; "modelopt" with `quant_algo` "FP8", one scale a tensor.
// None when there is none. Keys that concern activations and the KV cache alone are accepted.
// Throws Error naming the method or the key for everything else, with what to do instead.
std::optional<Fp8Layout> parse_quantization(const Json& config, const std::string& source);

// What the files of a model call its tensors, where that is not what weights.h does.

// A part of names in the files, and what stands in its place in the table.
struct NamePart {
  std::string_view stored, ours;
};

struct StoredNames {
  std::span<const NamePart> parts = {};
  bool fused = false;  // q, k and v are rows of one tensor, and gate and up of another
  // Of a model that also reads images: what the names of tensors begin with that no text passes
  // through. They are left out.
  std::span<const std::string_view> other_parts = {};
  // What the names of tensors begin with that guess tokens further ahead, where these do not lie
  // behind the layers. They are left out.
  std::string_view further_part = {};
};

// What the forward pass depends on beside shape, RoPE and weights.
inline constexpr const char* kNumericKeys[] = {"rms_norm_eps",
                                               "hidden_act",
                                               "hidden_activation",
                                               "query_pre_attn_scalar",
                                               "num_experts_per_tok",
                                               "norm_topk_prob",
                                               "routed_scaling_factor",
                                               "scoring_func",
                                               "n_group",
                                               "topk_group"};

// A factor on queries that grows with their position p: 1 + beta ln(1 + floor(p / length)).
struct QueryScaling {
  double beta = 0;
  int length = 1;
};

// A decoder-only transformer as its config.json describes it, whatever the family.

struct ModelConfig {
  std::string architecture;  // first entry of "architectures", for example "Qwen3ForCausalLM"
  std::string model_type;    // as in config.json, for example "qwen3"
  int num_layers = 0;
  int hidden_size = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  double rms_norm_eps = 1e-6;
  Json numerics = Json::object();  // those of kNumericKeys that config.json states
  double norm_offset = 0;          // added to the weights of all norms, in fp32
  double embedding_scale = 1;      // factor on the embeddings, rounded to the compute dtype
  double sm_scale = 1;             // factor on the scores before softmax
  bool tie_word_embeddings = false;
  bool tie_is_stated = true;  // false: by default, or by one of two configs that disagree
  StoredNames stored_names;
  std::vector<LayerSpec> layers;  // [num_layers]
  // Layers behind those, which guess tokens further ahead: their tensors are left out.
  int further_layers = 0;
  Rope rope;
  std::optional<Rope> local_rope;  // of layers whose AttentionSpec is local
  std::optional<QueryScaling> query_scaling;
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  std::optional<Fp8Layout> fp8;  // of a folder whose matrices are stored in FP8

  const LayerSpec& layer(int index) const { return layers.at(static_cast<size_t>(index)); }
  const Rope& rope_of(int index) const { return layer(index).attention.local ? *local_rope : rope; }
  // Layers with statistics and transforms: neither local nor linear.
  int num_fitted_layers() const;
  // Whether any layer gates its attention outputs (AttentionSpec::gated).
  bool has_output_gates() const;
  // Layers with equal specs together, in the order of the first of each.
  std::vector<std::vector<int>> layers_by_spec() const;
  // Geometry of one layer; `recent_tokens` decides whether a sliding layer is ever quantized.
  LayerGeometry geometry(int layer, int recent_tokens) const;
};

// Reads config.json as transformers 4 and 5 write it, of a model that also reads images what
// concerns text (text_half.h). Absent keys take the family's default in transformers. Throws Error
// for an unknown architecture, for a key that would change the computation and is not implemented
// (named), and for absurd or inconsistent sizes. `rope_scaling` replaces the file's rope_scaling
// when set (--rope-scaling).
ModelConfig parse_model_config(const Json& config, const std::string& source,
                               const std::optional<Json>& rope_scaling = std::nullopt);

}  // namespace oscar
