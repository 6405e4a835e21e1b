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
constexpr const ModelFamily* kFamilies[] = {&kQwen3,   &kQwen2,   &kQwen3Moe, &kLlama,
                                            &kMistral, &kGlm4Moe, &kGemma3};

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
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
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
                                const ModelFamily& family, const std::string& source) {
  if (value.is_null() || holds(kRead, key) || holds(kInert, key) || holds(family.keys, key)) {
    return std::nullopt;
  }
  const std::string where = source + ": " + key, found = value.dump();
  const auto* const row =
      std::find_if(std::begin(kRefused), std::end(kRefused),
                   [&](const RefusedKey& refused) { return refused.key == key; });
  if (row == std::end(kRefused)) {
    return BadKey{fmt::format("{}: {} (not known)", key, found),
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
  return BadKey{fmt::format("{}: {} ({})", key, found, row->why),
                {.what = fmt::format("config.json asks for {}, which is not implemented for {}",
                                     row->why, family.architecture),
                 .where = where,
                 .expected = neutral == "null" ? std::string("nothing or null")
                                               : fmt::format("nothing, null or {}", neutral),
                 .found = found}};
}

}  // namespace

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

void check_config_keys(const Json& config, const ModelFamily& family, const std::string& source) {
  std::vector<BadKey> bad;
  for (const auto& item : config.items()) {
    if (auto found = check_key(item.key(), item.value(), family, source)) {
      bad.push_back(std::move(*found));
    }
  }
  if (bad.empty()) return;
  if (bad.size() == 1) throw Error(std::move(bad.front().error));
  std::vector<std::string> summaries;
  for (const BadKey& key : bad) summaries.push_back(key.summary);
  throw Error(
      {.what = fmt::format("config.json has {} keys that are not known, or not implemented for {}",
                           bad.size(), family.architecture),
       .where = source,
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
