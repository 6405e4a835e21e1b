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

constexpr size_t kFingerprintBytes = 4096;  // at each end of a tensor

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

size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "BF16";
    case Dtype::kFp16:
      return "F16";
    case Dtype::kFp32:
      return "F32";
  }
  return "";
}

struct WeightStore::Entry {
  TensorEntry tensor;
  std::shared_ptr<MappedFile> file;
  const std::byte* data() const { return file->data() + tensor.offset; }
};

WeightStore WeightStore::open(const std::filesystem::path& folder) {
  WeightStore store;
  store.folder_ = folder;
  const auto index_path = folder / "model.safetensors.index.json";
  const auto single_path = folder / "model.safetensors";
  const auto add_shard = [&store](const std::filesystem::path& path) {
    store.files_.push_back(std::make_shared<MappedFile>(path));
    std::map<std::string, std::shared_ptr<Entry>> entries;
    for (TensorEntry& tensor : parse_safetensors_header(*store.files_.back())) {
      const std::string name = tensor.name;
      entries[name] = std::make_shared<Entry>(Entry{std::move(tensor), store.files_.back()});
    }
    return entries;
  };
  if (std::filesystem::exists(index_path)) {
    std::map<std::string, std::map<std::string, std::shared_ptr<Entry>>> shards;
    for (const auto& [tensor, shard] : read_index(index_path)) {
      if (!shards.contains(shard)) {
        if (!std::filesystem::exists(folder / shard)) {
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
      store.entries_.insert(*found);
    }
  } else if (std::filesystem::exists(single_path)) {
    store.entries_ = add_shard(single_path);
  } else {
    throw Error({.what = "no weights were found",
                 .where = folder.string(),
                 .expected = "model.safetensors or model.safetensors.index.json",
                 .hint = "convert other formats with transformers' save_pretrained"});
  }
  return store;
}

bool WeightStore::contains(const std::string& name) const { return entries_.contains(name); }

TensorView WeightStore::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    throw Error({.what = "a tensor of the model is missing",
                 .where = fmt::format("{}: {}", folder_.string(), name),
                 .expected = fmt::format("shape {}", shape)});
  }
  const Entry& entry = *found->second;
  const std::string where = fmt::format("{}: {}", entry.file->path().string(), name);
  if (entry.tensor.shape != shape) {
    throw Error({.what = "a tensor has another shape than config.json asks for",
                 .where = where,
                 .expected = fmt::format("{}", shape),
                 .found = fmt::format("{}", entry.tensor.shape)});
  }
  const auto dtype = loadable(entry.tensor.dtype);
  if (!dtype) {
    throw Error({.what = "weights of this dtype cannot be loaded",
                 .where = where,
                 .expected = "BF16, F16 or F32",
                 .found = entry.tensor.dtype});
  }
  return {name, *dtype, shape, entry.data(), entry.tensor.bytes};
}

void WeightStore::release(const TensorView& view) const {
  const auto found = entries_.find(view.name);
  if (found != entries_.end()) found->second->file->release(view.data, view.bytes);
}

std::vector<std::string> WeightStore::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

std::vector<std::filesystem::path> WeightStore::shards() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : files_) paths.push_back(file->path());
  return paths;
}

std::string WeightStore::fingerprint(bool all_bytes) const {
  Sha256 digest;
  for (const auto& [name, entry] : entries_) {
    const TensorEntry& tensor = entry->tensor;
    // A newline cannot be confused with a part of a shape or a dtype, and names come first.
    digest.update(fmt::format("{} {}\n{}\n{}\n", name.size(), name, tensor.dtype, tensor.shape));
    if (all_bytes || tensor.bytes <= 2 * kFingerprintBytes) {
      digest.update(entry->data(), tensor.bytes);
      entry->file->release(entry->data(), tensor.bytes);
    } else {
      digest.update(entry->data(), kFingerprintBytes);
      digest.update(entry->data() + tensor.bytes - kFingerprintBytes, kFingerprintBytes);
    }
  }
  return digest.finish();
}

}  // namespace oscar
