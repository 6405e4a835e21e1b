// Tensors of one or many shards, found by name, and their fingerprint.
#include "oscar/io/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/io/safetensors_header.h"

namespace oscar {
namespace {

std::optional<Dtype> loadable(const std::string& dtype) {
  for (const Dtype candidate : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    if (dtype == dtype_name(candidate)) return candidate;
  }
  return std::nullopt;
}

// A shard must lie in the folder of its index: no path may lead elsewhere.
void check_shard_name(const std::string& shard, const std::string& index) {
  const std::filesystem::path path(shard);
  if (shard.empty() || path.filename() != path || shard == "." || shard == "..") {
    throw Error({.what = "a shard is not a plain file name", .where = index, .found = shard});
  }
}

// Tensor name -> shard file name, from the index.
std::map<std::string, std::string> read_index(const std::filesystem::path& path) {
  const std::string where = path.string();
  const Json index = read_json_file(path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    throw Error({.what = "the index has no weight_map", .where = where});
  }
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, shard] : index["weight_map"].items()) {
    if (!shard.is_string()) {
      throw Error({.what = "a shard is not a plain file name", .where = where + ": " + tensor});
    }
    check_shard_name(shard.get<std::string>(), where);
    shards[tensor] = shard.get<std::string>();
  }
  if (shards.empty()) throw Error({.what = "the index names no tensor", .where = where});
  return shards;
}

}  // namespace

struct SafetensorsWeights::Entry {
  TensorEntry tensor;
  std::shared_ptr<MappedFile> file;
  const std::byte* data() const { return file->data() + tensor.offset; }
};

SafetensorsWeights::SafetensorsWeights(const std::filesystem::path& folder) : folder_(folder) {
  const auto index_path = folder / "model.safetensors.index.json";
  const auto single_path = folder / "model.safetensors";
  const auto add_shard = [this](const std::filesystem::path& path) {
    files_.push_back(std::make_shared<MappedFile>(path));
    std::map<std::string, std::shared_ptr<Entry>> entries;
    for (TensorEntry& tensor : parse_safetensors_header(*files_.back())) {
      const std::string name = tensor.name;
      entries[name] = std::make_shared<Entry>(Entry{std::move(tensor), files_.back()});
    }
    return entries;
  };
  if (std::filesystem::exists(index_path)) {
    std::map<std::string, std::map<std::string, std::shared_ptr<Entry>>> shards;
    for (const auto& [tensor, shard] : read_index(index_path)) {
      if (!shards.contains(shard)) {
        // A name may be longer than the system takes.
        if (std::error_code status; !std::filesystem::exists(folder / shard, status)) {
          throw Error({.what = "a shard of the checkpoint is missing",
                       .where = (folder / shard).string(),
                       .hint = "the download may be incomplete; fetch the folder again"});
        }
        shards[shard] = add_shard(folder / shard);
      }
      const auto found = shards[shard].find(tensor);
      if (found == shards[shard].end()) {
        throw Error({.what = "the index names a tensor that its shard does not hold",
                     .where = fmt::format("{}: {}", (folder / shard).string(), tensor)});
      }
      entries_.insert(*found);
    }
    for (const auto& [shard, tensors] : shards) {
      for (const auto& [tensor, entry] : tensors) {
        if (entries_.contains(tensor)) continue;
        throw Error(
            {.what = "a shard holds a tensor that the index does not name",
             .where = fmt::format("{}: {}", (folder / shard).string(), tensor),
             .hint = "shards and index are of different downloads; fetch the folder again"});
      }
    }
  } else if (std::filesystem::exists(single_path)) {
    entries_ = add_shard(single_path);
  } else {
    throw Error({.what = "no weights were found",
                 .where = folder.string(),
                 .expected = "model.safetensors or model.safetensors.index.json",
                 .hint = "convert other formats with transformers' save_pretrained"});
  }
}

bool SafetensorsWeights::contains(const std::string& name) const { return entries_.contains(name); }

TensorView SafetensorsWeights::get(const std::string& name,
                                   const std::vector<int64_t>& shape) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    throw Error({.what = "a tensor of the model is missing",
                 .where = fmt::format("{}: {}", folder_.string(), name),
                 .expected = fmt::format("shape {}", shape)});
  }
  const Entry& entry = *found->second;
  const std::string where = place(name);
  if (entry.tensor.shape != shape) {
    throw Error({.what = "a tensor has another shape than the configuration asks for",
                 .where = where,
                 .expected = fmt::format("{}", shape),
                 .found = fmt::format("{}", entry.tensor.shape)});
  }
  const auto dtype = loadable(entry.tensor.dtype);
  if (!dtype) {
    throw Error({.what = "weights of this dtype cannot be loaded",
                 .where = where,
                 .expected = "BF16, F16 or F32",
                 .found = entry.tensor.dtype,
                 .hint = "docs/models.md says which quantized checkpoints are read; take the one "
                         "in bf16 that this was made from"});
  }
  return {.name = name,
          .dtype = *dtype,
          .shape = shape,
          .data = entry.data(),
          .bytes = entry.tensor.bytes};
}

StoredBytes SafetensorsWeights::stored_bytes(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return {};
  const Entry& entry = *found->second;
  return {entry.file.get(), entry.data(), entry.tensor.bytes};
}

std::vector<std::string> SafetensorsWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

std::vector<std::filesystem::path> SafetensorsWeights::shards() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : files_) paths.push_back(file->path());
  return paths;
}

SafetensorsWeights::Stored SafetensorsWeights::stored(const std::string& name) const {
  const Entry& entry = *entries_.at(name);
  return {entry.tensor.dtype, entry.tensor.shape, entry.data(), entry.tensor.bytes};
}

std::string SafetensorsWeights::place(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return name;
  return fmt::format("{}: {}", found->second->file->path().string(), name);
}

std::string SafetensorsWeights::fingerprint(bool all_bytes) const {
  Sha256 digest;
  for (const auto& [name, entry] : entries_) {
    const TensorEntry& tensor = entry->tensor;
    add_to_fingerprint(digest, name, tensor.dtype, tensor.shape, stored_bytes(name), all_bytes);
  }
  return digest.finish();
}

}  // namespace oscar
