// config.json to ModelConfig: every value checked, absent keys filled with the family's defaults.
#include "oscar/checkpoint/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/checkpoint/model_family.h"

namespace oscar {
namespace {

// Bounds that no real model comes near; they keep products of sizes inside 64 bits.
constexpr int64_t kMaxLayers = 4096, kMaxHeads = 8192, kMaxHeadDim = 4096;
constexpr int64_t kMaxWidth = int64_t{1} << 22, kMaxVocab = int64_t{1} << 26;
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr double kDefaultTheta = 10000.0;

struct Reader {
  const Json& json;
  const std::string& source;

  [[noreturn]] void refuse(const std::string& key, const std::string& what,
                           const std::string& expected) const {
    throw Error({.what = what,
                 .where = source + ": " + key,
                 .expected = expected,
                 .found = json.contains(key) ? json[key].dump() : "nothing"});
  }

  // Present and not null.
  bool has(const std::string& key) const { return json.contains(key) && !json[key].is_null(); }

  std::optional<int> size(const std::string& key, int64_t max, int64_t min = 1) const {
    if (!has(key)) return std::nullopt;
    const Json& value = json[key];
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(max)) &&
                      value.get<int64_t>() >= min && value.get<int64_t>() <= max;
    if (!fits) {
      refuse(key, "config.json has an impossible value", fmt::format("{} to {}", min, max));
    }
    return value.get<int>();
  }

  bool flag(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!json[key].is_boolean()) refuse(key, "not a boolean", "true or false");
    return json[key].get<bool>();
  }

  std::string text(const std::string& key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    if (!json[key].is_string()) refuse(key, "not a name", "a name");
    return json[key].get<std::string>();
  }
};

const ModelFamily& choose_family(const Reader& reader) {
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
                 .found = architecture.empty() ? "model_type " + model_type : architecture});
  }
  if (!model_type.empty() && model_type != family->model_type) {
    reader.refuse("model_type", "model_type and architectures disagree",
                  std::string(family->model_type));
  }
  return *family;
}

void read_sizes(const Reader& reader, const ModelFamily& family, ModelConfig& config) {
  config.num_layers = reader.size("num_hidden_layers", kMaxLayers).value_or(family.num_layers);
  config.hidden_size = reader.size("hidden_size", kMaxWidth).value_or(family.hidden_size);
  config.intermediate_size =
      reader.size("intermediate_size", kMaxWidth).value_or(family.intermediate_size);
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

void read_numerics(const Reader& reader, const ModelFamily& family, ModelConfig& config) {
  const std::string activation = reader.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    reader.refuse("hidden_act", "this activation is not implemented", "silu");
  }
  if (reader.has("rms_norm_eps")) {
    const Json& eps = reader.json["rms_norm_eps"];
    if (!eps.is_number() || !(eps.get<double>() >= 0.0 && eps.get<double>() < 1.0)) {
      reader.refuse("rms_norm_eps", "config.json has an impossible value", "0 to 1");
    }
    config.rms_norm_eps = eps.get<double>();
  }
  config.tie_word_embeddings = reader.flag("tie_word_embeddings", false);
  config.qk_norm = family.qk_norm;
  const bool by_key =
      family.attention_bias == AttentionBias::kByKey && reader.flag("attention_bias", false);
  config.qkv_bias = by_key || family.attention_bias == AttentionBias::kQkv;
  config.o_bias = by_key;
  config.mlp_bias = family.mlp_bias_key && reader.flag("mlp_bias", false);
}

// The kind of every layer from layer_types; empty when the key is absent.
std::vector<AttentionKind> read_layer_types(const Reader& reader, int num_layers) {
  std::vector<AttentionKind> kinds;
  if (!reader.has("layer_types")) return kinds;
  const Json& list = reader.json["layer_types"];
  if (!list.is_array() || list.size() != static_cast<size_t>(num_layers)) {
    reader.refuse("layer_types", "not one type per layer", fmt::format("{} names", num_layers));
  }
  for (const Json& name : list) {
    if (name != "full_attention" && name != "sliding_attention") {
      throw Error({.what = "this layer type is not implemented",
                   .where = reader.source + ": layer_types",
                   .expected = "full_attention or sliding_attention",
                   .found = name.dump()});
    }
    kinds.push_back(name == "full_attention" ? AttentionKind::kFull : AttentionKind::kSliding);
  }
  return kinds;
}

void read_windows(const Reader& reader, const ModelFamily& family, ModelConfig& config) {
  constexpr int kDefaultWindow = 4096, kDefaultFirstWindowLayer = 28;
  const auto layers = static_cast<size_t>(config.num_layers);
  std::vector<AttentionKind> chosen(layers, AttentionKind::kFull);
  int window = 0;
  if (family.window_rule != WindowRule::kNone) {
    window = reader.size("sliding_window", kMaxLength)
                 .value_or(reader.json.contains("sliding_window") ? 0 : kDefaultWindow);
  }
  if (family.window_rule == WindowRule::kByFlag) {
    if (!reader.flag("use_sliding_window", false)) window = 0;
    const int first =
        reader.size("max_window_layers", kMaxLength, 0).value_or(kDefaultFirstWindowLayer);
    for (size_t i = 0; i < layers; ++i) {
      if (window > 0 && i >= size_t(first)) chosen[i] = AttentionKind::kSliding;
    }
  } else if (window > 0) {
    chosen.assign(layers, AttentionKind::kSliding);
  }
  const auto named = read_layer_types(reader, config.num_layers);
  if (!named.empty() && family.window_rule == WindowRule::kByFlag) {
    chosen = named;
  } else if (!named.empty() && named != chosen) {
    reader.refuse(
        "layer_types", "this family does not mix layer types",
        window > 0 ? "sliding_attention in every layer" : "full_attention in every layer");
  }
  const bool sliding =
      std::find(chosen.begin(), chosen.end(), AttentionKind::kSliding) != chosen.end();
  if (sliding && window == 0) {
    reader.refuse("sliding_window", "sliding layers have no window",
                  "use_sliding_window and a number of tokens");
  }
  config.sliding_window = sliding ? window : 0;
  config.layer_attention = std::move(chosen);
}

// One dictionary in transformers 5's manner, whichever style the file is written in.
Json gather_rope(const Reader& reader, const std::optional<Json>& override_scaling) {
  Json parameters = Json::object();
  if (override_scaling) {
    parameters = *override_scaling;
  } else if (reader.has("rope_scaling") && !reader.json["rope_scaling"].empty()) {
    parameters = reader.json["rope_scaling"];  // transformers prefers it when both are there
  } else if (reader.has("rope_parameters")) {
    parameters = reader.json["rope_parameters"];
  }
  if (!parameters.is_object()) {
    throw Error({.what = "the RoPE parameters are not a JSON object",
                 .where = override_scaling ? "--rope-scaling" : reader.source,
                 .found = parameters.dump()});
  }
  const auto fill = [&](const char* key, const Json& value) {
    if (!parameters.contains(key) || parameters[key].is_null()) parameters[key] = value;
  };
  // An override rarely repeats the base frequency: it stays the file's.
  if (override_scaling && reader.has("rope_parameters")) {
    const Json& written = reader.json["rope_parameters"];
    if (written.is_object() && written.contains("rope_theta")) {
      fill("rope_theta", written["rope_theta"]);
    }
  }
  fill("rope_theta", reader.has("rope_theta") ? reader.json["rope_theta"] : Json(kDefaultTheta));
  if (reader.has("partial_rotary_factor")) {
    fill("partial_rotary_factor", reader.json["partial_rotary_factor"]);
  }
  if (reader.has("original_max_position_embeddings") && !override_scaling) {
    parameters["original_max_position_embeddings"] =
        reader.json["original_max_position_embeddings"];
  }
  return parameters;
}

void read_tokens(const Reader& reader, const ModelFamily& family, ModelConfig& config) {
  config.bos_token_id = reader.json.contains("bos_token_id")
                            ? reader.size("bos_token_id", kMaxVocab, 0)
                            : family.bos_token_id;
  if (reader.has("eos_token_id") && reader.json["eos_token_id"].is_array()) {
    for (const Json& id : reader.json["eos_token_id"]) {
      const Json one = {{"eos_token_id", id}};
      const auto value = Reader{one, reader.source}.size("eos_token_id", kMaxVocab, 0);
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
  geometry.attention = layer_attention.at(static_cast<size_t>(layer));
  const bool sliding = geometry.attention == AttentionKind::kSliding;
  geometry.sliding_window = sliding ? sliding_window : 0;
  geometry.num_qo_heads = num_qo_heads;
  geometry.num_kv_heads = num_kv_heads;
  geometry.head_dim_k = geometry.head_dim_v = head_dim;
  geometry.quantized = !sliding || sliding_window > recent_tokens;
  return geometry;
}

ModelConfig parse_model_config(const Json& json, const std::string& source,
                               const std::optional<Json>& rope_scaling) {
  if (!json.is_object()) {
    throw Error({.what = "config.json is not a JSON object", .where = source});
  }
  const Reader reader{json, source};
  const ModelFamily& family = choose_family(reader);
  check_config_keys(json, family, source);
  ModelConfig config;
  config.architecture = family.architecture;
  config.model_type = family.model_type;
  read_sizes(reader, family, config);
  read_numerics(reader, family, config);
  read_windows(reader, family, config);
  const int length =
      reader.size("max_position_embeddings", kMaxLength).value_or(family.max_position_embeddings);
  config.rope = make_rope(gather_rope(reader, rope_scaling), config.head_dim, length,
                          rope_scaling ? "--rope-scaling" : source);
  read_tokens(reader, family, config);
  config.raw = json;
  return config;
}

}  // namespace oscar
