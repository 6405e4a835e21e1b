// GGUF files: parsed, copied with other tensors, written.
#include "oscar/io/gguf.h"

#include <fmt/format.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/files.h"

namespace oscar {

// Pieces of a GGUF file as bytes, for what writes one.

inline constexpr uint32_t kGgufVersionWritten = 3, kGgufF32 = 0;

template <typename T>
void append_gguf(std::string& bytes, T value) {
  char raw_bytes[sizeof value];
  std::memcpy(raw_bytes, &value, sizeof value);
  bytes.append(raw_bytes, sizeof value);
}

inline void append_gguf_text(std::string& bytes, const std::string& text) {
  append_gguf(bytes, uint64_t{text.size()});
  bytes += text;
}

// The next multiple of `alignment`.
inline uint64_t gguf_padded(uint64_t bytes, uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// The list of tensors, whose data lie one behind another.
class GgufTensorList {
 public:
  explicit GgufTensorList(size_t alignment) : alignment_(alignment) {}

  void add(const std::string& name, const std::vector<int64_t>& shape, uint32_t type,
           uint64_t bytes) {
    append_gguf_text(entries_, name);
    append_gguf(entries_, static_cast<uint32_t>(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) append_gguf(entries_, static_cast<uint64_t>(shape[i]));
    append_gguf(entries_, type);
    append_gguf(entries_, end_);
    end_ = gguf_padded(end_ + bytes, alignment_);
    ++count_;
  }

  // The file up to the data, not padded: `keys` keys and their values, then the list.
  std::string header(uint64_t keys, std::string_view metadata) const {
    std::string bytes = "GGUF";
    append_gguf(bytes, kGgufVersionWritten);
    append_gguf(bytes, count_);
    append_gguf(bytes, keys);
    bytes += metadata;
    return bytes + entries_;
  }

 private:
  size_t alignment_;
  uint64_t end_ = 0, count_ = 0;
  std::string entries_;
};

// The walk over a GGUF file that fills a GgufFile.

// "uint32", "array".
const char* gguf_type_name(GgufType type);
// Bytes of one value; 0 for strings and arrays, which vary.
size_t gguf_type_bytes(GgufType type);

// Layout: "GGUF", u32 version, u64 tensors, u64 keys; each key as u64 length and bytes, u32 type,
// value; each tensor as name, u32 dimensions, u64 each (innermost first), u32 type, u64 offset of
// its data behind the header, which ends at the next multiple of the alignment.
struct GgufFile::Parser {
  explicit Parser(GgufFile& gguf) : gguf_(gguf), file_(gguf.file_) {}

  void parse();

 private:
  [[noreturn]] void refuse(const std::string& place, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const;
  size_t left() const { return file_.size() - position_; }
  const std::byte* take(size_t bytes, const std::string& place);
  template <typename T>
  T take(const std::string& place);
  std::string take_name(const char* kind, uint64_t number, size_t longest);
  GgufType take_type(const std::string& place);
  void skip_text(const std::string& place);
  void skip_elements(GgufType type, uint64_t count, int depth, const std::string& place);
  void read_value();
  void read_tensor(uint64_t number);
  size_t alignment() const;
  void place_tensors();

  GgufFile& gguf_;
  const MappedFile& file_;
  size_t position_ = 0;
  std::map<std::string, uint64_t> offsets_;  // of tensors' data, as written
};

// Values of a GGUF file's metadata, once its structure has been checked.

namespace {

template <typename T>
T load(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// None for types that are no integers and for what 63 bits do not hold.
std::optional<int64_t> load_integer(GgufType type, const std::byte* data) {
  switch (type) {
    case GgufType::kUint8:
      return load<uint8_t>(data);
    case GgufType::kInt8:
      return load<int8_t>(data);
    case GgufType::kUint16:
      return load<uint16_t>(data);
    case GgufType::kInt16:
      return load<int16_t>(data);
    case GgufType::kUint32:
      return load<uint32_t>(data);
    case GgufType::kInt32:
      return load<int32_t>(data);
    case GgufType::kInt64:
      return load<int64_t>(data);
    case GgufType::kUint64:
      if (const auto value = load<uint64_t>(data); value <= INT64_MAX) {
        return static_cast<int64_t>(value);
      }
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

double shortest_decimal(float value) {
  if (!std::isfinite(value)) return value;
  char text[64];
  const auto written = std::to_chars(text, text + sizeof text, value);
  double decimal = 0;
  std::from_chars(text, written.ptr, decimal);
  return decimal;
}

std::string_view load_text(const std::byte* data) {
  return {reinterpret_cast<const char*>(data) + sizeof(uint64_t), load<uint64_t>(data)};
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) : file_(path) { Parser(*this).parse(); }

std::vector<std::string> GgufFile::keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : values_) keys.push_back(key);
  return keys;
}

const GgufFile::Value* GgufFile::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

void GgufFile::refuse_type(const std::string& key, const char* expected) const {
  throw Error({.what = "a value of the metadata has another type",
               .where = fmt::format("{}: {}", path().string(), key),
               .expected = expected,
               .found = gguf_type_name(find(key)->type)});
}

std::optional<std::string_view> GgufFile::text(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kString) refuse_type(key, "a string");
  return load_text(value->data);
}

std::optional<int64_t> GgufFile::integer(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto integer = load_integer(value->type, value->data);
  if (!integer) refuse_type(key, "an integer up to 2^63 - 1");
  return integer;
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type == GgufType::kFloat32) return shortest_decimal(load<float>(value->data));
  if (value->type == GgufType::kFloat64) return load<double>(value->data);
  refuse_type(key, "a floating-point number");
}

std::optional<double> GgufFile::scalar(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type == GgufType::kBool) return *flag(key) ? 1.0 : 0.0;
  if (value->type == GgufType::kFloat32 || value->type == GgufType::kFloat64) return number(key);
  return static_cast<double>(*integer(key));
}

std::optional<bool> GgufFile::flag(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kBool) refuse_type(key, "true or false");
  return load<uint8_t>(value->data) != 0;
}

std::optional<std::vector<std::string_view>> GgufFile::texts(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray || value->element != GgufType::kString) {
    refuse_type(key, "an array of strings");
  }
  std::vector<std::string_view> texts;
  texts.reserve(value->count);
  const std::byte* next = value->elements();
  for (uint64_t i = 0; i < value->count; ++i) {
    texts.push_back(load_text(next));
    next += sizeof(uint64_t) + texts.back().size();
  }
  return texts;
}

std::optional<std::vector<int64_t>> GgufFile::integers(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray) refuse_type(key, "an array of integers");
  std::vector<int64_t> integers;
  integers.reserve(value->count);
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto integer =
        load_integer(value->element, value->elements() + i * gguf_type_bytes(value->element));
    if (!integer) refuse_type(key, "an array of integers up to 2^63 - 1");
    integers.push_back(*integer);
  }
  return integers;
}

std::optional<std::vector<float>> GgufFile::floats(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray || value->element != GgufType::kFloat32) {
    refuse_type(key, "an array of float32");
  }
  std::vector<float> floats(value->count);
  if (!floats.empty()) std::memcpy(floats.data(), value->elements(), floats.size() * sizeof(float));
  return floats;
}

std::string_view GgufFile::raw(const std::string& key) const {
  const Value* value = find(key);
  if (value == nullptr) return {};
  return {reinterpret_cast<const char*>(value->data), value->bytes};
}

// Every count is held against the bytes that are left before anything is stored for it.

namespace {

constexpr uint64_t kMaxKeys = 65536, kMaxTensors = 65536;
constexpr size_t kMaxKeyBytes = 65535, kMaxTensorNameBytes = 64;  // the format's own limits
constexpr uint32_t kMaxTensorDimensions = 4;                      // as in ggml
constexpr int kMaxArrayDepth = 2;
constexpr uint64_t kDefaultAlignment = 32, kMaxAlignment = uint64_t{1} << 20;

struct TypeRow {
  const char* name;
  size_t bytes;
};
constexpr std::array<TypeRow, 13> kTypeRows = {{{"uint8", 1},
                                                {"int8", 1},
                                                {"uint16", 2},
                                                {"int16", 2},
                                                {"uint32", 4},
                                                {"int32", 4},
                                                {"float32", 4},
                                                {"bool", 1},
                                                {"string", 0},
                                                {"array", 0},
                                                {"uint64", 8},
                                                {"int64", 8},
                                                {"float64", 8}}};

uint64_t next_multiple(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;  // both far below 2^63
}

}  // namespace

const char* gguf_type_name(GgufType type) { return kTypeRows[static_cast<size_t>(type)].name; }
size_t gguf_type_bytes(GgufType type) { return kTypeRows[static_cast<size_t>(type)].bytes; }

void GgufFile::Parser::refuse(const std::string& place, const std::string& what,
                              const std::string& expected, const std::string& found) const {
  const std::string file = file_.path().string();
  throw Error({.what = what,
               .where = place.empty() ? file : fmt::format("{}: {}", file, place),
               .expected = expected,
               .found = found,
               .hint = "the file is damaged or incomplete; fetch it again"});
}

const std::byte* GgufFile::Parser::take(size_t bytes, const std::string& place) {
  if (bytes > left()) {
    refuse(place, "the file ends inside its header", fmt::format("{} more bytes", bytes),
           fmt::format("{} bytes", left()));
  }
  const std::byte* data = file_.data() + position_;
  position_ += bytes;
  return data;
}

template <typename T>
T GgufFile::Parser::take(const std::string& place) {
  T value;
  std::memcpy(&value, take(sizeof value, place), sizeof value);
  return value;
}

std::string GgufFile::Parser::take_name(const char* kind, uint64_t number, size_t longest) {
  const std::string place = fmt::format("{} {}", kind, number);
  const auto bytes = take<uint64_t>(place);
  if (bytes == 0 || bytes > longest) {
    refuse(place, "a name is empty or too long", fmt::format("1 to {} bytes", longest),
           fmt::format("{} bytes", bytes));
  }
  return {reinterpret_cast<const char*>(take(bytes, place)), bytes};
}

GgufType GgufFile::Parser::take_type(const std::string& place) {
  const auto type = take<uint32_t>(place);
  if (type >= kTypeRows.size()) {
    refuse(place, "a value of the metadata has an unknown type",
           fmt::format("0 to {}", kTypeRows.size() - 1), std::to_string(type));
  }
  return static_cast<GgufType>(type);
}

void GgufFile::Parser::skip_text(const std::string& place) {
  const auto bytes = take<uint64_t>(place);
  take(bytes, place);
}

void GgufFile::Parser::skip_elements(GgufType type, uint64_t count, int depth,
                                     const std::string& place) {
  constexpr size_t kTextHeader = 8;
  const size_t least = type == GgufType::kString  ? kTextHeader
                       : type == GgufType::kArray ? kArrayHeaderBytes
                                                  : gguf_type_bytes(type);
  if (count > left() / least) {
    refuse(place, "an array of the metadata is longer than the file",
           fmt::format("at most {} elements", left() / least), std::to_string(count));
  }
  if (type == GgufType::kString) {
    for (uint64_t i = 0; i < count; ++i) skip_text(place);
  } else if (type == GgufType::kArray) {
    if (depth >= kMaxArrayDepth) refuse(place, "arrays of the metadata are nested too deeply");
    for (uint64_t i = 0; i < count; ++i) {
      const GgufType element = take_type(place);
      const auto elements = take<uint64_t>(place);
      skip_elements(element, elements, depth + 1, place);
    }
  } else {
    const std::byte* data = take(count * least, place);
    const bool odd = type == GgufType::kBool &&
                     std::any_of(data, data + count, [](std::byte b) { return b > std::byte{1}; });
    if (odd) refuse(place, "a truth value is neither 0 nor 1");
  }
}

void GgufFile::Parser::read_value() {
  const std::string key = take_name("key", gguf_.values_.size(), kMaxKeyBytes);
  Value value;
  value.type = take_type(key);
  value.data = file_.data() + position_;
  if (value.type == GgufType::kArray) {
    value.element = take_type(key);
    value.count = take<uint64_t>(key);
    skip_elements(value.element, value.count, 1, key);
  } else {
    skip_elements(value.type, 1, 0, key);
  }
  value.bytes = static_cast<size_t>(file_.data() + position_ - value.data);
  if (!gguf_.values_.emplace(key, value).second) refuse(key, "a key occurs twice in the metadata");
}

void GgufFile::Parser::read_tensor(uint64_t number) {
  const std::string name = take_name("tensor", number, kMaxTensorNameBytes);
  const auto dimensions = take<uint32_t>(name);
  if (dimensions == 0 || dimensions > kMaxTensorDimensions) {
    refuse(name, "a tensor has an impossible number of dimensions", "1 to 4",
           std::to_string(dimensions));
  }
  GgufTensor tensor;
  uint64_t values = 1;
  for (uint32_t i = 0; i < dimensions; ++i) {
    const auto size = take<uint64_t>(name);
    if (size == 0 || size > INT64_MAX || __builtin_mul_overflow(values, size, &values)) {
      refuse(name, "the shape of a tensor is impossible", "sizes over 0 whose product fits a file",
             std::to_string(size));
    }
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
  }
  const auto type = take<uint32_t>(name);
  tensor.type = find_ggml_type(type);
  if (tensor.type == nullptr) {
    throw Error({.what = "weights of this type cannot be loaded",
                 .where = fmt::format("{}: {}", file_.path().string(), name),
                 .expected = decodable_ggml_types(),
                 .found = describe_ggml_type(type),
                 .hint = "take a file of the model in one of these types"});
  }
  if (tensor.shape.back() % tensor.type->block_values != 0) {
    refuse(name, "the rows of a tensor are not whole blocks of its type",
           fmt::format("a multiple of {} ({})", tensor.type->block_values, tensor.type->name),
           std::to_string(tensor.shape.back()));
  }
  const uint64_t blocks = values / static_cast<uint64_t>(tensor.type->block_values);
  if (__builtin_mul_overflow(blocks, tensor.type->block_bytes, &tensor.bytes) ||
      tensor.bytes > file_.size()) {
    refuse(name, "a tensor is larger than its file");
  }
  const auto offset = take<uint64_t>(name);
  if (!gguf_.tensors_.emplace(name, std::move(tensor)).second) {
    refuse(name, "a tensor name occurs twice");
  }
  offsets_[name] = offset;
}

size_t GgufFile::Parser::alignment() const {
  const std::string key = "general.alignment";
  const auto value = gguf_.integer(key);
  if (!value) return kDefaultAlignment;
  const auto alignment = static_cast<uint64_t>(*value);
  if (*value < 8 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0) {
    refuse(key, "the alignment is impossible", "a power of two from 8 to 2^20",
           std::to_string(*value));
  }
  return alignment;
}

// Tensors lie one behind another, each at the next multiple of the alignment.
void GgufFile::Parser::place_tensors() {
  const uint64_t aligned = gguf_.alignment_ = alignment();
  const uint64_t begin = next_multiple(position_, aligned);
  std::vector<std::pair<uint64_t, std::string>> order;
  for (const auto& [name, offset] : offsets_) order.emplace_back(offset, name);
  std::sort(order.begin(), order.end());
  uint64_t next = 0, end = position_;
  for (const auto& [offset, name] : order) {
    GgufTensor& tensor = gguf_.tensors_.at(name);
    if (offset % aligned != 0) {
      refuse(name, "the data of a tensor is not aligned",
             fmt::format("a multiple of {} bytes", aligned), std::to_string(offset));
    }
    if (offset < next) refuse(name, "the data of two tensors overlap");
    if (offset > next) refuse(name, "bytes before this tensor belong to no tensor");
    if (begin > file_.size() || tensor.bytes > file_.size() - begin ||
        offset > file_.size() - begin - tensor.bytes) {
      refuse(name, "the data of a tensor lies outside the file",
             fmt::format("at most {} bytes", file_.size()),
             fmt::format("{} bytes from {} on", tensor.bytes, begin + offset));
    }
    tensor.data = file_.data() + begin + offset;
    end = begin + offset + tensor.bytes;
    next = next_multiple(offset + tensor.bytes, aligned);
  }
  if (file_.size() - end >= aligned) {
    refuse("", "bytes at the end of the file belong to no tensor", fmt::format("{} bytes", end),
           fmt::format("{} bytes", file_.size()));
  }
}

void GgufFile::Parser::parse() {
  if (file_.size() < 4 || std::memcmp(file_.data(), "GGUF", 4) != 0) {
    throw Error({.what = "not a GGUF file",
                 .where = file_.path().string(),
                 .expected = "a file that begins with GGUF",
                 .hint = "MODEL is a .gguf file, or a folder as Hugging Face's tools write it"});
  }
  position_ = 4;
  const auto version = take<uint32_t>("version");
  if (version != 2 && version != 3) {
    const bool swapped = version != 0 && (version & 0xffffu) == 0;
    throw Error({.what = "this version of GGUF cannot be read",
                 .where = file_.path().string(),
                 .expected = "version 2 or 3, little-endian",
                 .found = swapped ? "a big-endian file" : fmt::format("version {}", version),
                 .hint = "convert the model anew with llama.cpp's convert_hf_to_gguf.py"});
  }
  const auto tensors = take<uint64_t>("number of tensors");
  const auto keys = take<uint64_t>("number of keys");
  if (tensors > kMaxTensors || keys > kMaxKeys) {
    refuse("", "the numbers of keys and tensors are impossible",
           fmt::format("at most {} and {}", kMaxKeys, kMaxTensors),
           fmt::format("{} and {}", keys, tensors));
  }
  const size_t begin = position_;
  for (uint64_t i = 0; i < keys; ++i) read_value();
  gguf_.metadata_ = {reinterpret_cast<const char*>(file_.data() + begin), position_ - begin};
  for (uint64_t i = 0; i < tensors; ++i) read_tensor(i);
  place_tensors();
}

// Header, metadata, a list of tensors, then their data, each at a multiple of 32 bytes.

namespace {

constexpr size_t kDataAlignment = 32;

void pad(std::string& bytes) { bytes.resize(gguf_padded(bytes.size(), kDataAlignment), '\0'); }

}  // namespace

void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const FloatTensors& tensors) {
  std::string values, data;
  for (const auto& [key, value] : metadata) {
    append_gguf_text(values, key);
    if (const uint32_t* number = std::get_if<uint32_t>(&value)) {
      append_gguf(values, static_cast<uint32_t>(GgufType::kUint32));
      append_gguf(values, *number);
    } else {
      append_gguf(values, static_cast<uint32_t>(GgufType::kString));
      append_gguf_text(values, std::get<std::string>(value));
    }
  }
  GgufTensorList list(kDataAlignment);
  for (const auto& [name, tensor] : tensors) {
    const size_t bytes = tensor.values.size() * sizeof(float);
    list.add(name, tensor.shape, kGgufF32, bytes);
    data.append(reinterpret_cast<const char*>(tensor.values.data()), bytes);
    pad(data);
  }
  std::string bytes = list.header(metadata.size(), values);
  pad(bytes);
  write_file_atomically(path, bytes + data);
}

// The header is made in memory, the data goes from file to file.

namespace {

constexpr size_t kLongestTensorName = 63;  // ggml's, without the zero behind it

}  // namespace

void copy_gguf(const GgufFile& from, const std::filesystem::path& to,
               const GgufReplacement& replacement, const FloatTensors& added) {
  using Named = std::pair<const std::string, GgufTensor>;
  std::vector<const Named*> order;
  for (const Named& tensor : from.tensors()) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const Named* a, const Named* b) { return a->second.data < b->second.data; });
  GgufTensorList list(from.alignment());
  for (const Named* tensor : order) {
    const GgufTensor& t = tensor->second;
    list.add(tensor->first, t.shape, t.type->id, t.bytes);
  }
  for (const auto& [name, tensor] : added) {
    if (from.tensors().contains(name) || name.size() > kLongestTensorName) {
      throw Error({.what = "a tensor cannot be added to a GGUF file",
                   .where = from.path().string() + ": " + name,
                   .found = name.size() > kLongestTensorName ? "a name of over 63 bytes"
                                                             : "one of this name is there"});
    }
    list.add(name, tensor.shape, kGgufF32, tensor.values.size() * sizeof(float));
  }
  const std::string header = list.header(from.keys().size(), from.metadata());

  std::ofstream out(to, std::ios::binary);
  const auto write = [&](const void* data, size_t bytes) {
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    const std::string zeros(gguf_padded(bytes, from.alignment()) - bytes, '\0');
    out.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
  };
  write(header.data(), header.size());
  for (const Named* tensor : order) {
    const auto& [name, t] = *tensor;
    const auto replaced = replacement(name, t);
    if (replaced && replaced->size() != t.bytes) {
      throw Error({.what = "a tensor would change its size",
                   .where = fmt::format("{}: {}", from.path().string(), name),
                   .expected = fmt::format("{} bytes", t.bytes),
                   .found = fmt::format("{} bytes", replaced->size())});
    }
    write(replaced ? replaced->data() : t.data, t.bytes);
    from.file().release(t.data, t.bytes);
  }
  for (const auto& [name, tensor] : added) {
    write(tensor.values.data(), tensor.values.size() * sizeof(float));
  }
  out.close();
  if (!out) {
    throw Error({.what = "cannot write a GGUF file",
                 .where = to.string(),
                 .hint = "is there space left on the disk?"});
  }
}

// A table that a signal handler can read.

namespace {

// What a signal handler may read: maps by address. Those beyond the table are not named.
struct ListedMap {
  std::atomic<const std::byte*> begin = nullptr;
  std::atomic<size_t> bytes = 0;
  std::atomic<const char*> path = nullptr;
};
std::array<ListedMap, 1024> listed_maps;

void say(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;  // nobody listens
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  for (const ListedMap& map : listed_maps) {
    const std::byte* begin = map.begin;
    if (begin == nullptr || at < begin || at >= begin + map.bytes) continue;
    say("\na file was cut short, or its disk failed, while it was in use\n  where:    ");
    say(map.path);
    say("\n  hint:     run again when nothing writes to it\n");
    ::_exit(1);
  }
  std::signal(signal, SIG_DFL);  // the fault comes again, and ends the program
}

}  // namespace

void install_cut_file_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

void name_map(const std::byte* begin, size_t bytes, const char* path) {
  for (ListedMap& map : listed_maps) {
    const char* none = nullptr;
    if (!map.path.compare_exchange_strong(none, path)) continue;
    map.bytes = bytes;
    map.begin = begin;
    return;
  }
}

void forget_map(const std::byte* begin) {
  for (ListedMap& map : listed_maps) {
    if (map.begin != begin) continue;
    map.begin = nullptr;
    map.path = nullptr;
    return;
  }
}

}  // namespace oscar
