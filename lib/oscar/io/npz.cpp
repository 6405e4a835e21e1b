// Members NAME.npy; the order of values is the array's own, C or Fortran.
#include "oscar/io/npz.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"
#include "oscar/io/npy_header.h"
#include "oscar/io/zip.h"

namespace oscar {
namespace {

constexpr std::string_view kSuffix = ".npy";
constexpr size_t kMostArrayDimensions = 8, kArrayAlignment = 64;

// The number whose bytes, the lowest first, are `bits`.
float number_of(char kind, size_t width, uint64_t bits) {
  if (kind == 'f' && width == 8) return static_cast<float>(std::bit_cast<double>(bits));
  if (kind == 'f' && width == 4) return std::bit_cast<float>(static_cast<uint32_t>(bits));
  if (kind == 'f') return fp16_to_float(static_cast<uint16_t>(bits));
  if (kind != 'i') return static_cast<float>(bits);
  const size_t unused = 64 - 8 * width;
  return static_cast<float>(static_cast<int64_t>(bits << unused) >> unused);
}

bool is_number(char kind, size_t width) {
  const bool whole = width == 1 || width == 2 || width == 4 || width == 8;
  if (kind == 'f') return whole && width > 1;
  return (whole && (kind == 'i' || kind == 'u')) || (kind == 'b' && width == 1);
}

FloatTensor read_array(std::string_view bytes, const std::string& where) {
  const NpyHeader header = parse_npy_header(bytes, where);
  const std::string& type = header.type;
  const bool plain =
      type.size() == 3 && std::string_view("<>|=").find(type[0]) != std::string_view::npos;
  const char kind = plain ? type[1] : '?';
  const auto width = static_cast<size_t>(plain ? type[2] - '0' : 0);
  if (!is_number(kind, width)) {
    throw Error({.what = "not an array of numbers",
                 .where = where,
                 .expected = "float16, float32, float64 or integers",
                 .found = type.empty() ? "a structured type" : "numpy type '" + type + "'"});
  }
  FloatTensor array;
  uint64_t count = 1;
  bool fits = header.shape.size() <= kMostArrayDimensions;
  for (const uint64_t size : header.shape) {
    array.shape.push_back(static_cast<int64_t>(size));
    fits = fits && !__builtin_mul_overflow(count, size, &count);
  }
  const std::string_view data = bytes.substr(header.data_begin);
  if (!fits || data.size() % width != 0 || data.size() / width != count) {
    throw Error({.what = "the size of an array disagrees with its shape and type",
                 .where = where,
                 .found = fmt::format("{} bytes", data.size())});
  }
  // In elements, the last index fastest, or the first.
  const size_t dimensions = array.shape.size();
  std::vector<uint64_t> strides(dimensions, 1), index(dimensions, 0);
  for (size_t i = 1; i < dimensions; ++i) {
    const size_t to = header.fortran_order ? i : dimensions - 1 - i;
    const size_t from = header.fortran_order ? i - 1 : dimensions - i;
    strides[to] = strides[from] * header.shape[from];
  }
  const bool big_endian = type[0] == '>';
  array.values.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t at = 0, bits = 0;
    for (size_t k = 0; k < dimensions; ++k) at += index[k] * strides[k];
    for (size_t b = 0; b < width; ++b) {
      const size_t place = big_endian ? b : width - 1 - b;
      bits = bits << 8 | static_cast<uint8_t>(data[at * width + place]);
    }
    array.values.push_back(number_of(kind, width, bits));
    for (size_t k = dimensions; k-- > 0 && ++index[k] == header.shape[k];) index[k] = 0;
  }
  return array;
}

}  // namespace

FloatTensors read_npz(const std::filesystem::path& path) {
  const ZipArchive archive = ZipArchive::open(path);
  FloatTensors arrays;
  for (const auto& [name, bytes] : archive.members()) {
    const std::string where = fmt::format("{}: {}", path.string(), name);
    if (!name.ends_with(kSuffix)) {
      throw Error({.what = "a member is no array", .where = where, .expected = "NAME.npy"});
    }
    arrays.emplace(name.substr(0, name.size() - kSuffix.size()), read_array(bytes, where));
  }
  return arrays;
}

void write_npz(const std::filesystem::path& path, const std::map<std::string, NpzArray>& arrays) {
  std::vector<ZipMember> members;
  for (const auto& [name, array] : arrays) {
    members.push_back(
        {name + std::string(kSuffix), npy_header(array.type, array.shape) + array.bytes});
  }
  write_zip(path, members, kArrayAlignment);
}

void write_npz(const std::filesystem::path& path, const FloatTensors& arrays) {
  std::map<std::string, NpzArray> typed;
  for (const auto& [name, array] : arrays) {
    const auto* const data = reinterpret_cast<const char*>(array.values.data());
    typed[name] = {"<f4",
                   {array.shape.begin(), array.shape.end()},
                   std::string(data, array.values.size() * sizeof(float))};
  }
  write_npz(path, typed);
}

}  // namespace oscar
