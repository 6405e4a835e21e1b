// A model in a GGUF file: its config and its weights.
#include "oscar/model/checkpoint/gguf_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/model/checkpoint/rope.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {

// The table of metadata keys, and how they become config.json's.

namespace {

struct Architecture {
  std::string_view name;   // general.architecture
  const char* model_type;  // of config.json
  const char* hf_name;     // of config.json
  bool paired_rows;        // rows of q and k were reordered for ggml's RoPE
  bool bias_key;           // whether q, k, v and o have biases is a matter of the tensors
};
constexpr Architecture kArchitectures[] = {
    {"llama", "llama", "LlamaForCausalLM", true, true},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", false, false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", false, true},
};

const Architecture& architecture_of(const GgufFile& file) {
  const std::string_view name = file.text("general.architecture").value_or("");
  for (const Architecture& row : kArchitectures) {
    if (row.name == name) return row;
  }
  throw Error({.what = "this architecture is not supported",
               .where = file.path().string() + ": general.architecture",
               .expected = "llama, qwen2 or qwen3",
               .found = name.empty() ? "nothing" : std::string(name)});
}

// Keys behind "ARCHITECTURE." that gguf_config reads, and those that change nothing.
constexpr std::string_view kReadKeys[] = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
};
constexpr std::string_view kInertKeys[] = {"vocab_size", "rope.scaling.finetuned",
                                           "tensor_data_layout"};

// Keys with the one value at which they have no effect.
struct NeutralKey {
  std::string_view key;
  double value;
  const char* what;
};
constexpr NeutralKey kNeutralKeys[] = {
    {"expert_count", 0, "a mixture of experts"},
    {"expert_used_count", 0, "a mixture of experts"},
    {"attention.sliding_window", 0, "a sliding window"},
    {"attention.causal", 1, "attention to later tokens"},
    {"use_parallel_residual", 0, "attention and MLP side by side"},
    {"logit_scale", 1, "a factor on the logits"},
    {"embedding_scale", 1, "a factor on the embeddings"},
    {"residual_scale", 1, "a factor on the residual stream"},
    {"attn_logit_softcapping", 0, "soft-capping of attention logits"},
    {"final_logit_softcapping", 0, "soft-capping of logits"},
    {"attention.clamp_kqv", 0, "clipping of q, k and v"},
    {"attention.max_alibi_bias", 0, "position biases instead of RoPE"},
    {"rope.scale_linear", 1, "an older form of RoPE scaling"},
    {"rope.scaling.yarn_ext_factor", 1, "a partial YaRN"},
};

// Values of one architecture's keys; every error names file and key.
struct Metadata {
  const GgufFile& file;
  std::string prefix;

  std::string key(std::string_view name) const { return prefix + std::string(name); }
  bool has(std::string_view name) const { return file.has(key(name)); }

  [[noreturn]] void refuse(std::string_view name, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const {
    throw Error({.what = what,
                 .where = file.path().string() + ": " + key(name),
                 .expected = expected,
                 .found = found});
  }

  int64_t integer(std::string_view name) const {
    const auto value = file.integer(key(name));
    if (!value) refuse(name, "a key of the model is missing", "an integer");
    return *value;
  }
};

void check_metadata_keys(const Metadata& metadata) {
  for (const std::string& key : metadata.file.keys()) {
    if (!key.starts_with(metadata.prefix)) continue;
    const std::string name = key.substr(metadata.prefix.size());
    if (std::ranges::find(kReadKeys, name) != std::end(kReadKeys) ||
        std::ranges::find(kInertKeys, name) != std::end(kInertKeys)) {
      continue;
    }
    const auto row = std::find_if(std::begin(kNeutralKeys), std::end(kNeutralKeys),
                                  [&](const NeutralKey& neutral) { return neutral.key == name; });
    if (row == std::end(kNeutralKeys)) {
      metadata.refuse(name, "the metadata has a key that this program does not know");
    }
    if (metadata.file.scalar(key) != row->value) {
      metadata.refuse(name,
                      fmt::format("the metadata asks for {}, which is not implemented", row->what));
    }
  }
}

void check_kind(const GgufFile& file) {
  const std::string_view kind = file.text("general.type").value_or("model");
  if (kind != "model") {
    throw Error({.what = "the GGUF file holds no model",
                 .where = file.path().string() + ": general.type",
                 .expected = "model",
                 .found = std::string(kind)});
  }
  if (file.integer("split.count").value_or(1) > 1) {
    throw Error({.what = "the model is split over several GGUF files",
                 .where = file.path().string() + ": split.count",
                 .hint = "join them with llama.cpp's llama-gguf-split --merge"});
  }
}

void add_sizes(const Metadata& metadata, Json& config) {
  const auto copy = [&](const char* to, const char* from) { config[to] = metadata.integer(from); };
  copy("num_hidden_layers", "block_count");
  copy("hidden_size", "embedding_length");
  copy("intermediate_size", "feed_forward_length");
  copy("num_attention_heads", "attention.head_count");
  copy("max_position_embeddings", "context_length");
  config["num_key_value_heads"] = metadata.has("attention.head_count_kv")
                                      ? metadata.integer("attention.head_count_kv")
                                      : metadata.integer("attention.head_count");
  const int64_t heads = std::max<int64_t>(metadata.integer("attention.head_count"), 1);
  const int64_t head_dim = metadata.has("attention.key_length")
                               ? metadata.integer("attention.key_length")
                               : metadata.integer("embedding_length") / heads;
  config["head_dim"] = head_dim;
  for (const char* name : {"attention.value_length", "rope.dimension_count"}) {
    if (metadata.has(name) && metadata.integer(name) != head_dim) {
      metadata.refuse(name, "heads of another size in part are not implemented",
                      std::to_string(head_dim), std::to_string(metadata.integer(name)));
    }
  }
  const auto embedding = metadata.file.tensors().find("token_embd.weight");
  if (embedding == metadata.file.tensors().end()) {
    throw Error({.what = "a tensor of the model is missing",
                 .where = metadata.file.path().string() + ": token_embd.weight"});
  }
  config["vocab_size"] = embedding->second.shape.front();
}

// The factors of rope_freqs.weight; empty without it.
std::vector<float> rope_factors(const GgufFile& file, int64_t head_dim) {
  const auto found = file.tensors().find(kGgufRopeFactors);
  if (found == file.tensors().end()) return {};
  const GgufTensor& tensor = found->second;
  if (tensor.shape != std::vector<int64_t>{head_dim / 2} || tensor.type->decode == nullptr ||
      tensor.type->block_values != 1) {
    throw Error({.what = "the factors of RoPE have another shape or type",
                 .where = file.path().string() + ": " + kGgufRopeFactors,
                 .expected = fmt::format("{} numbers of float32", head_dim / 2)});
  }
  std::vector<float> factors(static_cast<size_t>(head_dim / 2));
  decode_ggml(*tensor.type, tensor.data, head_dim / 2, factors.data());
  return factors;
}

// Whether `scaling` divides the plain frequencies by these factors, up to the rounding of float32
// arithmetic in the converter.
bool gives_factors(const Json& scaling, const Json& config, const std::string& where,
                   const std::vector<float>& factors) {
  constexpr double kTolerance = 1e-5;
  const auto rope_of = [&](Json parameters) {
    parameters["rope_theta"] = config["rope_theta"];
    return make_rope(parameters, config["head_dim"].get<int>(),
                     config["max_position_embeddings"].get<int>(), where);
  };
  const Rope plain = rope_of(Json::object()), scaled = rope_of(scaling);
  for (size_t i = 0; i < factors.size(); ++i) {
    const double factor = plain.inv_freq[i] / scaled.inv_freq[i];
    if (!(std::abs(factor - factors[i]) <= kTolerance * factor)) return false;
  }
  return true;
}

// Converters write Llama 3's scaling as factors, without the numbers that they come from; the
// published ones are tried.
Json factor_scaling(const Metadata& metadata, const Json& config,
                    const std::vector<float>& factors) {
  constexpr double kLow = 1, kHigh = 4;
  constexpr int64_t kOriginal = 8192;
  for (const float factor : factors) {
    if (!(factor > 0 && std::isfinite(factor))) {
      throw Error({.what = "a factor of RoPE is no positive number",
                   .where = metadata.file.path().string() + ": " + kGgufRopeFactors});
    }
  }
  const float largest = factors.empty() ? 1 : *std::max_element(factors.begin(), factors.end());
  const int64_t original = metadata.has("rope.scaling.original_context_length")
                               ? metadata.integer("rope.scaling.original_context_length")
                               : kOriginal;
  Json llama3 = {{"rope_type", "llama3"},
                 {"factor", largest},
                 {"low_freq_factor", kLow},
                 {"high_freq_factor", kHigh},
                 {"original_max_position_embeddings", original}};
  if (original > 0 && original < 1 << 30 && largest >= 1 && largest <= 1e6 &&
      gives_factors(llama3, config, metadata.file.path().string(), factors)) {
    return llama3;
  }
  return {{"rope_type", "freq_factors"}, {"freq_factors", factors}};
}

void add_rope(const Metadata& metadata, Json& config) {
  constexpr double kDefaultBase = 10000;
  config["rope_theta"] =
      metadata.file.number(metadata.key("rope.freq_base")).value_or(kDefaultBase);
  const int64_t head_dim = config["head_dim"].get<int64_t>();
  // Sizes that no RoPE has are left for parse_model_config to refuse.
  const bool sound = head_dim > 0 && head_dim % 2 == 0 && head_dim <= 1 << 16 &&
                     config["max_position_embeddings"].get<int64_t>() > 0 &&
                     config["max_position_embeddings"].get<int64_t>() < 1 << 30;
  const auto factors = sound ? rope_factors(metadata.file, head_dim) : std::vector<float>();
  const std::string type(metadata.file.text(metadata.key("rope.scaling.type"))
                             .value_or(metadata.has("rope.scaling.factor") ? "linear" : "none"));
  if (!factors.empty()) {
    if (type != "none" && type != "llama3") {
      metadata.refuse("rope.scaling.type", "RoPE is scaled in two ways", "none", type);
    }
    config["rope_scaling"] = factor_scaling(metadata, config, factors);
    return;
  }
  // llama.cpp multiplies cos and sin by it, whatever the scaling; config.json has it of YaRN.
  constexpr const char* kFactors[] = {"rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"};
  for (const char* name : kFactors) {
    if (type != "yarn" && metadata.file.number(metadata.key(name)).value_or(1) != 1) {
      metadata.refuse(name, "a factor of attention without YaRN is not implemented", "1");
    }
  }
  if (type == "none") return;
  if (type != "linear" && type != "yarn") {
    metadata.refuse("rope.scaling.type", "this RoPE scaling is not implemented",
                    "none, linear or yarn", type);
  }
  Json scaling = {{"rope_type", type}};
  const auto copy = [&](const char* to, const char* from) {
    if (const auto value = metadata.file.number(metadata.key(from))) scaling[to] = *value;
  };
  copy("factor", "rope.scaling.factor");
  if (type == "yarn") {
    copy("beta_fast", "rope.scaling.yarn_beta_fast");
    copy("beta_slow", "rope.scaling.yarn_beta_slow");
    for (const char* name : kFactors) copy("attn_factor", name);
    if (metadata.has("rope.scaling.original_context_length")) {
      scaling["original_max_position_embeddings"] =
          metadata.integer("rope.scaling.original_context_length");
    }
  }
  config["rope_scaling"] = scaling;
}

void add_tokens(const GgufFile& file, Json& config) {
  const auto bos = file.integer("tokenizer.ggml.bos_token_id");
  config["bos_token_id"] = bos ? Json(*bos) : Json();
  Json ends = Json::array();
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    const auto id = file.integer(key);
    if (id && std::find(ends.begin(), ends.end(), *id) == ends.end()) ends.push_back(*id);
  }
  config["eos_token_id"] = ends;
}

}  // namespace

bool is_gguf_rotation(std::string_view name) {
  return name.ends_with(kGgufKeyRotation) || name.ends_with(kGgufValueRotation);
}

bool has_paired_rows(const GgufFile& file) { return architecture_of(file).paired_rows; }

Json gguf_config(const GgufFile& file) {
  check_kind(file);
  const Architecture& architecture = architecture_of(file);
  const Metadata metadata{file, std::string(architecture.name) + "."};
  check_metadata_keys(metadata);
  Json config = {{"architectures", {architecture.hf_name}},
                 {"model_type", architecture.model_type}};
  add_sizes(metadata, config);
  const auto epsilon = file.number(metadata.key("attention.layer_norm_rms_epsilon"));
  if (!epsilon) {
    metadata.refuse("attention.layer_norm_rms_epsilon", "a key of the model is missing",
                    "a number");
  }
  config["rms_norm_eps"] = *epsilon;
  add_rope(metadata, config);
  const auto& tensors = file.tensors();
  config["tie_word_embeddings"] = !tensors.contains("output.weight");
  if (architecture.bias_key) config["attention_bias"] = tensors.contains("blk.0.attn_q.bias");
  if (tensors.contains("blk.0.ffn_gate.bias")) config["mlp_bias"] = true;
  add_tokens(file, config);
  return config;
}

// Names, the order of rows, and blocks to fp32.

namespace {

// Of types that hold plain numbers.
std::optional<Dtype> plain_dtype(const GgmlType& type) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    if (std::string(type.name) == dtype_name(dtype)) return dtype;
  }
  return std::nullopt;
}

int rotated_heads(WeightRole role, const ModelConfig& config) {
  using enum WeightRole;
  if (role == kQ || role == kQBias) return config.num_qo_heads;
  if (role == kK || role == kKBias) return config.num_kv_heads;
  return 0;
}

// Where row `row` lies: dimension half * d/2 + i of a head is stored as its row 2 i + half.
int64_t paired_row(int64_t row, int64_t head_dim) {
  const int64_t head = row / head_dim, dimension = row % head_dim;
  return head * head_dim + dimension % (head_dim / 2) * 2 + dimension / (head_dim / 2);
}

}  // namespace

GgufWeights::GgufWeights(std::shared_ptr<const GgufFile> file, const ModelConfig& config)
    : file_(std::move(file)) {
  const bool paired = has_paired_rows(*file_);
  std::map<std::string, WeightNames> by_gguf_name;
  for (WeightNames& names : weight_names(config.num_layers)) {
    by_gguf_name[names.gguf_name] = std::move(names);
  }
  for (const auto& [gguf_name, tensor] : file_->tensors()) {
    if (gguf_name == kGgufRopeFactors) continue;
    if (is_gguf_rotation(gguf_name)) {
      ++num_rotations_;
      continue;
    }
    const auto known = by_gguf_name.find(gguf_name);
    Entry entry{gguf_name, &tensor, 0};
    std::string name = gguf_name;
    if (known != by_gguf_name.end()) {
      name = known->second.name;
      if (paired) entry.paired_heads = rotated_heads(known->second.role, config);
    }
    if (!entries_.emplace(name, std::move(entry)).second) {
      throw Error({.what = "a tensor is there under two names",
                   .where = fmt::format("{}: {}", file_->path().string(), gguf_name),
                   .found = name});
    }
  }
}

bool GgufWeights::contains(const std::string& name) const { return entries_.contains(name); }

TensorView GgufWeights::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    throw Error({.what = "a tensor of the model is missing",
                 .where = fmt::format("{}: {}", file_->path().string(), name),
                 .expected = fmt::format("shape {}", shape)});
  }
  const Entry& entry = found->second;
  const GgufTensor& tensor = *entry.tensor;
  if (tensor.shape != shape) {
    throw Error({.what = "a tensor has another shape than the configuration asks for",
                 .where = place(name),
                 .expected = fmt::format("{}", shape),
                 .found = fmt::format("{}", tensor.shape)});
  }
  const auto plain = plain_dtype(*tensor.type);
  // Blocks of a vector hold several of its elements, which then can't be put into order.
  const bool vector_in_blocks = entry.paired_heads > 0 && shape.size() == 1 && !plain;
  if (tensor.type->decode == nullptr || vector_in_blocks) {
    throw Error({.what = "weights of this type cannot be loaded",
                 .where = place(name),
                 .expected = vector_in_blocks ? "F32, F16, BF16" : decodable_ggml_types(),
                 .found = tensor.type->name,
                 .hint = "take a file of the model in one of these types"});
  }
  TensorView view{.name = name, .shape = shape, .bytes = tensor.bytes};
  if (plain && entry.paired_heads == 0) {
    view.dtype = *plain;
    view.data = tensor.data;
  } else {
    view.dtype = Dtype::kFp32;
    view.decode = decoder(entry);
  }
  return view;
}

RowDecoder GgufWeights::decoder(const Entry& entry) const {
  const GgufTensor* tensor = entry.tensor;
  if (entry.paired_heads == 0) {
    return [tensor](int64_t first, int64_t count, float* out) {
      const int64_t values = tensor->shape.back();
      const int64_t blocks = values / tensor->type->block_values;
      const auto offset = static_cast<size_t>(first * blocks) * tensor->type->block_bytes;
      decode_ggml(*tensor->type, tensor->data + offset, count * values, out);
    };
  }
  // A vector is a single row for its reader, whose elements are reordered.
  const bool vector = tensor->shape.size() == 1;
  const int64_t rows = tensor->shape.front(), values = vector ? 1 : tensor->shape.back();
  const int64_t head_dim = rows / entry.paired_heads;
  const size_t row_bytes =
      static_cast<size_t>(values / tensor->type->block_values) * tensor->type->block_bytes;
  return [=](int64_t first, int64_t count, float* out) {
    const int64_t begin = vector ? 0 : first, end = vector ? rows : first + count;
    for (int64_t row = begin; row < end; ++row) {
      const auto source = static_cast<size_t>(paired_row(row, head_dim));
      decode_ggml(*tensor->type, tensor->data + source * row_bytes, values,
                  out + (row - begin) * values);
    }
  };
}

StoredBytes GgufWeights::stored_bytes(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return {};
  const GgufTensor& tensor = *found->second.tensor;
  return {&file_->file(), tensor.data, tensor.bytes};
}

std::vector<std::string> GgufWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

std::vector<std::filesystem::path> GgufWeights::shards() const { return {file_->path()}; }

std::string GgufWeights::place(const std::string& name) const {
  const auto found = entries_.find(name);
  const std::string& own = found == entries_.end() ? name : found->second.gguf_name;
  return fmt::format("{}: {}", file_->path().string(), own);
}

std::string GgufWeights::quantization() const {
  std::map<std::string, int> counts;
  for (const auto& [name, entry] : entries_) ++counts[entry.tensor->type->name];
  std::vector<std::pair<std::string, int>> order(counts.begin(), counts.end());
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (const auto& [type, count] : order) {
    text += text.empty() ? fmt::format("{} ({} tensors)", type, count)
                         : fmt::format(", {} ({})", type, count);
  }
  return text;
}

std::string GgufWeights::fingerprint(bool all_bytes) const {
  Sha256 digest;
  for (const auto& [name, tensor] : file_->tensors()) {
    if (is_gguf_rotation(name)) continue;
    add_to_fingerprint(digest, name, tensor.type->name, tensor.shape,
                       {&file_->file(), tensor.data, tensor.bytes}, all_bytes);
  }
  return digest.finish();
}

}  // namespace oscar
