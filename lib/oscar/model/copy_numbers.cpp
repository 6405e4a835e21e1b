// Pieces that fit a cache: copied, then looked through.
#include "oscar/model/copy_numbers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

// Of numbers that are finite, no exponent (in FP8: nothing but the sign) has all bits of `mask`
// set.
template <typename Word>
bool all_finite(const std::byte* numbers, int64_t count, Word mask) {
  unsigned found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, numbers + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    found |= static_cast<unsigned>((word & mask) == mask);
  }
  return found == 0;
}

bool all_finite(const std::byte* numbers, int64_t count, torch::Dtype dtype) {
  switch (dtype) {
    case torch::kBFloat16:
      return all_finite<uint16_t>(numbers, count, 0x7f80);
    case torch::kFloat16:
      return all_finite<uint16_t>(numbers, count, 0x7c00);
    case torch::kFloat32:
      return all_finite<uint32_t>(numbers, count, 0x7f800000);
    case torch::kFloat8_e4m3fn:
      return all_finite<uint8_t>(numbers, count, 0x7f);
    default:
      throw Error(
          {.what = "numbers of a type that weights do not have", .found = c10::toString(dtype)});
  }
}

}  // namespace

bool copy_numbers(const std::byte* data, torch::Tensor place) {
  const int64_t size = place.element_size();
  const torch::Tensor flat = place.view({-1});
  bool finite = true;
  for (int64_t first = 0; first < flat.numel(); first += kPieceBytes / size) {
    const int64_t count = std::min(kPieceBytes / size, flat.numel() - first);
    torch::Tensor target = flat.narrow(0, first, count);
    const torch::Tensor piece =
        place.is_cuda()
            ? torch::empty({count}, torch::dtype(place.scalar_type()).pinned_memory(true))
            : target;
    auto* const bytes = static_cast<std::byte*>(piece.data_ptr());
    std::memcpy(bytes, data + first * size, static_cast<size_t>(count * size));
    finite = all_finite(bytes, count, place.scalar_type()) && finite;
    if (place.is_cuda()) target.copy_(piece, /*non_blocking=*/true);
  }
  return finite;
}

}  // namespace oscar
