// config.json to ModelConfig: every value checked, absent keys filled with the family's defaults.
#include "oscar/checkpoint/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "oscar/base/error.h"
#include "oscar/checkpoint/model_family.h"

namespace oscar {
namespace {

// Why a model that is not supported may never be, or the way to one that is.
const char* hint_for(const ConfigReader& reader) {
  if (reader.has("kv_lora_rank")) {
    return "latent attention (MLA) caches no keys and values of heads, which is what this toolkit "
           "quantizes";
  }
  if (reader.has("text_config")) {
    return "its text half may be supported as a model of its own: docs/models.md says how to save "
           "that of Gemma 3";
  }
  return "";
}

const ModelFamily& choose_family(const ConfigReader& reader) {
  const std::string model_type = reader.text("model_type", "");
  std::string architecture;
  if (reader.has("architectures")) {
    const Json& list = reader.json["architectures"];
    if (!list.is_array() || list.empty() || !list[0].is_string()) {
      reader.refuse("architectures", "not a list of names", "a list with one name");
    }
    architecture = list[0].get<std::string>();
  }
  const ModelFamily* family =
      architecture.empty() ? find_family_by_type(model_type) : find_family(architecture);
  if (family == nullptr) {
    throw Error({.what = "this architecture is not supported",
                 .where = reader.source,
                 .expected = fmt::format("{}", fmt::join(supported_architectures(), ", ")),
                 .found = architecture.empty() ? "model_type " + model_type : architecture,
                 .hint = hint_for(reader)});
  }
  if (!model_type.empty() && model_type != family->model_type) {
    reader.refuse("model_type", "model_type and architectures disagree",
                  std::string(family->model_type));
  }
  return *family;
}

void read_sizes(const ConfigReader& reader, const ModelFamily& family, ModelConfig& config) {
  config.num_layers = reader.size("num_hidden_layers", kMaxLayers).value_or(family.num_layers);
  config.hidden_size = reader.size("hidden_size", kMaxWidth).value_or(family.hidden_size);
  config.vocab_size = reader.size("vocab_size", kMaxVocab).value_or(family.vocab_size);
  config.num_qo_heads = reader.size("num_attention_heads", kMaxHeads).value_or(family.num_qo_heads);
  // An explicit null means "as many as query heads"; only an absent key takes the default.
  const bool null_heads = reader.json.contains("num_key_value_heads");
  config.num_kv_heads =
      reader.size("num_key_value_heads", kMaxHeads)
          .value_or(null_heads ? config.num_qo_heads
                               : family.num_kv_heads.value_or(config.num_qo_heads));
  if (config.num_qo_heads % config.num_kv_heads != 0) {
    reader.refuse("num_key_value_heads", "the query heads cannot be shared out evenly",
                  fmt::format("a divisor of {} query heads", config.num_qo_heads));
  }
  auto head_dim = reader.size("head_dim", kMaxHeadDim);
  if (!head_dim) head_dim = family.head_dim;
  if (!head_dim) {
    if (config.hidden_size % config.num_qo_heads != 0) {
      reader.refuse("hidden_size", "the width cannot be shared out among the query heads",
                    fmt::format("a multiple of {} heads, or head_dim", config.num_qo_heads));
    }
    head_dim = config.hidden_size / config.num_qo_heads;
  }
  config.head_dim = *head_dim;
  if (config.head_dim % 2 != 0 || config.head_dim > kMaxHeadDim) {
    reader.refuse("head_dim", "RoPE needs pairs of dimensions",
                  fmt::format("an even number up to {}", kMaxHeadDim));
  }
}

// 0 to below 1.
double read_epsilon(const ConfigReader& reader, double fallback) {
  if (!reader.has("rms_norm_eps")) return fallback;
  const Json& eps = reader.json["rms_norm_eps"];
  if (!eps.is_number() || !(eps.get<double>() >= 0.0 && eps.get<double>() < 1.0)) {
    reader.refuse("rms_norm_eps", "config.json has an impossible value", "0 to 1");
  }
  return eps.get<double>();
}

void read_numerics(const ConfigReader& reader, const ModelFamily& family, ModelConfig& config) {
  const std::string activation = reader.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    reader.refuse("hidden_act", "this activation is not implemented", "silu");
  }
  config.rms_norm_eps = read_epsilon(reader, family.rms_norm_eps);
  config.tie_word_embeddings = reader.flag("tie_word_embeddings", family.tie_word_embeddings);
  config.sm_scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
}

// rope_parameters, or of a family whose local layers have a RoPE of their own what it holds for
// layers of this type; null where there is none.
Json rope_parameters_of(const ConfigReader& reader, const ModelFamily& family,
                        const char* layer_type) {
  if (!reader.has("rope_parameters")) return nullptr;
  const Json& parameters = reader.json["rope_parameters"];
  if (!family.local_rope_theta || !parameters.is_object()) return parameters;
  for (const auto& [key, value] : parameters.items()) {
    if (key == kFullAttention || key == kSlidingAttention) continue;
    throw Error({.what = "the RoPE parameters are not sorted by type of layer",
                 .where = reader.source + ": rope_parameters",
                 .expected = fmt::format("{} and {}", kFullAttention, kSlidingAttention),
                 .found = key});
  }
  return parameters.contains(layer_type) ? parameters[layer_type] : Json();
}

// One dictionary in transformers 5's manner, whichever style the file is written in.
Json gather_rope(const ConfigReader& reader, const ModelFamily& family,
                 const std::optional<Json>& override_scaling) {
  Json parameters = Json::object();
  const Json written = rope_parameters_of(reader, family, kFullAttention);
  if (override_scaling) {
    parameters = *override_scaling;
  } else if (reader.has("rope_scaling") && !reader.json["rope_scaling"].empty()) {
    parameters = reader.json["rope_scaling"];  // transformers prefers it when both are there
  } else if (!written.is_null()) {
    parameters = written;
  }
  if (!parameters.is_object()) {
    throw Error({.what = "the RoPE parameters are not a JSON object",
                 .where = override_scaling ? "--rope-scaling" : reader.source,
                 .found = parameters.dump()});
  }
  const auto fill = [&](const char* key, const Json& value) {
    if (!parameters.contains(key) || parameters[key].is_null()) parameters[key] = value;
  };
  // An override rarely repeats what is no scaling: it stays the file's.
  if (override_scaling) {
    for (const char* key : {"rope_theta", "partial_rotary_factor"}) {
      if (written.is_object() && written.contains(key)) fill(key, written[key]);
    }
  }
  fill("rope_theta",
       reader.has("rope_theta") ? reader.json["rope_theta"] : Json(family.rope_theta));
  if (reader.has("partial_rotary_factor")) {
    fill("partial_rotary_factor", reader.json["partial_rotary_factor"]);
  }
  const char* const partial = "partial_rotary_factor";
  if (family.rotary_factor) {
    fill(partial, *family.rotary_factor);
  } else if (parameters.contains(partial) && !parameters[partial].is_null() &&
             parameters[partial] != 1.0) {
    throw Error(
        {.what = fmt::format("partial rotation is not implemented for {}", family.architecture),
         .where = fmt::format("{}: rope {}", reader.source, partial),
         .expected = "1",
         .found = parameters[partial].dump()});
  }
  if (reader.has("original_max_position_embeddings") && !override_scaling) {
    parameters["original_max_position_embeddings"] =
        reader.json["original_max_position_embeddings"];
  }
  return parameters;
}

// Of the local layers of a family that has them: not scaled, unless rope_parameters says so.
Json gather_local_rope(const ConfigReader& reader, const ModelFamily& family) {
  Json parameters = rope_parameters_of(reader, family, kSlidingAttention);
  if (parameters.is_null()) parameters = Json::object();
  const char* const old_key = "rope_local_base_freq";
  if (parameters.is_object() && !parameters.contains("rope_theta")) {
    parameters["rope_theta"] =
        reader.has(old_key) ? reader.json[old_key] : Json(*family.local_rope_theta);
  }
  return parameters;
}

void read_rope(const ConfigReader& reader, const ModelFamily& family,
               const std::optional<Json>& scaling, ModelConfig& config) {
  const int length =
      reader.size("max_position_embeddings", kMaxLength).value_or(family.max_position_embeddings);
  config.rope = make_rope(gather_rope(reader, family, scaling), config.head_dim, length,
                          scaling ? "--rope-scaling" : reader.source);
  if (family.length_is_scaled) {
    config.rope.max_positions = length;
    config.rope.as_run["max_positions"] = length;
  }
  if (!family.local_rope_theta) return;
  config.local_rope =
      make_rope(gather_local_rope(reader, family), config.head_dim, length, reader.source);
}

void read_tokens(const ConfigReader& reader, const ModelFamily& family, ModelConfig& config) {
  config.bos_token_id = reader.json.contains("bos_token_id")
                            ? reader.size("bos_token_id", kMaxVocab, 0)
                            : family.bos_token_id;
  if (reader.has("eos_token_id") && reader.json["eos_token_id"].is_array()) {
    for (const Json& id : reader.json["eos_token_id"]) {
      const Json one = {{"eos_token_id", id}};
      const auto value = ConfigReader{one, reader.source}.size("eos_token_id", kMaxVocab, 0);
      if (value) config.eos_token_ids.push_back(*value);
    }
  } else {
    const auto value = reader.json.contains("eos_token_id")
                           ? reader.size("eos_token_id", kMaxVocab, 0)
                           : family.eos_token_id;
    if (value) config.eos_token_ids.push_back(*value);
  }
}

}  // namespace

LayerGeometry ModelConfig::geometry(int layer, int recent_tokens) const {
  LayerGeometry geometry;
  geometry.layer_id = layer;
  const AttentionSpec& attention = this->layer(layer).attention;
  geometry.attention = attention.kind();
  geometry.sliding_window = attention.window;
  geometry.num_qo_heads = num_qo_heads;
  geometry.num_kv_heads = num_kv_heads;
  geometry.head_dim_k = geometry.head_dim_v = head_dim;
  geometry.quantized = geometry.quantized_beyond(recent_tokens);
  return geometry;
}

int ModelConfig::num_fitted_layers() const {
  return static_cast<int>(
      std::ranges::count_if(layers, [](const LayerSpec& layer) { return !layer.attention.local; }));
}

std::vector<std::vector<int>> ModelConfig::layers_by_spec() const {
  std::vector<std::vector<int>> groups;
  for (int i = 0; i < num_layers; ++i) {
    const auto same = std::ranges::find_if(
        groups, [&](const std::vector<int>& group) { return layer(group.front()) == layer(i); });
    if (same != groups.end()) {
      same->push_back(i);
    } else {
      groups.push_back({i});
    }
  }
  return groups;
}

ModelConfig parse_model_config(const Json& json, const std::string& source,
                               const std::optional<Json>& rope_scaling) {
  if (!json.is_object()) {
    throw Error({.what = "config.json is not a JSON object", .where = source});
  }
  const ConfigReader reader{json, source};
  const ModelFamily& family = choose_family(reader);
  check_config_keys(json, family, source);
  ModelConfig config;
  config.architecture = family.architecture;
  config.model_type = family.model_type;
  read_sizes(reader, family, config);
  read_numerics(reader, family, config);
  family.build(reader, config);
  read_rope(reader, family, rope_scaling, config);
  read_tokens(reader, family, config);
  config.fp8 = parse_quantization(json, source);
  config.raw = json;
  return config;
}

}  // namespace oscar
