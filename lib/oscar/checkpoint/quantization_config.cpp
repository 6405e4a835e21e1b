// The keys of quantization_config, every one of them known or refused.
#include "oscar/checkpoint/quantization_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 22;

constexpr const char* kDequantize =
    "take the checkpoint in bf16 that this was made from, or one in FP8";

// Methods that are known by name, with how to get at plain weights.
struct Method {
  std::string_view name, what, way_out;
};
constexpr Method kRefusedMethods[] = {
    {"gptq", "GPTQ's integers", kDequantize},
    {"awq", "AWQ's integers", kDequantize},
    {"auto-round", "AutoRound's integers", kDequantize},
    {"intel/auto-round", "AutoRound's integers", kDequantize},
    {"aqlm", "AQLM's codebooks", kDequantize},
    {"bitnet", "BitNet's ternary weights", kDequantize},
    {"eetq", "EETQ's INT8", kDequantize},
    {"higgs", "HIGGS", kDequantize},
    {"spqr", "SpQR", kDequantize},
    {"vptq", "VPTQ's codebooks", kDequantize},
    {"quark", "Quark's formats", kDequantize},
    {"quanto", "Quanto's formats", kDequantize},
    {"bitsandbytes", "bitsandbytes' 4 or 8 bits",
     "write a copy in bf16 with transformers: model.dequantize(), then save_pretrained()"},
    {"hqq", "HQQ's integers", kDequantize},
    {"torchao", "torchao's formats", kDequantize},
    {"mxfp4", "MXFP4",
     "write a copy in bf16 with transformers: from_pretrained(..., "
     "quantization_config=Mxfp4Config(dequantize=True)), then save_pretrained()"},
    {"fbgemm_fp8", "FBGEMM's FP8", kDequantize},
    {"modelopt", "ModelOpt's FP8 or NVFP4", kDequantize},
    {"modelopt_fp4", "ModelOpt's NVFP4", kDequantize},
};

// Formats of compressed-tensors, likewise.
constexpr Method kRefusedFormats[] = {
    {"int-quantized", "INT8", kDequantize},
    {"pack-quantized", "packed integers", kDequantize},
    {"marlin-24", "packed integers", kDequantize},
    {"naive-quantized", "the naive format", kDequantize},
    {"nvfp4-pack-quantized", "NVFP4", kDequantize},
    {"mxfp4-pack-quantized", "MXFP4", kDequantize},
    {"mxfp6-pack-quantized", "MXFP6", kDequantize},
    {"mxfp8-quantized", "MXFP8", kDequantize},
    {"mixed-precision", "several formats in one checkpoint", kDequantize},
    {"sparse-bitmask", "sparse weights", kDequantize},
    {"sparse-24-bitmask", "sparse weights", kDequantize},
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
               .hint = std::string(known == last ? kDequantize : known->way_out)});
}

Fp8Layout parse_compressed(const Section& section) {
  section.check_keys({"quant_method", "format", "config_groups", "ignore", "kv_cache_scheme",
                      "quantization_status", "global_compression_ratio", "sparsity_config",
                      "transform_config", "version"});
  if (const std::string format = section.text("format"); format != "float-quantized") {
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
  if (!section.has("config_groups") || section.section("config_groups").json.empty()) {
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
  return *layout;
}

}  // namespace

std::string describe(const Fp8Layout& layout) {
  switch (layout.layout) {
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
  refuse_named(section, "quant_method", method, std::begin(kRefusedMethods),
               std::end(kRefusedMethods), "fp8 or compressed-tensors");
}

}  // namespace oscar
