// Names, the order of rows, and blocks to fp32.
#include "oscar/checkpoint/gguf_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/checkpoint/gguf_config.h"
#include "oscar/checkpoint/weight_table.h"

namespace oscar {
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
                 .hint = "quantize the model anew with llama.cpp's llama-quantize"});
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
    add_to_fingerprint(digest, name, tensor.type->name, tensor.shape,
                       {&file_->file(), tensor.data, tensor.bytes}, all_bytes);
  }
  return digest.finish();
}

}  // namespace oscar
