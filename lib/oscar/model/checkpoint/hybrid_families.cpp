// Families with linear attention in most layers: Qwen3.5 and Qwen3-Next.
#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/model/checkpoint/families.h"

namespace oscar {

// Gated DeltaNet in most layers, between layers of attention whose outputs are gated.

namespace {

constexpr const char* kLinearAttention = "linear_attention";
// Sizes that no real model comes near; a chunk's products of them stay small.
constexpr int64_t kMaxTaps = 16, kMaxDeltaDim = 512;

// Which layers are linear: by layer_types, else all but the last of each full_attention_interval.
std::vector<bool> read_linear_layers(const ConfigReader& reader, int num_layers) {
  const int interval = reader.size("full_attention_interval", kMaxLayers).value_or(4);
  std::vector<bool> linear;
  for (int i = 0; i < num_layers; ++i) linear.push_back((i + 1) % interval != 0);
  if (!reader.has("layer_types")) return linear;
  const Json& types = reader.json["layer_types"];
  if (!types.is_array() || types.size() != linear.size()) {
    reader.refuse("layer_types", "not one type per layer", fmt::format("{} names", num_layers));
  }
  for (size_t i = 0; i < linear.size(); ++i) {
    if (types[i] != kFullAttention && types[i] != kLinearAttention) {
      throw Error({.what = "this layer type is not implemented",
                   .where = reader.source + ": layer_types",
                   .expected = "full_attention or linear_attention",
                   .found = types[i].dump()});
    }
    linear[i] = types[i] == kLinearAttention;
  }
  return linear;
}

DeltaNetSpec read_delta_net(const ConfigReader& reader, bool rows_by_head) {
  DeltaNetSpec spec{
      .num_key_heads = reader.size("linear_num_key_heads", kMaxHeads).value_or(16),
      .num_value_heads = reader.size("linear_num_value_heads", kMaxHeads).value_or(32),
      .key_dim = reader.size("linear_key_head_dim", kMaxDeltaDim).value_or(128),
      .value_dim = reader.size("linear_value_head_dim", kMaxDeltaDim).value_or(128),
      .taps = reader.size("linear_conv_kernel_dim", kMaxTaps, 2).value_or(4),
      .rows_by_head = rows_by_head};
  if (spec.num_value_heads % spec.num_key_heads != 0) {
    reader.refuse("linear_num_value_heads", "value heads cannot be shared out among the key heads",
                  fmt::format("a multiple of {}", spec.num_key_heads));
  }
  return spec;
}

// What the keys must say that name what these families do anyway.
void require_usual(const ConfigReader& reader) {
  const std::string only = "this is not implemented";
  require_value(reader, "attn_output_gate", true, only);
  require_value(reader, "mamba_ssm_dtype", "float32", only);
  require_value(reader, "mtp_use_dedicated_embeddings", false, only);
  const std::string gate = reader.text("output_gate_type", "swish");
  if (gate != "swish" && gate != "silu") reader.refuse("output_gate_type", only, "swish");
}

// Layers of both kinds, dense ones.
void build_hybrid(const ConfigReader& reader, ModelConfig& config, int intermediate_size,
                  bool rows_by_head) {
  require_usual(reader);
  config.layers = dense_layers(reader, config, {.qk_norm = true, .gated = true}, intermediate_size);
  const std::vector<bool> linear = read_linear_layers(reader, config.num_layers);
  const DeltaNetSpec delta_net = read_delta_net(reader, rows_by_head);
  for (size_t i = 0; i < linear.size(); ++i) {
    if (!linear[i]) continue;
    config.layers[i].attention = {};
    config.layers[i].delta_net = delta_net;
  }
  if (config.num_fitted_layers() == 0) {
    reader.refuse("layer_types", "no layer attends to all tokens: there is nothing to quantize",
                  "full_attention in some layers");
  }
  config.norm_offset = 1;
}

constexpr std::string_view kHybridKeys[] = {"attn_output_gate",
                                            "full_attention_interval",
                                            "linear_conv_kernel_dim",
                                            "linear_key_head_dim",
                                            "linear_value_head_dim",
                                            "linear_num_key_heads",
                                            "linear_num_value_heads",
                                            "mamba_ssm_dtype",
                                            "mlp_only_layers",
                                            "mtp_num_hidden_layers",
                                            "mtp_use_dedicated_embeddings",
                                            "output_gate_type"};
constexpr std::string_view kExpertKeys[] = {
    "num_experts",        "num_local_experts",     "num_experts_per_tok",
    "norm_topk_prob",     "moe_intermediate_size", "shared_expert_intermediate_size",
    "decoder_sparse_step"};

// Keys of hybrid models with experts.
constexpr auto kHybridMoeKeys = [] {
  std::array<std::string_view, std::size(kHybridKeys) + std::size(kExpertKeys)> keys;
  std::ranges::copy(kExpertKeys, std::ranges::copy(kHybridKeys, keys.begin()).out);
  return keys;
}();
constexpr std::span kQwen3_5MoeKeys =
    std::span(kHybridMoeKeys).first<kHybridMoeKeys.size() - 1>();  // experts in every layer

constexpr NamePart kSharedExpertNames[] = {{".mlp.shared_expert.", ".mlp.shared_experts."}};
constexpr StoredNames kHybridNames{.parts = kSharedExpertNames, .further_part = "mtp."};

ExpertsSpec with_shared_expert(const ConfigReader& reader, ExpertsSpec experts) {
  experts.shared_intermediate_size =
      reader.size("shared_expert_intermediate_size", kMaxWidth).value_or(512);
  experts.shared_gate = true;
  return experts;
}

}  // namespace

// Qwen3.5, dense: also 3.6 and 3.8, whose layers are the same.

namespace {

void build_qwen3_5(const ConfigReader& reader, ModelConfig& config) {
  require_value(reader, "mlp_only_layers", Json::array(), "this family has no experts");
  build_hybrid(reader, config, 12288, /*rows_by_head=*/false);
}

}  // namespace

constinit const ModelFamily kQwen3_5{.architecture = "Qwen3_5ForCausalLM",
                                     .model_type = "qwen3_5_text",
                                     .vocab_size = 248320,
                                     .hidden_size = 4096,
                                     .num_layers = 32,
                                     .num_qo_heads = 16,
                                     .num_kv_heads = 4,
                                     .head_dim = 256,
                                     .max_position_embeddings = 32768,
                                     .rotary_factor = 0.25,
                                     .multi_axis_rope = true,
                                     .stored_names = kHybridNames,
                                     .keys = kHybridKeys,
                                     .build = build_qwen3_5};

// Qwen3.5 with experts in every layer, whose weights are always divided by their sum.

namespace {

void build_qwen3_5_moe(const ConfigReader& reader, ModelConfig& config) {
  require_value(reader, "mlp_only_layers", Json::array(), "this family has experts in every layer");
  require_value(reader, "norm_topk_prob", true,
                "this family divides the weights of experts by their sum");
  build_hybrid(reader, config, 1, /*rows_by_head=*/false);
  add_qwen_experts(
      reader,
      with_shared_expert(
          reader, {.num_experts = 256, .top_k = 8, .intermediate_size = 512, .normalize = true}),
      config);
}

}  // namespace

constinit const ModelFamily kQwen3_5Moe{.architecture = "Qwen3_5MoeForCausalLM",
                                        .model_type = "qwen3_5_moe_text",
                                        .vocab_size = 248320,
                                        .hidden_size = 2048,
                                        .num_layers = 40,
                                        .num_qo_heads = 16,
                                        .num_kv_heads = 2,
                                        .head_dim = 256,
                                        .max_position_embeddings = 32768,
                                        .rotary_factor = 0.25,
                                        .multi_axis_rope = true,
                                        .stored_names = kHybridNames,
                                        .keys = kQwen3_5MoeKeys,
                                        .build = build_qwen3_5_moe};

// Qwen3-Next: the same layers, with rows of the linear ones in another order.

namespace {

void build_qwen3_next(const ConfigReader& reader, ModelConfig& config) {
  build_hybrid(reader, config, 5632, /*rows_by_head=*/true);
  add_qwen_experts(
      reader,
      with_shared_expert(
          reader, {.num_experts = 512, .top_k = 10, .intermediate_size = 512, .normalize = true}),
      config);
}

}  // namespace

constinit const ModelFamily kQwen3Next{.architecture = "Qwen3NextForCausalLM",
                                       .model_type = "qwen3_next",
                                       .vocab_size = 151936,
                                       .hidden_size = 2048,
                                       .num_layers = 48,
                                       .num_qo_heads = 16,
                                       .num_kv_heads = 2,
                                       .head_dim = 256,
                                       .max_position_embeddings = 32768,
                                       .rotary_factor = 0.25,
                                       .stored_names = kHybridNames,
                                       .keys = kHybridMoeKeys,
                                       .build = build_qwen3_next};

}  // namespace oscar
