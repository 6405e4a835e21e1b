// Llama 2 and 3.
#include "oscar/checkpoint/families/families.h"

namespace oscar {
namespace {

constexpr std::string_view kLlamaKeys[] = {"attention_bias", "mlp_bias"};

void build_llama(const ConfigReader& reader, ModelConfig& config) {
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  const bool bias = reader.flag("attention_bias", false);
  config.layers = dense_layers(reader, config, {.qkv_bias = bias, .o_bias = bias}, 11008,
                               reader.flag("mlp_bias", false));
}

}  // namespace

constinit const ModelFamily kLlama{.architecture = "LlamaForCausalLM",
                                   .model_type = "llama",
                                   .vocab_size = 32000,
                                   .hidden_size = 4096,
                                   .num_layers = 32,
                                   .num_qo_heads = 32,
                                   .num_kv_heads = std::nullopt,
                                   .head_dim = std::nullopt,
                                   .max_position_embeddings = 2048,
                                   .bos_token_id = 1,
                                   .eos_token_id = 2,
                                   .keys = kLlamaKeys,
                                   .build = build_llama};

}  // namespace oscar
