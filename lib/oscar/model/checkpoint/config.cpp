// config.json to a ModelConfig: layers, heads, windows, experts, and how weights are quantized.
#include "oscar/model/checkpoint/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <iterator>

#include "oscar/base/error.h"
#include "oscar/model/checkpoint/families.h"
#include "oscar/model/checkpoint/text_half.h"

namespace oscar {

// Reading and refusing single values.

void ConfigReader::refuse(const std::string& key, const std::string& what,
                          const std::string& expected) const {
  throw Error({.what = what,
               .where = source + ": " + key,
               .expected = expected,
               .found = json.contains(key) ? json[key].dump() : "nothing"});
}

std::optional<int> ConfigReader::size(const std::string& key, int64_t max, int64_t min) const {
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

bool ConfigReader::flag(const std::string& key, bool fallback) const {
  if (!has(key)) return fallback;
  if (!json[key].is_boolean()) refuse(key, "not a boolean", "true or false");
  return json[key].get<bool>();
}

double ConfigReader::number(const std::string& key, double fallback, double low,
                            double high) const {
  if (!has(key)) return fallback;
  const Json& value = json[key];
  if (!value.is_number() || !(value.get<double>() >= low && value.get<double>() <= high)) {
    refuse(key, "config.json has an impossible value", fmt::format("{} to {}", low, high));
  }
  return value.get<double>();
}

std::string ConfigReader::text(const std::string& key, const std::string& fallback) const {
  if (!has(key)) return fallback;
  if (!json[key].is_string()) refuse(key, "not a name", "a name");
  return json[key].get<std::string>();
}

// The keys of quantization_config, every one of them known or refused.

namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 22;

constexpr const char* kDequantize =
    "take the checkpoint in bf16 that this was made from, or one in FP8";

// Methods that are known by name.
struct Method {
  std::string_view name, what;
};
constexpr Method kRefusedMethods[] = {
    {"gptq", "GPTQ's integers"},
    {"awq", "AWQ's integers"},
    {"auto-round", "AutoRound's integers"},
    {"intel/auto-round", "AutoRound's integers"},
    {"aqlm", "AQLM's codebooks"},
    {"bitnet", "BitNet's ternary weights"},
    {"eetq", "EETQ's INT8"},
    {"higgs", "HIGGS"},
    {"spqr", "SpQR"},
    {"vptq", "VPTQ's codebooks"},
    {"quark", "Quark's formats"},
    {"quanto", "Quanto's formats"},
    {"bitsandbytes", "bitsandbytes' 4 or 8 bits"},
    {"hqq", "HQQ's integers"},
    {"torchao", "torchao's formats"},
    {"mxfp4", "MXFP4"},
    {"fbgemm_fp8", "FBGEMM's FP8"},
    {"modelopt_fp4", "ModelOpt's NVFP4"},
};

// Formats of compressed-tensors, likewise.
constexpr Method kRefusedFormats[] = {
    {"int-quantized", "INT8"},
    {"pack-quantized", "packed integers"},
    {"marlin-24", "packed integers"},
    {"naive-quantized", "the naive format"},
    {"nvfp4-pack-quantized", "NVFP4"},
    {"mxfp4-pack-quantized", "MXFP4"},
    {"mxfp6-pack-quantized", "MXFP6"},
    {"mxfp8-quantized", "MXFP8"},
    {"mixed-precision", "several formats in one checkpoint"},
    {"sparse-bitmask", "sparse weights"},
    {"sparse-24-bitmask", "sparse weights"},
};

// Algorithms of ModelOpt, likewise.
constexpr Method kRefusedAlgorithms[] = {
    {"NVFP4", "NVFP4"},
    {"NVFP4_AWQ", "NVFP4"},
    {"W4A16_AWQ", "AWQ's integers"},
    {"W4A8_AWQ", "AWQ's integers"},
    {"INT8_SQ", "INT8"},
    {"FP8_PB_WO", "FP8 in blocks as ModelOpt writes it"},
    {"FP8_PER_CHANNEL_PER_TOKEN", "FP8 by channel as ModelOpt writes it"},
    {"MXFP8", "MXFP8"},
    {"MIXED_PRECISION", "several formats in one checkpoint"},
};

// A JSON object whose keys are all accounted for.
struct Section {
  const Json& json;
  std::string where;

  [[noreturn]] void refuse(const std::string& key, const std::string& what,
                           const std::string& expected,
                           const std::string& hint = kDequantize) const {
    throw Error({.what = what,
                 .where = where + "." + key,
                 .expected = expected,
                 .found = json.contains(key) ? json[key].dump() : "nothing",
                 .hint = hint});
  }

  bool has(const std::string& key) const { return json.contains(key) && !json[key].is_null(); }

  // Present, it must be one of these.
  void require(const std::string& key, std::initializer_list<Json> values) const {
    if (!has(key)) return;
    if (std::find(values.begin(), values.end(), json[key]) != values.end()) return;
    std::string expected;
    for (const Json& value : values) expected += (expected.empty() ? "" : " or ") + value.dump();
    refuse(key, "this quantization of weights is not implemented", expected);
  }

  std::string text(const std::string& key) const {
    if (!has(key)) return "";
    if (!json[key].is_string()) refuse(key, "not a name", "a name");
    return json[key].get<std::string>();
  }

  std::vector<std::string> names(const std::string& key) const {
    std::vector<std::string> list;
    if (!has(key)) return list;
    if (!json[key].is_array()) refuse(key, "not a list of names", "a list of names");
    for (const Json& name : json[key]) {
      if (!name.is_string()) refuse(key, "not a list of names", "a list of names");
      list.push_back(name.get<std::string>());
    }
    return list;
  }

  Section section(const std::string& key) const {
    if (!json[key].is_object()) refuse(key, "not a JSON object", "an object");
    return {json[key], where + "." + key};
  }

  // No key that nobody has read; null counts as absent.
  void check_keys(std::initializer_list<std::string_view> known) const {
    for (const auto& item : json.items()) {
      if (item.value().is_null()) continue;
      if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
      refuse(item.key(), "config.json has a key about quantized weights that is not known",
             fmt::format("{}", fmt::join(known, ", ")),
             "if it does not change the weights, remove it from a copy of the folder's "
             "config.json");
    }
  }
};

void read_block(const Section& section, const std::string& key, Fp8Layout& layout) {
  const Json& size = section.json[key];
  const auto fits = [](const Json& value) {
    if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{kMaxBlock}) return false;
    return value.is_number_integer() && value.get<int64_t>() >= 1 &&
           value.get<int64_t>() <= kMaxBlock;
  };
  if (!size.is_array() || size.size() != 2 || !fits(size[0]) || !fits(size[1])) {
    section.refuse(key, "not the rows and columns of a block", "[rows, columns]");
  }
  layout.layout = ScaleLayout::kBlock;
  layout.block_rows = size[0].get<int64_t>();
  layout.block_columns = size[1].get<int64_t>();
}

// As transformers, vLLM and AutoFP8 write it.
Fp8Layout parse_fp8(const Section& section) {
  section.check_keys({"quant_method", "fmt", "weight_block_size", "activation_scheme",
                      "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize",
                      "kv_cache_scheme"});
  section.require("fmt", {"e4m3", "float8_e4m3fn"});
  section.require("activation_scheme", {"dynamic", "static"});
  // How scales were rounded when they were made; stored ones are numbers either way.
  section.require("scale_fmt", {"float", "ue8m0"});
  section.require("dequantize", {false, true});  // when transformers loads it
  Fp8Layout layout{.scale_suffixes = {"_scale_inv", "_scale"}};
  if (section.has("weight_block_size")) read_block(section, "weight_block_size", layout);
  layout.left_out = section.names("modules_to_not_convert");
  for (std::string& name : section.names("ignored_layers")) {
    layout.left_out.push_back(std::move(name));
  }
  return layout;
}

// The weights of one group of compressed-tensors.
Fp8Layout parse_group(const Section& group) {
  group.check_keys({"targets", "weights", "input_activations", "output_activations", "format"});
  group.require("format", {"float-quantized"});
  group.names("targets");
  if (!group.has("weights")) {
    group.refuse("weights", "a group of modules has no quantized weights", "FP8 weights");
  }
  const Section weights = group.section("weights");
  weights.check_keys({"num_bits", "type", "symmetric", "strategy", "block_structure", "group_size",
                      "dynamic", "actorder", "observer", "observer_kwargs", "scale_dtype",
                      "zp_dtype"});
  if (weights.text("type") != "float") {
    weights.refuse("type", "weights of this type are not implemented", "\"float\"");
  }
  if (!weights.has("num_bits")) weights.refuse("num_bits", "the bits of weights are missing", "8");
  weights.require("num_bits", {8});
  weights.require("symmetric", {true});
  weights.require("dynamic", {false});
  weights.require("actorder", {false});
  if (weights.has("group_size")) {
    weights.refuse("group_size", "scales of groups in a row are not implemented", "null");
  }
  Fp8Layout layout{.scale_suffixes = {"_scale"}};
  const std::string strategy = weights.text("strategy");
  if (strategy == "channel") {
    layout.layout = ScaleLayout::kChannel;
  } else if (strategy == "block") {
    read_block(weights, "block_structure", layout);
  } else if (strategy != "tensor") {
    weights.refuse("strategy", "scales in this layout are not implemented",
                   "\"tensor\", \"channel\" or \"block\"");
  }
  return layout;
}

[[noreturn]] void refuse_named(const Section& section, const std::string& key,
                               const std::string& name, const Method* first, const Method* last,
                               const std::string& expected) {
  const auto* known =
      std::find_if(first, last, [&](const Method& method) { return method.name == name; });
  throw Error({.what = known == last
                           ? "this quantization of weights is not known"
                           : fmt::format("weights in {} are not implemented", known->what),
               .where = section.where + "." + key,
               .expected = expected,
               .found = name.empty() ? "nothing" : name,
               .hint = kDequantize});
}

// None: the cache alone has scales.
std::optional<Fp8Layout> parse_compressed(const Section& section) {
  section.check_keys({"quant_method", "format", "config_groups", "ignore", "kv_cache_scheme",
                      "quantization_status", "global_compression_ratio", "sparsity_config",
                      "transform_config", "version"});
  const bool no_groups =
      !section.has("config_groups") || section.section("config_groups").json.empty();
  const std::string format = section.text("format");
  if (format == "dense" && no_groups) return std::nullopt;
  if (format != "float-quantized") {
    refuse_named(section, "format", format, std::begin(kRefusedFormats), std::end(kRefusedFormats),
                 "float-quantized");
  }
  section.require("quantization_status", {"compressed"});
  // Rotations that a server has to undo, and zeros that are left out.
  for (const char* key : {"transform_config", "sparsity_config"}) {
    if (!section.has(key) || section.json[key].empty()) continue;
    const Section inner = section.section(key);
    const bool dense = std::string(key) == "sparsity_config" && inner.text("format") == "dense";
    if (!dense) section.refuse(key, "this is not implemented", "{} or null");
  }
  if (no_groups) {
    section.refuse("config_groups", "there is no group of quantized modules", "an object");
  }
  const Section groups = section.section("config_groups");
  std::optional<Fp8Layout> layout;
  for (const auto& item : groups.json.items()) {
    const Fp8Layout next = parse_group(groups.section(item.key()));
    if (layout && describe(*layout) != describe(next)) {
      groups.refuse(item.key(), "groups of modules have scales in several layouts",
                    describe(*layout));
    }
    layout = next;
  }
  layout->left_out = section.names("ignore");
  return layout;
}

// In one object, or in an inner one named "quantization". One scale a tensor is what its FP8 means.
// None: the cache alone has scales.
std::optional<Fp8Layout> parse_modelopt(const Section& section) {
  section.check_keys({"quant_method", "quantization", "quant_algo", "kv_cache_quant_algo",
                      "kv_cache_scheme", "ignore", "exclude_modules", "producer", "config_groups",
                      "group_size"});
  if (section.has("quantization")) return parse_modelopt(section.section("quantization"));
  const std::string algorithm = section.text("quant_algo");
  if (algorithm.empty() && (section.has("kv_cache_quant_algo") || section.has("kv_cache_scheme"))) {
    return std::nullopt;
  }
  if (algorithm != "FP8") {
    refuse_named(section, "quant_algo", algorithm, std::begin(kRefusedAlgorithms),
                 std::end(kRefusedAlgorithms), "FP8");
  }
  Fp8Layout layout{.scale_suffixes = {"_scale"}, .left_out = section.names("ignore")};
  for (std::string& name : section.names("exclude_modules")) {
    layout.left_out.push_back(std::move(name));
  }
  return layout;
}

}  // namespace

std::string describe(const Fp8Layout& layout) {
  switch (layout.layout) {
    case ScaleLayout::kNone:
      return "no scales of weights";
    case ScaleLayout::kTensor:
      return "a scale a tensor";
    case ScaleLayout::kChannel:
      return "a scale a channel";
    case ScaleLayout::kBlock:
      break;
  }
  return fmt::format("a scale for every {} x {}", layout.block_rows, layout.block_columns);
}

std::optional<Fp8Layout> parse_quantization(const Json& config, const std::string& source) {
  const Section whole{config, source};
  if (whole.has("quantization")) {
    throw Error({.what = "weights in MLX's integers are not implemented",
                 .where = source + ": quantization",
                 .found = config["quantization"].dump(),
                 .hint = kDequantize});
  }
  const bool older = whole.has("compression_config");
  const std::string key = older ? "compression_config" : "quantization_config";
  if (!whole.has(key)) return std::nullopt;
  if (older && whole.has("quantization_config")) {
    whole.refuse("quantization_config", "config.json describes quantized weights twice",
                 "compression_config or quantization_config");
  }
  Section section{config[key], source + ": " + key};
  if (!section.json.is_object()) {
    throw Error({.what = "not a JSON object", .where = section.where, .found = config[key].dump()});
  }
  const std::string method = section.text("quant_method");
  if (method == "fp8") return parse_fp8(section);
  if (method == "compressed-tensors") return parse_compressed(section);
  if (method == "modelopt") return parse_modelopt(section);
  refuse_named(section, "quant_method", method, std::begin(kRefusedMethods),
               std::end(kRefusedMethods), "fp8, compressed-tensors or modelopt");
}

// config.json to ModelConfig: every value checked, absent keys filled with the family's defaults.

namespace {

// The first of "architectures"; empty where the key is absent.
std::string read_architecture(const ConfigReader& reader) {
  if (!reader.has("architectures")) return "";
  const Json& list = reader.json["architectures"];
  if (!list.is_array() || list.empty() || !list[0].is_string()) {
    reader.refuse("architectures", "not a list of names", "a list with one name");
  }
  return list[0].get<std::string>();
}

const ModelFamily& choose_family(const ConfigReader& reader) {
  const std::string model_type = reader.text("model_type", "");
  const std::string architecture = read_architecture(reader);
  const ModelFamily* family =
      architecture.empty() ? find_family_by_type(model_type) : find_family(architecture);
  if (family == nullptr) {
    auto known = supported_architectures();
    std::ranges::copy(whole_architectures(), std::back_inserter(known));
    throw Error({.what = "this architecture is not supported",
                 .where = reader.source,
                 .expected = fmt::format("{}", fmt::join(known, ", ")),
                 .found = architecture.empty() ? "model_type " + model_type : architecture,
                 .hint = hint_for_unsupported(reader)});
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
  auto head_dim = reader.size("head_dim", kMaxConfigHeadDim);
  if (!head_dim) head_dim = family.head_dim;
  if (!head_dim) {
    if (config.hidden_size % config.num_qo_heads != 0) {
      reader.refuse("hidden_size", "the width cannot be shared out among the query heads",
                    fmt::format("a multiple of {} heads, or head_dim", config.num_qo_heads));
    }
    head_dim = config.hidden_size / config.num_qo_heads;
  }
  config.head_dim = *head_dim;
  if (config.head_dim % 2 != 0 || config.head_dim > kMaxConfigHeadDim) {
    reader.refuse("head_dim", "RoPE needs pairs of dimensions",
                  fmt::format("an even number up to {}", kMaxConfigHeadDim));
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
  for (const char* key : kNumericKeys) {
    if (reader.has(key)) config.numerics[key] = reader.json[key];
  }
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

// Puts rotary_dim, as MiniMax counts what turns of a head, into partial_rotary_factor's place.
void read_rotary_dim(const ConfigReader& reader, const ModelFamily& family, Json& parameters) {
  const char* const partial = "partial_rotary_factor";
  const auto head_dim = reader.size("head_dim", kMaxConfigHeadDim);
  const int width = head_dim ? *head_dim : family.head_dim.value_or(kMaxConfigHeadDim);
  const double share = static_cast<double>(*reader.size("rotary_dim", width)) / width;
  const bool stated = parameters.contains(partial) && !parameters[partial].is_null();
  if (stated && parameters[partial] != share) {
    reader.refuse("rotary_dim", "two keys disagree",
                  fmt::format("{} of {} dimensions", parameters[partial].dump(), width));
  }
  parameters[partial] = share;
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
  if (reader.has("rotary_dim")) read_rotary_dim(reader, family, parameters);
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

// What the file says of queries that grow with their position, whatever scaling is asked for.
std::optional<QueryScaling> read_query_scaling(const ConfigReader& reader) {
  constexpr double kLargestBeta = 1e3;
  const char* const section = reader.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (!reader.has(section) || !reader.json[section].is_object()) return std::nullopt;
  const ConfigReader parameters{reader.json[section], reader.source + ": " + section};
  if (!parameters.has("llama_4_scaling_beta")) return std::nullopt;
  const auto length = parameters.size("original_max_position_embeddings", kMaxLength);
  if (!length) {
    parameters.refuse("original_max_position_embeddings", "a RoPE parameter is missing",
                      "a number of positions");
  }
  return QueryScaling{parameters.number("llama_4_scaling_beta", 0.0, 0.0, kLargestBeta), *length};
}

// Dimensions of a head that RoPE turns; an impossible share is refused later (make_rope).
int turning_dims(const Json& parameters, const ModelConfig& config) {
  const char* const partial = "partial_rotary_factor";
  const bool stated = parameters.contains(partial) && parameters[partial].is_number();
  return static_cast<int>(config.head_dim * (stated ? parameters[partial].get<double>() : 1.0));
}

// Takes out the shares of dimensions that turn by each of a token's three positions: of text they
// are one position. They are refused where they do not make up all that turns.
void drop_axes(Json& parameters, int turning, const std::string& source) {
  const char* const key = "mrope_section";
  if (!parameters.contains(key)) return;
  int64_t sum = 0;
  for (const Json& share : parameters[key]) {
    const Json one = {{key, share}};
    sum += ConfigReader{one, source}.size(key, kMaxConfigHeadDim, 0).value_or(0);
  }
  if (sum != turning / 2) {
    throw Error({.what = "the axes of RoPE do not share out what turns of a head",
                 .where = fmt::format("{}: rope {}", source, key),
                 .expected = fmt::format("numbers whose sum is {}", turning / 2),
                 .found = parameters[key].dump()});
  }
  parameters.erase(key);
  parameters.erase("mrope_interleaved");
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
  Json parameters = gather_rope(reader, family, scaling);
  const std::string where = scaling ? "--rope-scaling" : reader.source;
  if (family.multi_axis_rope) drop_axes(parameters, turning_dims(parameters, config), where);
  if (family.scales_queries) {
    config.query_scaling = read_query_scaling(reader);
    for (const char* key : {"llama_4_scaling_beta", "max_position_embeddings"}) {
      parameters.erase(key);
    }
  }
  config.rope = make_rope(parameters, config.head_dim, length, where);
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
  geometry.attention = this->layer(layer).kind();
  geometry.sliding_window = attention.window;
  geometry.num_qo_heads = num_qo_heads;
  geometry.num_kv_heads = num_kv_heads;
  geometry.head_dim_k = geometry.head_dim_v = head_dim;
  geometry.quantized = geometry.quantized_beyond(recent_tokens);
  return geometry;
}

int ModelConfig::num_fitted_layers() const {
  return static_cast<int>(std::ranges::count_if(layers, [](const LayerSpec& layer) {
    return layer.kind() == AttentionKind::kFull || layer.kind() == AttentionKind::kSliding;
  }));
}

bool ModelConfig::has_output_gates() const {
  return std::ranges::any_of(layers, [](const LayerSpec& layer) { return layer.attention.gated; });
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

namespace {

ModelConfig parse_family(const ConfigReader& reader, const ModelFamily& family,
                         const std::optional<Json>& rope_scaling) {
  ModelConfig config;
  config.fp8 = parse_quantization(reader.json, reader.source);
  config.architecture = family.architecture;
  config.model_type = family.model_type;
  config.stored_names = family.stored_names;
  read_sizes(reader, family, config);
  read_numerics(reader, family, config);
  family.build(reader, config);
  read_rope(reader, family, rope_scaling, config);
  read_tokens(reader, family, config);
  return config;
}

ModelConfig parse_whole(const Json& json, const WholeModel& whole, const std::string& source,
                        const std::optional<Json>& rope_scaling) {
  const TextHalf text = read_text_half(json, whole, source);
  check_config_keys({text.beside, {text.config, source, "text_config."}}, text.family);
  ModelConfig config =
      parse_family({text.config, source + ": text_config"}, text.family, rope_scaling);
  config.architecture = whole.architecture;
  config.model_type = whole.model_type;
  config.stored_names.other_parts = whole.other_parts;
  config.tie_is_stated = text.tie_is_stated;
  return config;
}

}  // namespace

ModelConfig parse_model_config(const Json& json, const std::string& source,
                               const std::optional<Json>& rope_scaling) {
  if (!json.is_object()) {
    throw Error({.what = "config.json is not a JSON object", .where = source});
  }
  const ConfigReader reader{json, source};
  const WholeModel* whole =
      find_whole_model(read_architecture(reader), reader.text("model_type", ""));
  if (whole != nullptr) return parse_whole(json, *whole, source, rope_scaling);
  const ModelFamily& family = choose_family(reader);
  check_config_keys({{json, source, ""}}, family);
  return parse_family(reader, family, rope_scaling);
}

}  // namespace oscar
