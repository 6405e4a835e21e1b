// Values of a GGUF file's metadata, once its structure has been checked (gguf_parse.cpp).
#include "oscar/io/gguf.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/io/gguf_parse.h"

namespace oscar {
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

}  // namespace oscar
