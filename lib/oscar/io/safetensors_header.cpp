// Header layout: u64 length (little-endian), that many bytes of JSON, then the data without holes.
#include "oscar/io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/strict_json.h"

namespace oscar {
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

}  // namespace oscar
