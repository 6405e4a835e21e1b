// Pieces that fit a cache: copied, then looked through.
#include "oscar/model/copy_numbers.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

// Pinned memory of two pieces: one is filled while the other is on its way.
class Staging {
 public:
  Staging()
      : memory_(torch::empty({2, kPieceBytes}, torch::dtype(torch::kUInt8).pinned_memory(true))) {}

  // One that nothing reads from any more.
  torch::Tensor next(int64_t bytes) {
    turn_ = 1 - turn_;
    left_[turn_].synchronize();
    return memory_[turn_].narrow(0, 0, bytes);
  }
  // The last one, to a place of as many bytes on a GPU.
  void send(const torch::Tensor& part) {
    part.copy_(memory_[turn_].narrow(0, 0, part.numel()), /*non_blocking=*/true);
    const c10::impl::VirtualGuardImpl device_type(c10::DeviceType::CUDA);
    left_[turn_].record(device_type.getStream(part.device()));
  }

 private:
  torch::Tensor memory_;
  c10::Event left_[2] = {c10::Event(c10::DeviceType::CUDA), c10::Event(c10::DeviceType::CUDA)};
  int turn_ = 0;
};

// Lent to one caller after another, and kept to the end of the process: beside kernels in progress
// making one takes longer than copying a layer.
class StagingPool {
 public:
  std::unique_ptr<Staging> take() {
    const std::lock_guard lock(guard_);
    if (free_.empty()) return std::make_unique<Staging>();
    auto staging = std::move(free_.back());
    free_.pop_back();
    return staging;
  }
  void give_back(std::unique_ptr<Staging> staging) {
    const std::lock_guard lock(guard_);
    free_.push_back(std::move(staging));
  }

 private:
  std::mutex guard_;
  std::vector<std::unique_ptr<Staging>> free_;
};

StagingPool& staging_pool() {
  static auto* const pool = new StagingPool;  // outlives the driver, which ends before statics do
  return *pool;
}

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

bool copy_numbers(const ByteReader& read, const torch::Tensor& place) {
  const torch::Tensor target = place.view({-1}).view(torch::kUInt8);
  auto staging = place.is_cuda() ? staging_pool().take() : nullptr;
  bool finite = true;
  for (int64_t first = 0; first < target.numel(); first += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, target.numel() - first);
    const torch::Tensor part = target.narrow(0, first, bytes);
    const torch::Tensor piece = staging ? staging->next(bytes) : part;
    auto* const numbers = static_cast<std::byte*>(piece.data_ptr());
    read(static_cast<size_t>(first), static_cast<size_t>(bytes), numbers);
    finite = all_finite(numbers, bytes / place.element_size(), place.scalar_type()) && finite;
    if (staging) staging->send(part);
  }
  if (staging) staging_pool().give_back(std::move(staging));
  return finite;
}

}  // namespace oscar
