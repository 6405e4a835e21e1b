// safetensors files: header, weights, arrays, copies.
#include "oscar/io/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>

#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/cache/numeric.h"

namespace oscar {

// Header layout: u64 length (little-endian), that many bytes of JSON, then the data without holes.

namespace {

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxDimensions = 16;

[[noreturn]] void refuse(const MappedFile& file, const std::string& tensor, const std::string& what,
                         const std::string& expected = "", const std::string& found = "") {
  throw Error({.what = what,
               .where = tensor.empty() ? file.path().string()
                                       : fmt::format("{}: {}", file.path().string(), tensor),
               .expected = expected,
               .found = found,
               .hint = "the file is damaged or incomplete; fetch it again"});
}

// Bits per element of the dtypes that the format defines; none for names that it does not.
std::optional<uint64_t> element_bits(const std::string& dtype) {
  if (dtype == "F4") return 4;
  if (dtype == "F6_E2M3" || dtype == "F6_E3M2") return 6;
  if (dtype == "BOOL" || dtype == "U8" || dtype == "I8" || dtype.rfind("F8_", 0) == 0) return 8;
  if (dtype == "BF16" || dtype == "F16" || dtype == "I16" || dtype == "U16") return 16;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 32;
  if (dtype == "F64" || dtype == "I64" || dtype == "U64" || dtype == "C64") return 64;
  return std::nullopt;
}

Json parse_header(const MappedFile& file, std::string_view text) {
  try {
    return parse_strict_json<Json>(text, file.path().string());
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    refuse(file, "", "the header is no valid JSON", info.expected,
           info.what + (info.found.empty() ? "" : ": " + info.found));
  }
}

uint64_t read_offset(const MappedFile& file, const std::string& name, const Json& value) {
  if (!value.is_number_unsigned()) {
    refuse(file, name, "an offset is not a non-negative integer", "", value.dump());
  }
  return value.get<uint64_t>();
}

std::vector<int64_t> read_shape(const MappedFile& file, const std::string& name,
                                const Json& value) {
  if (!value.is_array() || value.size() > kMaxDimensions) {
    refuse(file, name, "the shape is not a list of at most 16 sizes");
  }
  std::vector<int64_t> shape;
  for (const Json& size : value) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > INT64_MAX) {
      refuse(file, name, "a size is not a non-negative integer", "", size.dump());
    }
    shape.push_back(size.get<int64_t>());
  }
  return shape;
}

// Product of the shape times the element size, refused when it does not fit.
void check_bytes(const MappedFile& file, const TensorEntry& entry) {
  const auto bits = element_bits(entry.dtype);
  if (!bits) return;  // listed by name; reading it is refused later
  uint64_t total_bits = *bits;
  for (const int64_t size : entry.shape) {
    if (__builtin_mul_overflow(total_bits, static_cast<uint64_t>(size), &total_bits)) {
      refuse(file, entry.name, "the shape is larger than any file");
    }
  }
  if (total_bits % 8 != 0 || total_bits / 8 != entry.bytes) {
    refuse(file, entry.name, "the size of a tensor disagrees with its shape and dtype",
           fmt::format("{} bytes", total_bits / 8), fmt::format("{} bytes", entry.bytes));
  }
}

TensorEntry read_entry(const MappedFile& file, const std::string& name, const Json& value,
                       size_t data_begin) {
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets") || !value["dtype"].is_string() ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2) {
    refuse(file, name, "a tensor is not described by dtype, shape and data_offsets");
  }
  TensorEntry entry;
  entry.name = name;
  entry.dtype = value["dtype"].get<std::string>();
  entry.shape = read_shape(file, name, value["shape"]);
  const uint64_t begin = read_offset(file, name, value["data_offsets"][0]);
  const uint64_t end = read_offset(file, name, value["data_offsets"][1]);
  const uint64_t data_bytes = file.size() - data_begin;
  if (begin > end || end > data_bytes) {
    refuse(file, name, "the data of a tensor lies outside the file",
           fmt::format("at most {} bytes of data", data_bytes), fmt::format("{}..{}", begin, end));
  }
  entry.offset = data_begin + begin;
  entry.bytes = end - begin;
  check_bytes(file, entry);
  return entry;
}

// Every byte of data belongs to exactly one tensor.
void check_cover(const MappedFile& file, const std::vector<TensorEntry>& entries,
                 size_t data_begin) {
  std::vector<const TensorEntry*> order;
  for (const TensorEntry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const TensorEntry* a, const TensorEntry* b) {
    return a->offset != b->offset ? a->offset < b->offset : a->bytes < b->bytes;
  });
  size_t covered = data_begin;
  for (const TensorEntry* entry : order) {
    if (entry->offset < covered) refuse(file, entry->name, "the data of two tensors overlap");
    if (entry->offset > covered) {
      refuse(file, entry->name, "bytes before this tensor belong to no tensor");
    }
    covered += entry->bytes;
  }
  if (covered != file.size()) {
    refuse(file, "", "bytes at the end of the file belong to no tensor",
           fmt::format("{} bytes", covered), fmt::format("{} bytes", file.size()));
  }
}

}  // namespace

std::vector<TensorEntry> parse_safetensors_header(const MappedFile& file) {
  if (file.size() < kLengthBytes) refuse(file, "", "the file is too short for a header");
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<uint64_t>(std::to_integer<uint8_t>(file.data()[i])) << (8 * i);
  }
  const uint64_t room = file.size() - kLengthBytes;
  if (length > kMaxHeaderBytes || length > room) {
    refuse(file, "", "the header is longer than allowed",
           fmt::format("at most {} bytes", std::min(room, kMaxHeaderBytes)),
           fmt::format("{} bytes", length));
  }
  const Json header = parse_header(
      file, {reinterpret_cast<const char*>(file.data()) + kLengthBytes, size_t{length}});
  if (!header.is_object()) refuse(file, "", "the header is not a JSON object");
  const size_t data_begin = kLengthBytes + length;
  std::vector<TensorEntry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") entries.push_back(read_entry(file, name, value, data_begin));
  }
  check_cover(file, entries, data_begin);
  return entries;
}

// Tensors of one or many shards, found by name, and their fingerprint.

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

constexpr const char *kWholeFile = "model.safetensors",
                     *kIndexFile = "model.safetensors.index.json";

}  // namespace

std::vector<std::filesystem::path> weight_files(const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / kWholeFile)) return {folder / kWholeFile};
  std::set<std::filesystem::path> files;
  if (std::filesystem::exists(folder / kIndexFile)) {
    for (const auto& [tensor, shard] : read_index(folder / kIndexFile)) {
      files.insert(folder / shard);
    }
  }
  return {files.begin(), files.end()};
}

struct SafetensorsWeights::Entry {
  TensorEntry tensor;
  std::shared_ptr<MappedFile> file;
  const std::byte* data() const { return file->data() + tensor.offset; }
};

SafetensorsWeights::SafetensorsWeights(const std::filesystem::path& folder) : folder_(folder) {
  const auto index_path = folder / kIndexFile, single_path = folder / kWholeFile;
  const auto add_shard = [this](const std::filesystem::path& path) {
    files_.push_back(std::make_shared<MappedFile>(path));
    std::map<std::string, std::shared_ptr<Entry>> entries;
    for (TensorEntry& tensor : parse_safetensors_header(*files_.back())) {
      const std::string name = tensor.name;
      entries[name] = std::make_shared<Entry>(Entry{std::move(tensor), files_.back()});
    }
    return entries;
  };
  if (std::filesystem::exists(single_path)) {
    entries_ = add_shard(single_path);
  } else if (std::filesystem::exists(index_path)) {
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

// Conversion to and from float32.

namespace {

template <typename T, typename Convert>
void convert(const std::byte* data, size_t bytes, std::vector<float>& out, Convert&& to_float) {
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T value;
    std::memcpy(&value, data + at, sizeof value);
    out.push_back(to_float(value));
  }
}

}  // namespace

FloatTensors read_safetensors(const std::filesystem::path& path) {
  const MappedFile file(path);
  FloatTensors tensors;
  for (const TensorEntry& entry : parse_safetensors_header(file)) {
    FloatTensor& tensor = tensors[entry.name];
    tensor.shape = entry.shape;
    const std::byte* data = file.data() + entry.offset;
    if (entry.dtype == "F32") {
      convert<float>(data, entry.bytes, tensor.values, [](float x) { return x; });
    } else if (entry.dtype == "F64") {
      convert<double>(data, entry.bytes, tensor.values,
                      [](double x) { return static_cast<float>(x); });
    } else if (entry.dtype == "F16") {
      convert<uint16_t>(data, entry.bytes, tensor.values, fp16_to_float);
    } else if (entry.dtype == "BF16") {
      convert<uint16_t>(data, entry.bytes, tensor.values, bf16_to_float);
    } else {
      throw Error({.what = "not a tensor of numbers that can be read",
                   .where = path.string() + ": " + entry.name,
                   .expected = "F64, F32, F16 or BF16",
                   .found = entry.dtype});
    }
  }
  return tensors;
}

void write_safetensors(const std::filesystem::path& path, const FloatTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = end;
    end += tensor.values.size() * sizeof(float);
    header[name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(text.size() >> (8 * i) & 0xff);
  bytes += text;
  for (const auto& entry : tensors) {
    const std::vector<float>& values = entry.second.values;
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }
  write_file_atomically(path, bytes);
}

// Header first, then the data in the order of the file.

void copy_safetensors(const std::filesystem::path& from, const std::filesystem::path& to,
                      const TensorReplacement& replacement) {
  const MappedFile file(from);
  std::vector<TensorEntry> tensors = parse_safetensors_header(file);
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.offset < b.offset; });
  std::ofstream out(to, std::ios::binary);
  const auto write = [&](const std::byte* data, size_t bytes) {
    out.write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  // Tensors cover all that follows the header.
  write(file.data(), tensors.empty() ? file.size() : tensors.front().offset);
  for (const TensorEntry& tensor : tensors) {
    const std::byte* data = file.data() + tensor.offset;
    const auto replaced = replacement(tensor);
    if (replaced && replaced->size() != tensor.bytes) {
      throw Error({.what = "a tensor would change its size",
                   .where = fmt::format("{}: {}", from.string(), tensor.name),
                   .expected = fmt::format("{} bytes", tensor.bytes),
                   .found = fmt::format("{} bytes", replaced->size())});
    }
    write(replaced ? replaced->data() : data, tensor.bytes);
    file.release(data, tensor.bytes);
  }
  out.close();
  if (!out) {
    throw Error({.what = "cannot write weights",
                 .where = to.string(),
                 .hint = "is there space left on the disk?"});
  }
}

}  // namespace oscar
