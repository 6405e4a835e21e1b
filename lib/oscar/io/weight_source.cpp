// What all weight sources share: element types and the fingerprint of a tensor.
#include "oscar/io/weight_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace oscar {
namespace {

constexpr size_t kFingerprintBytes = 4096;  // at each end of a tensor
constexpr size_t kBlockBytes = size_t{1} << 20;

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

void add_to_fingerprint(Sha256& digest, const std::string& name, const std::string& dtype,
                        const std::vector<int64_t>& shape, const StoredBytes& stored,
                        bool all_bytes) {
  // A newline cannot be confused with a part of a shape or a dtype, and names come first.
  digest.update(fmt::format("{} {}\n{}\n{}\n", name.size(), name, dtype, shape));
  // Not through the map, where a page brings megabytes along.
  std::vector<std::byte> block;
  const auto add = [&](size_t first, size_t end) {
    for (; first < end; first += block.size()) {
      block.resize(std::min(kBlockBytes, end - first));
      stored.read(first, block.size(), block.data());
      digest.update(block.data(), block.size());
    }
  };
  if (all_bytes || stored.bytes <= 2 * kFingerprintBytes) {
    add(0, stored.bytes);
  } else {
    add(0, kFingerprintBytes);
    add(stored.bytes - kFingerprintBytes, stored.bytes);
  }
}

}  // namespace oscar
