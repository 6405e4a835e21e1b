// Qwen3-MoE: Qwen3's attention, and experts in some layers or in all.
#include <algorithm>
#include <vector>

#include "oscar/checkpoint/families/families.h"

namespace oscar {
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

  const ExpertsSpec experts{
      .num_experts = read_one_of(reader, "num_experts", "num_local_experts", 128),
      .top_k = reader.size("num_experts_per_tok", kMaxExperts).value_or(8),
      .intermediate_size = reader.size("moe_intermediate_size", kMaxWidth).value_or(768),
      .score = RouterScore::kSoftmax,
      .normalize = reader.flag("norm_topk_prob", false)};
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

}  // namespace oscar
