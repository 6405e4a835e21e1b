// Families with experts in some of their layers.
#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/model/checkpoint/families.h"

namespace oscar {

// GLM-4.5 to 4.7: RoPE on a part of each head, dense layers first, then experts and a shared one.

namespace {

constexpr std::string_view kGlm4MoeKeys[] = {"attention_bias",
                                             "use_qk_norm",
                                             "first_k_dense_replace",
                                             "n_routed_experts",
                                             "num_local_experts",
                                             "n_shared_experts",
                                             "num_experts_per_tok",
                                             "moe_intermediate_size",
                                             "n_group",
                                             "topk_group",
                                             "norm_topk_prob",
                                             "routed_scaling_factor",
                                             "num_nextn_predict_layers",
                                             "num_mtp_layers"};

constexpr double kLargestScaling = 1e6;

void require_some_experts(const ConfigReader& reader, const std::string& key,
                          const ExpertsSpec& experts) {
  if (experts.num_experts > 0) return;
  reader.refuse(key, "a layer of experts has none", "a positive number");
}

// `key`: how many experts' width the shared one has, 1 where it is absent.
void add_shared_experts(const ConfigReader& reader, const std::string& key, ExpertsSpec& experts) {
  const int64_t shared = reader.size(key, kMaxExperts).value_or(1);
  if (shared * experts.intermediate_size > kMaxWidth) {
    reader.refuse(key, "config.json has an impossible value",
                  fmt::format("at most {} in all", kMaxWidth));
  }
  experts.shared_intermediate_size = static_cast<int>(shared * experts.intermediate_size);
}

ExpertsSpec read_experts(const ConfigReader& reader) {
  ExpertsSpec experts{
      .num_experts = read_one_of(reader, "n_routed_experts", "num_local_experts", 128),
      .top_k = reader.size("num_experts_per_tok", kMaxExperts).value_or(8),
      .intermediate_size = reader.size("moe_intermediate_size", kMaxWidth).value_or(1408),
      .score = RouterScore::kSigmoid,
      .choice_bias = true,
      .num_sets = reader.size("n_group", kMaxExperts).value_or(1),
      .top_sets = reader.size("topk_group", kMaxExperts).value_or(1),
      .normalize = reader.flag("norm_topk_prob", true),
      .scaling = reader.number("routed_scaling_factor", 1.0, 0.0, kLargestScaling)};
  require_some_experts(reader, "n_routed_experts", experts);
  add_shared_experts(reader, "n_shared_experts", experts);
  // Two scores stand for a set.
  if (experts.num_experts % experts.num_sets != 0 || experts.num_experts / experts.num_sets < 2) {
    reader.refuse(
        "n_group", "the experts cannot be shared out evenly",
        fmt::format("a divisor of {} experts, two or more of them in each", experts.num_experts));
  }
  if (experts.top_sets > experts.num_sets) {
    reader.refuse("topk_group", "more sets of experts are chosen than there are",
                  fmt::format("1 to {}", experts.num_sets));
  }
  require_enough_experts(reader, experts);
  return experts;
}

void build_glm4_moe(const ConfigReader& reader, ModelConfig& config) {
  const AttentionSpec attention{.qkv_bias = reader.flag("attention_bias", false),
                                .qk_norm = reader.flag("use_qk_norm", false)};
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  config.layers = dense_layers(reader, config, attention, 10944);
  const int first = reader.size("first_k_dense_replace", kMaxLayers, 0).value_or(1);
  const ExpertsSpec experts = read_experts(reader);
  for (int i = first; i < config.num_layers; ++i) {
    config.layers[static_cast<size_t>(i)].mlp = experts;
  }
  config.further_layers = read_one_of(reader, "num_nextn_predict_layers", "num_mtp_layers", 1);
}

}  // namespace

constinit const ModelFamily kGlm4Moe{.architecture = "Glm4MoeForCausalLM",
                                     .model_type = "glm4_moe",
                                     .vocab_size = 151552,
                                     .hidden_size = 4096,
                                     .num_layers = 46,
                                     .num_qo_heads = 96,
                                     .num_kv_heads = 8,
                                     .head_dim = std::nullopt,
                                     .max_position_embeddings = 131072,
                                     .rms_norm_eps = 1e-5,
                                     .rotary_factor = 0.5,
                                     .keys = kGlm4MoeKeys,
                                     .build = build_glm4_moe};

// Qwen3-MoE: Qwen3's attention, and experts in some layers or in all.

namespace {

constexpr std::string_view kQwen3MoeKeys[] = {
    "attention_bias",      "use_sliding_window", "sliding_window",       "max_window_layers",
    "num_experts",         "num_local_experts",  "num_experts_per_tok",  "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",    "moe_intermediate_size"};

// Layers of mlp_only_layers have no experts.
std::vector<int> read_dense_layers(const ConfigReader& reader) {
  std::vector<int> layers;
  if (!reader.has("mlp_only_layers")) return layers;
  const Json& list = reader.json["mlp_only_layers"];
  if (!list.is_array()) reader.refuse("mlp_only_layers", "not a list", "a list of layers");
  for (const Json& entry : list) {
    const Json one = {{"mlp_only_layers", entry}};
    const auto layer = ConfigReader{one, reader.source}.size("mlp_only_layers", kMaxLayers, 0);
    if (layer) layers.push_back(*layer);
  }
  return layers;
}

}  // namespace

void add_qwen_experts(const ConfigReader& reader, const ExpertsSpec& usual, ModelConfig& config) {
  ExpertsSpec experts = usual;
  experts.num_experts = read_one_of(reader, "num_experts", "num_local_experts", usual.num_experts);
  experts.top_k = reader.size("num_experts_per_tok", kMaxExperts).value_or(usual.top_k);
  experts.intermediate_size =
      reader.size("moe_intermediate_size", kMaxWidth).value_or(usual.intermediate_size);
  experts.normalize = reader.flag("norm_topk_prob", usual.normalize);
  const int step = reader.size("decoder_sparse_step", kMaxLayers).value_or(1);
  const std::vector<int> dense = read_dense_layers(reader);
  if (experts.num_experts == 0) return;
  require_enough_experts(reader, experts);
  for (int i = 0; i < config.num_layers; ++i) {
    if (std::ranges::find(dense, i) == dense.end() && (i + 1) % step == 0) {
      config.layers[static_cast<size_t>(i)].mlp = experts;
    }
  }
}

namespace {

void build_qwen3_moe(const ConfigReader& reader, ModelConfig& config) {
  const bool bias = reader.flag("attention_bias", false);
  // transformers' model slides in every layer or in none, whatever max_window_layers says.
  const AttentionSpec attention{
      .window = reader.flag("use_sliding_window", false) ? read_window(reader, 4096) : 0,
      .qkv_bias = bias,
      .o_bias = bias,
      .qk_norm = true};
  require_one_layer_type(reader, config.num_layers, attention.kind());
  config.layers = dense_layers(reader, config, attention, 6144);
  add_qwen_experts(reader, {.num_experts = 128, .top_k = 8, .intermediate_size = 768}, config);
}

}  // namespace

constinit const ModelFamily kQwen3Moe{.architecture = "Qwen3MoeForCausalLM",
                                      .model_type = "qwen3_moe",
                                      .vocab_size = 151936,
                                      .hidden_size = 2048,
                                      .num_layers = 24,
                                      .num_qo_heads = 32,
                                      .num_kv_heads = 4,
                                      .head_dim = std::nullopt,
                                      .max_position_embeddings = 32768,
                                      .keys = kQwen3MoeKeys,
                                      .build = build_qwen3_moe};

// The text half of Qwen3-VL with experts, whose weights are always divided by their sum.

namespace {

constexpr std::string_view kQwen3VlMoeKeys[] = {
    "attention_bias",      "num_experts",         "num_local_experts", "norm_topk_prob",
    "num_experts_per_tok", "decoder_sparse_step", "mlp_only_layers",   "moe_intermediate_size"};

void build_qwen3_vl_moe(const ConfigReader& reader, ModelConfig& config) {
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  if (!reader.flag("norm_topk_prob", true)) {
    reader.refuse("norm_topk_prob", "this family divides the weights of experts by their sum",
                  "true");
  }
  const bool bias = reader.flag("attention_bias", false);
  config.layers =
      dense_layers(reader, config, {.qkv_bias = bias, .o_bias = bias, .qk_norm = true}, 5632);
  add_qwen_experts(reader,
                   {.num_experts = 60, .top_k = 4, .intermediate_size = 1408, .normalize = true},
                   config);
}

}  // namespace

constinit const ModelFamily kQwen3VlMoe{.architecture = "Qwen3VLMoeForConditionalGeneration",
                                        .model_type = "qwen3_vl_moe_text",
                                        .vocab_size = 151936,
                                        .hidden_size = 2048,
                                        .num_layers = 24,
                                        .num_qo_heads = 16,
                                        .num_kv_heads = 16,
                                        .head_dim = std::nullopt,
                                        .max_position_embeddings = 128000,
                                        .rope_theta = 500000.0,
                                        .multi_axis_rope = true,
                                        .keys = kQwen3VlMoeKeys,
                                        .build = build_qwen3_vl_moe};

// Hy3: per-head norms, a dense layer first, then experts beside a shared one.

namespace {

constexpr std::string_view kHyV3Keys[] = {"attention_bias",
                                          "mlp_bias",
                                          "qk_norm",
                                          "num_experts",
                                          "num_local_experts",
                                          "num_experts_per_tok",
                                          "num_shared_experts",
                                          "moe_intermediate_size",
                                          "expert_hidden_dim",
                                          "mlp_layer_types",
                                          "first_k_dense_replace",
                                          "route_norm",
                                          "router_scaling_factor",
                                          "moe_router_use_sigmoid",
                                          "moe_router_enable_expert_bias",
                                          "num_nextn_predict_layers",
                                          "enable_moe_fp32_combine"};
constexpr NamePart kHyV3Names[] = {{".mlp.router.gate.", ".mlp.gate."},
                                   {".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"},
                                   {".mlp.shared_mlp.", ".mlp.shared_experts."}};

// Which layers have experts: by mlp_layer_types, else all but the first.
std::vector<bool> read_sparse_layers(const ConfigReader& reader, int num_layers) {
  const int first = reader.size("first_k_dense_replace", kMaxLayers, 0).value_or(1);
  std::vector<bool> sparse;
  for (int i = 0; i < num_layers; ++i) sparse.push_back(i >= first);
  if (!reader.has("mlp_layer_types")) return sparse;
  const Json& types = reader.json["mlp_layer_types"];
  const bool sound = types.is_array() && types.size() == sparse.size() &&
                     std::ranges::all_of(types, [](const Json& type) {
                       return type == "dense" || type == "sparse";
                     });
  if (!sound) {
    reader.refuse("mlp_layer_types", "not a type for each layer",
                  fmt::format("{} times dense or sparse", num_layers));
  }
  for (size_t i = 0; i < sparse.size(); ++i) {
    if (reader.has("first_k_dense_replace") && sparse[i] != (types[i] == "sparse")) {
      reader.refuse("first_k_dense_replace", "two keys disagree", "what mlp_layer_types says");
    }
    sparse[i] = types[i] == "sparse";
  }
  return sparse;
}

void build_hy_v3(const ConfigReader& reader, ModelConfig& config) {
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  const std::string always = "this family does so in every layer";
  for (const char* key :
       {"qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"}) {
    require_value(reader, key, true, always);
  }
  if (reader.flag("mlp_bias", false)) {
    reader.refuse("mlp_bias", "biases in experts are not implemented", "false");
  }
  reader.flag("enable_moe_fp32_combine", true);  // a matter of rounding
  const bool bias = reader.flag("attention_bias", false);
  config.layers =
      dense_layers(reader, config, {.qkv_bias = bias, .o_bias = bias, .qk_norm = true}, 13312);
  ExpertsSpec experts{
      .num_experts = read_one_of(reader, "num_experts", "num_local_experts", 192),
      .top_k = reader.size("num_experts_per_tok", kMaxExperts).value_or(8),
      .intermediate_size = reader.size("moe_intermediate_size", kMaxWidth).value_or(1536),
      .score = RouterScore::kSigmoid,
      .choice_bias = true,
      .normalize = true,
      .scaling = reader.number("router_scaling_factor", 2.826, 0.0, kLargestScaling)};
  require_value(reader, "expert_hidden_dim", experts.intermediate_size, "two keys disagree");
  require_some_experts(reader, "num_experts", experts);
  add_shared_experts(reader, "num_shared_experts", experts);
  require_enough_experts(reader, experts);
  const std::vector<bool> sparse = read_sparse_layers(reader, config.num_layers);
  for (size_t i = 0; i < sparse.size(); ++i) {
    if (sparse[i]) config.layers[i].mlp = experts;
  }
  config.further_layers = reader.size("num_nextn_predict_layers", kMaxLayers, 0).value_or(0);
}

}  // namespace

constinit const ModelFamily kHyV3{.architecture = "HYV3ForCausalLM",
                                  .model_type = "hy_v3",
                                  .vocab_size = 120832,
                                  .hidden_size = 4096,
                                  .num_layers = 80,
                                  .num_qo_heads = 64,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .max_position_embeddings = 131072,
                                  .rms_norm_eps = 1e-5,
                                  .rope_theta = 11158840.0,
                                  .stored_names = {.parts = kHyV3Names},
                                  .keys = kHyV3Keys,
                                  .build = build_hy_v3};

// MiniMax-M2: one norm over all heads of q and one over those of k, RoPE on a part of each head,
// experts in every layer.

namespace {

constexpr std::string_view kMiniMaxM2Keys[] = {"rotary_dim",
                                               "num_experts",
                                               "num_local_experts",
                                               "num_experts_per_tok",
                                               "scoring_func",
                                               "use_routing_bias",
                                               "use_qk_norm",
                                               "qk_norm_type",
                                               "shared_intermediate_size",
                                               "shared_moe_mode",
                                               "attn_type_list",
                                               "postnorm",
                                               "layernorm_full_attention_alpha",
                                               "layernorm_full_attention_beta",
                                               "layernorm_linear_attention_alpha",
                                               "layernorm_linear_attention_beta",
                                               "layernorm_mlp_alpha",
                                               "layernorm_mlp_beta",
                                               "mlp_intermediate_size",
                                               "use_mtp",
                                               "num_mtp_modules",
                                               "mtp_transformer_layers"};
constexpr NamePart kMiniMaxM2Names[] = {
    {".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"},
    {".block_sparse_moe.", ".mlp."},
    {".w1.", ".gate_proj."},
    {".w3.", ".up_proj."},
    {".w2.", ".down_proj."}};

void build_minimax_m2(const ConfigReader& reader, ModelConfig& config) {
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  const std::string only = "this is not implemented";
  require_value(reader, "scoring_func", "sigmoid", only);
  require_value(reader, "use_routing_bias", true, only);
  require_value(reader, "use_qk_norm", true, only);
  require_value(reader, "qk_norm_type", "per_layer", only);
  require_value(reader, "shared_intermediate_size", 0, only);
  require_value(reader, "postnorm", false, only);
  for (const char* key : {"layernorm_full_attention_alpha", "layernorm_full_attention_beta",
                          "layernorm_mlp_alpha", "layernorm_mlp_beta"}) {
    require_value(reader, key, 1.0, only);
  }
  if (reader.has("attn_type_list")) {  // 0 is linear attention
    require_value(reader, "attn_type_list",
                  std::vector<int>(static_cast<size_t>(config.num_layers), 1), only);
  }
  config.layers = dense_layers(reader, config, {.qk_norm = true, .joint_norm = true}, 1536);
  ExpertsSpec experts{
      .num_experts = read_one_of(reader, "num_local_experts", "num_experts", 256),
      .top_k = reader.size("num_experts_per_tok", kMaxExperts).value_or(8),
      .intermediate_size = reader.size("intermediate_size", kMaxWidth).value_or(1536),
      .score = RouterScore::kSigmoid,
      .choice_bias = true,
      .normalize = true};
  require_some_experts(reader, "num_local_experts", experts);
  require_enough_experts(reader, experts);
  for (LayerSpec& layer : config.layers) layer.mlp = experts;
  config.further_layers = reader.size("num_mtp_modules", kMaxLayers, 0).value_or(0);
}

}  // namespace

constinit const ModelFamily kMiniMaxM2{.architecture = "MiniMaxM2ForCausalLM",
                                       .model_type = "minimax_m2",
                                       .vocab_size = 200064,
                                       .hidden_size = 3072,
                                       .num_layers = 62,
                                       .num_qo_heads = 48,
                                       .num_kv_heads = 8,
                                       .head_dim = 128,
                                       .max_position_embeddings = 196608,
                                       .rotary_factor = 1.0,
                                       .rope_theta = 5e6,
                                       .bos_token_id = 200034,
                                       .eos_token_id = 200020,
                                       .stored_names = {.parts = kMiniMaxM2Names},
                                       .keys = kMiniMaxM2Keys,
                                       .build = build_minimax_m2};

}  // namespace oscar
