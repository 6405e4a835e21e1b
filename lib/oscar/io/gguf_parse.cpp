// Every count is held against the bytes that are left before anything is stored for it.
#include "oscar/io/gguf_parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "oscar/base/error.h"

namespace oscar {
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
  if (tensor.type == nullptr)
    refuse(name, "a tensor has an unknown type", "", std::to_string(type));
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

}  // namespace oscar
