// What all weight sources share: element types and the fingerprint of a tensor.
#include "oscar/io/weight_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace oscar {
namespace {

constexpr size_t kFingerprintBytes = 4096;  // at each end of a tensor

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
                        const std::vector<int64_t>& shape, const std::byte* data, size_t bytes,
                        bool all_bytes) {
  // A newline cannot be confused with a part of a shape or a dtype, and names come first.
  digest.update(fmt::format("{} {}\n{}\n{}\n", name.size(), name, dtype, shape));
  if (all_bytes || bytes <= 2 * kFingerprintBytes) {
    digest.update(data, bytes);
  } else {
    digest.update(data, kFingerprintBytes);
    digest.update(data + bytes - kFingerprintBytes, kFingerprintBytes);
  }
}

}  // namespace oscar
