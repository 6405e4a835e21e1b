// Layers and weights of folders, GGUF files and bundles, as plans of memory count them.
#include "oscar/bundle/cached_model.h"

#include <fmt/format.h>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// Bytes of weights, or none and why.
struct WeightBytes {
  std::optional<int64_t> bytes;
  std::string source;
};

// Weights by the sizes of their files.

constexpr const char* kMistralFile = "consolidated";  // the same weights in Mistral's own names

// "3" of "model-00001-of-00003"; 0 of other names.
size_t shards_by_name(const std::string& stem) {
  constexpr std::string_view kOf = "-of-";
  const size_t at = stem.rfind(kOf);
  size_t count = 0;
  if (at == std::string::npos) return 0;
  std::from_chars(stem.data() + at + kOf.size(), stem.data() + stem.size(), count);
  return count;
}

// Of a folder with neither model.safetensors nor an index: all of its files, Mistral's where there
// are no others.
std::vector<fs::path> unlisted_files(const fs::path& folder) {
  std::vector<fs::path> files, mistral;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const bool own = entry.path().filename().string().starts_with(kMistralFile);
    (own ? mistral : files).push_back(entry.path());
  }
  return files.empty() ? mistral : files;
}

// Throws Error for what no loader takes: a pointer of Git LFS, a file shorter or longer than its
// header says.
int64_t sound_bytes(const fs::path& file) {
  const MappedFile mapped(file);
  parse_safetensors_header(mapped);
  return static_cast<int64_t>(mapped.size());
}

// None where the folder has no such files: config.json is counted then.
std::optional<WeightBytes> stored_bytes(const fs::path& folder) {
  const auto is_missing = [](const fs::path& file) {
    std::error_code status;
    return !fs::is_regular_file(file, status);
  };
  std::vector<fs::path> files = weight_files(folder);
  const auto missing = static_cast<size_t>(std::ranges::count_if(files, is_missing));
  if (missing == files.size()) {
    files = unlisted_files(folder);
    if (files.empty()) return std::nullopt;
    const size_t expected = shards_by_name(files.front().stem().string());
    if (expected > files.size()) {
      return WeightBytes{{},
                         fmt::format("{} of {} shards are missing, by the names of the others",
                                     expected - files.size(), expected)};
    }
  } else if (missing > 0) {
    return WeightBytes{
        {},
        fmt::format("{} of the {} shards that the index names are missing, first {}", missing,
                    files.size(), std::ranges::find_if(files, is_missing)->filename().string())};
  }
  int64_t sum = 0;
  for (const fs::path& file : files) sum += sound_bytes(file);
  return WeightBytes{sum, "its safetensors files"};  // a few KiB of them are headers
}

// Weights by their shapes.

// Integers of AWQ and GPTQ: a 16-bit scale and a zero-point of `bits` for each group of a row's
// inputs. GPTQ also stores each input's group in 4 bytes.
struct PackedLayout {
  std::string name;
  int bits = 4;
  int64_t quant_group_size = -1;  // -1: a whole row
  bool has_group_index = false;
  std::vector<std::string> left_out = {};  // parts of names that stay in 16 bits

  double matrix_bytes(int64_t outputs, int64_t inputs) const {
    const int64_t size = quant_group_size < 1 ? inputs : quant_group_size;
    const double groups = static_cast<double>((inputs + size - 1) / size);
    const double row = static_cast<double>(inputs) * bits / 8 + groups * (2 + bits / 8.0);
    return static_cast<double>(outputs) * row +
           (has_group_index ? 4.0 * static_cast<double>(inputs) : 0);
  }
};

std::optional<int64_t> whole_number(const Json& section, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (section.contains(key) && section[key].is_number_integer()) {
      return section[key].get<int64_t>();
    }
  }
  return std::nullopt;
}

std::string method_of(const Json& section) {
  const Json method = section.is_object() ? section.value("quant_method", Json()) : Json();
  return method.is_string() ? method.get<std::string>() : "";
}

// None where the bits of some matrices are not told by these keys.
std::optional<PackedLayout> packed_layout(const Json& section) {
  const std::string method = method_of(section);
  if (method != "awq" && method != "gptq") return std::nullopt;
  const auto bits = whole_number(section, {"bits", "w_bit"});
  const auto size = whole_number(section, {"group_size", "q_group_size"});
  const bool known_bits = bits && (*bits == 2 || *bits == 3 || *bits == 4 || *bits == 8);
  if (!known_bits || !size || (*size != -1 && *size < 1)) return std::nullopt;
  for (const char* key : {"dynamic", "modules_in_block_to_quantize"}) {
    if (section.contains(key) && !section[key].empty()) return std::nullopt;
  }
  const Json head = section.value("lm_head", Json());
  if (head.is_boolean() && head.get<bool>()) return std::nullopt;
  PackedLayout layout{.name = method == "awq" ? "AWQ" : "GPTQ",
                      .bits = static_cast<int>(*bits),
                      .quant_group_size = *size,
                      .has_group_index = method == "gptq"};
  for (const Json& name : section.value("modules_to_not_convert", Json())) {
    if (name.is_string()) layout.left_out.push_back(name.get<std::string>());
  }
  return layout;
}

// Embedding, output matrix, norms and routers in 16 bits; the layers' matrices as they are
// quantized.
WeightBytes counted_bytes(const ModelConfig& config, const std::optional<PackedLayout>& packed) {
  double bytes = 0;
  const auto is_packed = [&](const WeightSpec& spec) {
    return packed && spec.shape.size() == 2 && spec.role != WeightRole::kRouter &&
           std::ranges::none_of(packed->left_out, [&](const std::string& part) {
             return spec.name.find(part) != std::string::npos;
           });
  };
  const auto add = [&](const std::vector<WeightSpec>& specs, bool layers) {
    for (const WeightSpec& spec : specs) {
      double product = layers && config.fp8 && spec.shape.size() == 2 ? 1 : 2;
      for (const int64_t extent : spec.shape) product *= static_cast<double>(extent);
      bytes +=
          layers && is_packed(spec) ? packed->matrix_bytes(spec.shape[0], spec.shape[1]) : product;
    }
  };
  add(model_weights(config), false);
  for (int layer = 0; layer < config.num_layers; ++layer) add(layer_weights(config, layer), true);
  std::string source = config.fp8 ? "by config.json, layers in FP8" : "by config.json, in BF16";
  if (packed) {
    source = fmt::format("by config.json, layers in {}'s {} bits", packed->name, packed->bits);
  }
  return {static_cast<int64_t>(bytes), source};
}

WeightBytes folder_bytes(const fs::path& folder, const Json& json, const ModelConfig& config) {
  if (const auto stored = stored_bytes(folder)) return *stored;
  const auto unread = unread_quantization(json, (folder / "config.json").string());
  const auto packed = unread ? packed_layout(*unread) : std::nullopt;
  if (!unread || packed) return counted_bytes(config, packed);
  constexpr size_t kLongestName = 32;
  const std::string method = method_of(*unread).substr(0, kLongestName);
  return {{},
          fmt::format("config.json does not tell the bits of its quantization ({})",
                      method.empty() ? "no quant_method" : method)};
}

void read_layers(const ModelConfig& config, CachedModel& m) {
  m.architecture = config.architecture;
  m.max_positions = config.rope.max_positions;
  m.quantizer.quant_group_size = config.head_dim;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    m.layers.push_back(config.geometry(layer, m.quantizer.recent_tokens));
    if (config.layer(layer).delta_net) m.linear_state = LinearState{*config.layer(layer).delta_net};
  }
}

// vLLM 0.26 holds the state in the dtype of the model, unless a whole model of Qwen3.5 says
// mamba_ssm_dtype (its models/config.py).
int recurrent_bytes(const Json& config) {
  const std::string source = "config.json";
  const bool asks =
      config.contains("text_config") &&
      ConfigReader{config["text_config"], source}.text("mamba_ssm_dtype", "") == "float32";
  return asks ? 4 : 2;
}

CachedModel from_folder(const fs::path& folder) {
  CachedModel m;
  m.name = fs::weakly_canonical(folder).filename().string();
  const Json json = read_config_json(folder);
  const ModelConfig config = read_model_config(folder);
  read_layers(config, m);
  if (m.linear_state) m.linear_state->recurrent_bytes = recurrent_bytes(json);
  const WeightBytes weights = folder_bytes(folder, json, config);
  m.weight_bytes = weights.bytes;
  m.weight_source = weights.source;
  return m;
}

CachedModel from_gguf(const fs::path& path) {
  CachedModel m;
  m.name = fs::weakly_canonical(path).stem().string();
  const ModelConfig config = read_model_config(path);
  read_layers(config, m);
  m.weight_bytes = counted_bytes(config, std::nullopt).bytes;
  m.weight_source = fmt::format("in BF16, as dequantize writes them; the file has {:.3g}",
                                static_cast<double>(fs::file_size(path)) / (int64_t{1} << 30));
  return m;
}

CachedModel from_bundle(const std::string& file) {
  const Bundle bundle = read_bundle(file);
  CachedModel m;
  m.name = bundle.model.name;
  m.architecture = bundle.model.architecture;
  m.quantizer = bundle.quantizer;
  m.weight_source = "a bundle does not know them";
  const auto served = bundle.model.rope.find("max_positions");
  if (served != bundle.model.rope.end() && served->is_number_integer()) {
    m.max_positions = std::max<int64_t>(0, served->get<int64_t>());
  }
  for (const auto& layer : bundle.layers) m.layers.push_back(layer.geometry);
  if (m.layers.empty()) {
    for (const auto& layer : bundle.statistics) m.layers.push_back(layer.geometry);
  }
  return m;
}

}  // namespace

CachedModel read_cached_model(const std::string& model) {
  std::error_code status;
  const bool is_bundle =
      fs::is_regular_file(model, status) && fs::path(model).extension() != ".gguf";
  if (is_bundle) return from_bundle(model);
  const fs::path path = find_model(model);
  return fs::is_directory(path) ? from_folder(path) : from_gguf(path);
}

}  // namespace oscar
