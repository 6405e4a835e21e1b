// GLM-4.5 to 4.7: RoPE on a part of each head, dense layers first, then experts and a shared one.
#include <fmt/format.h>

#include "oscar/checkpoint/families/families.h"

namespace oscar {
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

ExpertsSpec read_experts(const ConfigReader& reader) {
  constexpr double kLargestScaling = 1e6;
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
  if (experts.num_experts == 0) {
    reader.refuse("n_routed_experts", "a layer of experts has none", "a positive number");
  }
  const int64_t shared = reader.size("n_shared_experts", kMaxExperts).value_or(1);
  if (shared * experts.intermediate_size > kMaxWidth) {
    reader.refuse("n_shared_experts", "config.json has an impossible value",
                  fmt::format("at most {} in all", kMaxWidth));
  }
  experts.shared_intermediate_size = static_cast<int>(shared * experts.intermediate_size);
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

}  // namespace oscar
