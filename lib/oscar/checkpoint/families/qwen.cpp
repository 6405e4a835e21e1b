// Qwen2 with biases on q, k and v, Qwen3 with norms on q and k; both may have sliding layers.
#include "oscar/checkpoint/families/families.h"

namespace oscar {
namespace {

constexpr std::string_view kQwen2Keys[] = {"use_sliding_window", "sliding_window",
                                           "max_window_layers"};
constexpr std::string_view kQwen3Keys[] = {"use_sliding_window", "sliding_window",
                                           "max_window_layers", "attention_bias"};

// layer_types, or the layers from max_window_layers on, where use_sliding_window is set.
std::vector<LayerSpec> with_windows(const ConfigReader& reader, std::vector<LayerSpec> layers) {
  constexpr int kDefaultWindow = 4096, kDefaultFirst = 28;
  const auto num_layers = static_cast<int>(layers.size());
  int window = read_window(reader, kDefaultWindow);
  if (!reader.flag("use_sliding_window", false)) window = 0;
  const int first = reader.size("max_window_layers", kMaxLength, 0).value_or(kDefaultFirst);
  const auto named = read_layer_types(reader, num_layers);
  for (int i = 0; i < num_layers; ++i) {
    const bool sliding =
        named.empty() ? window > 0 && i >= first : named[size_t(i)] == AttentionKind::kSliding;
    if (sliding && window == 0) {
      reader.refuse("sliding_window", "sliding layers have no window",
                    "use_sliding_window and a number of tokens");
    }
    layers[size_t(i)].attention.window = sliding ? window : 0;
  }
  return layers;
}

void build_qwen2(const ConfigReader& reader, ModelConfig& config) {
  config.layers = with_windows(reader, dense_layers(reader, config, {.qkv_bias = true}, 22016));
}

void build_qwen3(const ConfigReader& reader, ModelConfig& config) {
  const bool bias = reader.flag("attention_bias", false);
  const AttentionSpec attention{.qkv_bias = bias, .o_bias = bias, .qk_norm = true};
  config.layers = with_windows(reader, dense_layers(reader, config, attention, 22016));
}

}  // namespace

constinit const ModelFamily kQwen3{.architecture = "Qwen3ForCausalLM",
                                   .model_type = "qwen3",
                                   .vocab_size = 151936,
                                   .hidden_size = 4096,
                                   .num_layers = 32,
                                   .num_qo_heads = 32,
                                   .num_kv_heads = 32,
                                   .head_dim = 128,
                                   .max_position_embeddings = 32768,
                                   .keys = kQwen3Keys,
                                   .build = build_qwen3};

constinit const ModelFamily kQwen2{.architecture = "Qwen2ForCausalLM",
                                   .model_type = "qwen2",
                                   .vocab_size = 151936,
                                   .hidden_size = 4096,
                                   .num_layers = 32,
                                   .num_qo_heads = 32,
                                   .num_kv_heads = 32,
                                   .head_dim = std::nullopt,
                                   .max_position_embeddings = 32768,
                                   .keys = kQwen2Keys,
                                   .build = build_qwen2};

}  // namespace oscar
