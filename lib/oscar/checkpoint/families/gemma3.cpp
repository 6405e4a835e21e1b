// Gemma 3, text: local layers with a short window and a RoPE of their own between global ones.
#include <cmath>

#include "oscar/checkpoint/families/families.h"

namespace oscar {
namespace {

constexpr std::string_view kGemma3Keys[] = {
    "attention_bias", "hidden_activation",      "query_pre_attn_scalar",  "rope_local_base_freq",
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern"};

// layer_types, or every layer but the last of each `sliding_window_pattern`.
std::vector<bool> read_local_layers(const ConfigReader& reader, int num_layers) {
  constexpr int kDefaultPattern = 6;
  const auto named = read_layer_types(reader, num_layers);
  const int pattern =
      read_one_of(reader, "sliding_window_pattern", "_sliding_window_pattern", kDefaultPattern);
  if (pattern == 0) {
    reader.refuse("sliding_window_pattern", "config.json has an impossible value",
                  "1 or more layers");
  }
  std::vector<bool> local;
  for (int i = 0; i < num_layers; ++i) {
    local.push_back(named.empty() ? (i + 1) % pattern != 0
                                  : named[size_t(i)] == AttentionKind::kSliding);
  }
  return local;
}

void build_gemma3(const ConfigReader& reader, ModelConfig& config) {
  constexpr double kLargestScalar = 1e6;
  const std::string activation = reader.text("hidden_activation", "gelu_pytorch_tanh");
  if (activation != "gelu_pytorch_tanh") {
    reader.refuse("hidden_activation", "this activation is not implemented", "gelu_pytorch_tanh");
  }
  const bool bias = reader.flag("attention_bias", false);
  config.layers =
      dense_layers(reader, config, {.qkv_bias = bias, .o_bias = bias, .qk_norm = true}, 9216);
  const std::vector<bool> local = read_local_layers(reader, config.num_layers);
  const int window = read_window(reader, 4096);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    LayerSpec& layer = config.layers[i];
    layer.output_norms = true;
    std::get<DenseSpec>(layer.mlp).activation = Activation::kGeluTanh;
    if (!local[i]) continue;
    if (window == 0) {
      reader.refuse("sliding_window", "local layers have no window", "a number of tokens");
    }
    layer.attention.local = true;
    layer.attention.window = window;
  }
  if (config.num_fitted_layers() == 0) {
    reader.refuse("layer_types", "no layer attends to all tokens: there is nothing to quantize",
                  "full_attention in some layers");
  }
  config.norm_offset = 1;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  config.sm_scale =
      1 / std::sqrt(reader.number("query_pre_attn_scalar", 256, 1e-6, kLargestScalar));
}

}  // namespace

constinit const ModelFamily kGemma3{.architecture = "Gemma3ForCausalLM",
                                    .model_type = "gemma3_text",
                                    .vocab_size = 262208,
                                    .hidden_size = 2304,
                                    .num_layers = 26,
                                    .num_qo_heads = 8,
                                    .num_kv_heads = 4,
                                    .head_dim = 256,
                                    .max_position_embeddings = 131072,
                                    .rope_theta = 1e6,
                                    .local_rope_theta = 1e4,
                                    .length_is_scaled = true,
                                    .tie_word_embeddings = true,
                                    .bos_token_id = 2,
                                    .eos_token_id = 1,
                                    .keys = kGemma3Keys,
                                    .build = build_gemma3};

}  // namespace oscar
