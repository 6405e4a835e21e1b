// What each family has of its own: names in its config and of its tensors.
#include "oscar/model/checkpoint/families.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {

// The list of families and the table of configuration keys.

namespace {

// In the order in which messages list them.
constexpr const ModelFamily* kFamilies[] = {
    &kQwen3,   &kQwen2, &kQwen3Moe, &kLlama,     &kMistral, &kMinistral3, &kGlm4Moe,  &kGemma3,
    &kSeedOss, &kPhi3,  &kHyV3,     &kMiniMaxM2, &kQwen3_5, &kQwen3_5Moe, &kQwen3Next};

// Read by parse_model_config for every family.
constexpr std::string_view kRead[] = {
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "layer_types",
    "partial_rotary_factor",
    "quantization",
    "quantization_config",
    "compression_config",
};

// Training, generation, storage and bookkeeping: the forward pass does not depend on these.
constexpr std::string_view kInert[] = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "custom_pipelines",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "ignore_keys_at_rope_validation",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "license",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "vocab_file",
};

// Keys that change the computation and are not implemented, each with the one value (as JSON) at
// which it has no effect. Null is always accepted; rows of keys that a family does read are skipped
// for it.
struct RefusedKey {
  std::string_view key, neutral, why;
};
constexpr RefusedKey kRefused[] = {
    {"attn_logit_softcapping", "null", "soft-capping of attention logits"},
    {"final_logit_softcapping", "null", "soft-capping of logits"},
    {"logit_softcapping", "null", "soft-capping of logits"},
    {"attn_logit_softcap", "null", "soft-capping of attention logits"},
    {"query_pre_attn_scalar", "null", "a softmax scale other than 1/sqrt(head_dim)"},
    {"attention_multiplier", "null", "a softmax scale other than 1/sqrt(head_dim)"},
    {"embedding_multiplier", "1.0", "a factor on the embeddings"},
    {"residual_multiplier", "1.0", "a factor on the residual stream"},
    {"logits_scaling", "1.0", "a factor on the logits"},
    {"logit_scale", "1.0", "a factor on the logits"},
    {"lm_head_multiplier", "1.0", "a factor on the logits"},
    {"scale_emb", "1.0", "a factor on the embeddings"},
    {"scale_depth", "1.0", "a factor on the residual stream"},
    {"attention_sinks", "false", "learned attention sinks"},
    {"use_sinks", "false", "learned attention sinks"},
    {"num_experts", "0", "a mixture of experts"},
    {"num_local_experts", "0", "a mixture of experts"},
    {"n_routed_experts", "0", "a mixture of experts"},
    {"shared_expert_intermediate_size", "0", "a shared expert that this family does not have"},
    {"use_qk_norm", "false", "norms on q and k that this family does not have"},
    {"qk_layernorm", "false", "norms on q and k that this family does not have"},
    {"clip_qkv", "null", "clipping of q, k and v"},
    {"kv_lora_rank", "null", "latent attention (MLA)"},
    {"alibi", "false", "position biases instead of RoPE"},
    {"use_bidirectional_attention", "false", "attention to later tokens"},
    {"use_mrope", "false", "multi-axis RoPE"},
    {"mrope_section", "null", "multi-axis RoPE"},
    {"rope_interleaved", "false", "RoPE on neighbouring dimensions"},
    {"no_rope_layers", "null", "layers without RoPE"},
    {"no_rope_layer_interval", "null", "layers without RoPE"},
    {"attention_chunk_size", "null", "chunked attention"},
    {"is_decoder", "false", "an encoder-decoder model"},
    {"is_encoder_decoder", "false", "an encoder-decoder model"},
    {"add_cross_attention", "false", "cross-attention"},
    {"cross_attention_hidden_size", "null", "cross-attention"},
    {"pruned_heads", "{}", "pruned heads"},
    {"use_sliding_window", "false", "a window switch that this family does not read"},
    {"sliding_window", "null", "a sliding window that this family does not have"},
    {"max_window_layers", "null", "sliding layers that this family does not have"},
    {"attention_bias", "false", "biases that this family does not have"},
    {"mlp_bias", "false", "biases that this family does not have"},
    {"qkv_bias", "false", "biases that this family does not have"},
    {"num_nextn_predict_layers", "0", "layers that predict further tokens"},
};

// Keys that say what a family does anyway, with what they must then say: fine-tunes and exporters
// carry them along.
struct StatedKey {
  const ModelFamily* family;
  std::string_view key, value;
};
constexpr StatedKey kStated[] = {{&kQwen3, "use_qk_norm", "true"},
                                 {&kQwen3Moe, "use_qk_norm", "true"},
                                 {&kQwen2, "qkv_bias", "true"}};

template <typename List>
bool holds(const List& list, std::string_view key) {
  return std::find(std::begin(list), std::end(list), key) != std::end(list);
}

// What is wrong with one key: how it reads among several, and the error where it is the only one.
struct BadKey {
  std::string summary;
  ErrorInfo error;
};

constexpr const char* kRemoveKey =
    "if it does not change what the model computes, remove it from a copy of the folder's "
    "config.json";

std::optional<BadKey> check_key(const std::string& key, const Json& value,
                                const ModelFamily& family, const ConfigKeys& config) {
  const bool read = holds(kRead, key) || holds(family.keys, key);
  if (value.is_null() || holds(kInert, key) || (read && config.of_text)) return std::nullopt;
  const std::string named = config.prefix + key, where = config.source + ": " + named;
  const std::string found = value.dump();
  if (read) {
    return BadKey{fmt::format("{}: {} (text_config does not say the same)", named, found),
                  {.what = "config.json has a key of its text half that text_config does not "
                           "confirm",
                   .where = where,
                   .expected = "the same key and value in text_config",
                   .found = found}};
  }
  const auto* const row =
      std::find_if(std::begin(kRefused), std::end(kRefused),
                   [&](const RefusedKey& refused) { return refused.key == key; });
  if (row == std::end(kRefused)) {
    return BadKey{fmt::format("{}: {} (not known)", named, found),
                  {.what = "config.json has a key that this program does not know",
                   .where = where,
                   .found = found,
                   .hint = kRemoveKey}};
  }
  const auto* const stated = std::find_if(
      std::begin(kStated), std::end(kStated),
      [&](const StatedKey& entry) { return entry.family == &family && entry.key == key; });
  const std::string_view neutral = stated == std::end(kStated) ? row->neutral : stated->value;
  if (value == Json::parse(neutral)) return std::nullopt;
  return BadKey{fmt::format("{}: {} ({})", named, found, row->why),
                {.what = fmt::format("config.json asks for {}, which is not implemented for {}",
                                     row->why, family.architecture),
                 .where = where,
                 .expected = neutral == "null" ? std::string("nothing or null")
                                               : fmt::format("nothing, null or {}", neutral),
                 .found = found}};
}

}  // namespace

const char* hint_for_unsupported(const ConfigReader& reader) {
  if (reader.has("kv_lora_rank")) {
    return "latent attention (MLA) caches no keys and values of heads, which is what this toolkit "
           "quantizes";
  }
  return "python -m oscar_int2 calibrate runs models of most other families in transformers";
}

const ModelFamily* find_family(std::string_view architecture) {
  for (const ModelFamily* family : kFamilies) {
    if (family->architecture == architecture) return family;
  }
  return nullptr;
}

const ModelFamily* find_family_by_type(std::string_view model_type) {
  for (const ModelFamily* family : kFamilies) {
    if (family->model_type == model_type) return family;
  }
  return nullptr;
}

std::vector<std::string_view> supported_architectures() {
  std::vector<std::string_view> names;
  for (const ModelFamily* family : kFamilies) names.push_back(family->architecture);
  return names;
}

void check_config_keys(const std::vector<ConfigKeys>& configs, const ModelFamily& family) {
  std::vector<BadKey> bad;
  for (const ConfigKeys& config : configs) {
    for (const auto& item : config.json.items()) {
      if (auto found = check_key(item.key(), item.value(), family, config)) {
        bad.push_back(std::move(*found));
      }
    }
  }
  if (bad.empty()) return;
  if (bad.size() == 1) throw Error(std::move(bad.front().error));
  std::vector<std::string> summaries;
  for (const BadKey& key : bad) summaries.push_back(key.summary);
  throw Error(
      {.what = fmt::format("config.json has {} keys that are not known, or not implemented for {}",
                           bad.size(), family.architecture),
       .where = configs.front().source,
       .found = fmt::format("{}", fmt::join(summaries, "; ")),
       .hint = "if one does not change what the model computes, remove it from a copy of "
               "the folder's config.json"});
}

// What several families read alike.

std::vector<LayerSpec> dense_layers(const ConfigReader& reader, const ModelConfig& config,
                                    const AttentionSpec& attention, int default_intermediate_size,
                                    bool mlp_bias) {
  const DenseSpec mlp{
      .intermediate_size =
          reader.size("intermediate_size", kMaxWidth).value_or(default_intermediate_size),
      .bias = mlp_bias};
  return {static_cast<size_t>(config.num_layers), LayerSpec{attention, mlp}};
}

int read_one_of(const ConfigReader& reader, const std::string& key, const std::string& other,
                int fallback) {
  const auto first = reader.size(key, kMaxExperts, 0), second = reader.size(other, kMaxExperts, 0);
  if (first && second && *first != *second) {
    reader.refuse(other, "two keys disagree", fmt::format("{} as of {}", *first, key));
  }
  return first ? *first : second.value_or(fallback);
}

void require_value(const ConfigReader& reader, const std::string& key, const Json& value,
                   const std::string& what) {
  if (reader.has(key) && reader.json[key] != value) reader.refuse(key, what, value.dump());
}

void require_enough_experts(const ConfigReader& reader, const ExpertsSpec& experts) {
  const int choices = experts.num_experts / experts.num_sets * experts.top_sets;
  if (experts.top_k > choices) {
    reader.refuse("num_experts_per_tok", "more experts are chosen than there are",
                  fmt::format("1 to {}", choices));
  }
}

int read_window(const ConfigReader& reader, int fallback) {
  return reader.size("sliding_window", kMaxLength)
      .value_or(reader.json.contains("sliding_window") ? 0 : fallback);
}

std::vector<AttentionKind> read_layer_types(const ConfigReader& reader, int num_layers) {
  std::vector<AttentionKind> kinds;
  if (!reader.has("layer_types")) return kinds;
  const Json& list = reader.json["layer_types"];
  if (!list.is_array() || list.size() != static_cast<size_t>(num_layers)) {
    reader.refuse("layer_types", "not one type per layer", fmt::format("{} names", num_layers));
  }
  for (const Json& name : list) {
    if (name != kFullAttention && name != kSlidingAttention) {
      throw Error({.what = "this layer type is not implemented",
                   .where = reader.source + ": layer_types",
                   .expected = "full_attention or sliding_attention",
                   .found = name.dump()});
    }
    kinds.push_back(name == kFullAttention ? AttentionKind::kFull : AttentionKind::kSliding);
  }
  return kinds;
}

void require_one_layer_type(const ConfigReader& reader, int num_layers, AttentionKind kind) {
  for (const AttentionKind named : read_layer_types(reader, num_layers)) {
    if (named == kind) continue;
    reader.refuse("layer_types", "this family does not mix layer types",
                  kind == AttentionKind::kSliding ? "sliding_attention in every layer"
                                                  : "full_attention in every layer");
  }
}

// Gemma 3, text: local layers with a short window and a RoPE of their own between global ones.

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

// Llama 2 and 3.

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

// Mistral: a sliding window in every layer, unless it is null.

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

// Ministral 3: Mistral whose queries grow with their position.

namespace {

void build_ministral3(const ConfigReader& reader, ModelConfig& config) {
  // transformers has parameters of its own where a file has none; no published one lacks them.
  if (!reader.has("rope_parameters") && !reader.has("rope_scaling")) {
    reader.refuse("rope_parameters", "a RoPE parameter is missing", "those of yarn");
  }
  const AttentionSpec attention{.window = read_window(reader, 0)};
  require_one_layer_type(reader, config.num_layers, attention.kind());
  config.layers = dense_layers(reader, config, attention, 14336);
}

}  // namespace

constinit const ModelFamily kMinistral3{.architecture = "Ministral3ForCausalLM",
                                        .model_type = "ministral3",
                                        .vocab_size = 131072,
                                        .hidden_size = 4096,
                                        .num_layers = 34,
                                        .num_qo_heads = 32,
                                        .num_kv_heads = 8,
                                        .head_dim = 128,
                                        .max_position_embeddings = 262144,
                                        .rms_norm_eps = 1e-5,
                                        .scales_queries = true,
                                        .bos_token_id = 1,
                                        .eos_token_id = 2,
                                        .keys = kMistralKeys,
                                        .build = build_ministral3};

// Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another.

namespace {

constexpr std::string_view kPhi3Keys[] = {"sliding_window"};

void build_phi3(const ConfigReader& reader, ModelConfig& config) {
  // transformers takes "yarn" and "su" of this family for longrope too.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!reader.has(key) || !reader.json[key].is_object()) continue;
    const Json& parameters = reader.json[key];
    const Json type = parameters.value("rope_type", parameters.value("type", Json("default")));
    if (type == "default") continue;
    reader.refuse(key, "longrope, whose frequencies depend on the length, is not implemented",
                  "RoPE of type default");
  }
  const AttentionSpec attention{.window = read_window(reader, 0)};
  require_one_layer_type(reader, config.num_layers, attention.kind());
  config.layers = dense_layers(reader, config, attention, 8192);
}

}  // namespace

constinit const ModelFamily kPhi3{.architecture = "Phi3ForCausalLM",
                                  .model_type = "phi3",
                                  .vocab_size = 32064,
                                  .hidden_size = 3072,
                                  .num_layers = 32,
                                  .num_qo_heads = 32,
                                  .num_kv_heads = std::nullopt,
                                  .head_dim = std::nullopt,
                                  .max_position_embeddings = 4096,
                                  .rms_norm_eps = 1e-5,
                                  .rotary_factor = 1.0,
                                  .bos_token_id = 1,
                                  .eos_token_id = 32000,
                                  .stored_names = {.fused = true},
                                  .keys = kPhi3Keys,
                                  .build = build_phi3};

// Seed-OSS: Llama with a bias on the output projection apart from those of q, k and v.

namespace {

constexpr std::string_view kSeedOssKeys[] = {"attention_bias", "attention_out_bias", "mlp_bias"};

void build_seed_oss(const ConfigReader& reader, ModelConfig& config) {
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  const AttentionSpec attention{.qkv_bias = reader.flag("attention_bias", true),
                                .o_bias = reader.flag("attention_out_bias", false)};
  config.layers = dense_layers(reader, config, attention, 27648, reader.flag("mlp_bias", false));
}

}  // namespace

constinit const ModelFamily kSeedOss{.architecture = "SeedOssForCausalLM",
                                     .model_type = "seed_oss",
                                     .vocab_size = 155136,
                                     .hidden_size = 4096,
                                     .num_layers = 64,
                                     .num_qo_heads = 80,
                                     .num_kv_heads = 8,
                                     .head_dim = 128,
                                     .max_position_embeddings = 524288,
                                     .bos_token_id = 0,
                                     .eos_token_id = 2,
                                     .keys = kSeedOssKeys,
                                     .build = build_seed_oss};

// Qwen2 with biases on q, k and v, Qwen3 with norms on q and k; both may have sliding layers.

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

// The text half of Qwen3-VL: Qwen3 without windows.

namespace {

constexpr std::string_view kQwen3VlKeys[] = {"attention_bias"};

void build_qwen3_vl(const ConfigReader& reader, ModelConfig& config) {
  require_one_layer_type(reader, config.num_layers, AttentionKind::kFull);
  const bool bias = reader.flag("attention_bias", false);
  config.layers =
      dense_layers(reader, config, {.qkv_bias = bias, .o_bias = bias, .qk_norm = true}, 22016);
}

}  // namespace

constinit const ModelFamily kQwen3Vl{.architecture = "Qwen3VLForConditionalGeneration",
                                     .model_type = "qwen3_vl_text",
                                     .vocab_size = 151936,
                                     .hidden_size = 4096,
                                     .num_layers = 32,
                                     .num_qo_heads = 32,
                                     .num_kv_heads = 32,
                                     .head_dim = 128,
                                     .max_position_embeddings = 128000,
                                     .rope_theta = 500000.0,
                                     .multi_axis_rope = true,
                                     .keys = kQwen3VlKeys,
                                     .build = build_qwen3_vl};

}  // namespace oscar
