// Mistral: a sliding window in every layer, unless it is null.
#include "oscar/checkpoint/families/families.h"

namespace oscar {
namespace {

constexpr std::string_view kMistralKeys[] = {"sliding_window"};

void build_mistral(const ConfigReader& reader, ModelConfig& config) {
  const AttentionSpec attention{.window = read_window(reader, 4096)};
  require_one_layer_type(reader, config.num_layers, attention.kind());
  config.layers = dense_layers(reader, config, attention, 14336);
}

}  // namespace

constinit const ModelFamily kMistral{.architecture = "MistralForCausalLM",
                                     .model_type = "mistral",
                                     .vocab_size = 32000,
                                     .hidden_size = 4096,
                                     .num_layers = 32,
                                     .num_qo_heads = 32,
                                     .num_kv_heads = 8,
                                     .head_dim = std::nullopt,
                                     .max_position_embeddings = 131072,
                                     .bos_token_id = 1,
                                     .eos_token_id = 2,
                                     .keys = kMistralKeys,
                                     .build = build_mistral};

}  // namespace oscar
