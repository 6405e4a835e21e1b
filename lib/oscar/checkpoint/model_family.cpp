// The list of families and the table of configuration keys.
#include "oscar/checkpoint/model_family.h"

#include <fmt/format.h>

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/checkpoint/families/families.h"

namespace oscar {
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
    {"num_nextn_predict_layers", "0", "layers that predict further tokens"},
};

template <typename List>
bool holds(const List& list, std::string_view key) {
  return std::find(std::begin(list), std::end(list), key) != std::end(list);
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
  for (const auto& item : config.items()) {
    const std::string& key = item.key();
    const Json& value = item.value();
    if (value.is_null() || holds(kRead, key) || holds(kInert, key)) continue;
    if (holds(family.keys, key)) continue;
    const auto refused = std::find_if(std::begin(kRefused), std::end(kRefused),
                                      [&](const RefusedKey& row) { return row.key == key; });
    if (refused == std::end(kRefused)) {
      throw Error({.what = "config.json has a key that this program does not know",
                   .where = source + ": " + key,
                   .found = value.dump(),
                   .hint = "if it does not change what the model computes, remove it from a copy "
                           "of the folder's config.json"});
    }
    if (value != Json::parse(refused->neutral)) {
      throw Error({.what = fmt::format("config.json asks for {}, which is not implemented for {}",
                                       refused->why, family.architecture),
                   .where = source + ": " + key,
                   .expected = refused->neutral == "null"
                                   ? std::string("nothing or null")
                                   : fmt::format("nothing, null or {}", refused->neutral),
                   .found = value.dump()});
    }
  }
}

}  // namespace oscar
