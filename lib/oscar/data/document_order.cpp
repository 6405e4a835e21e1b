// SplitMix64 and Fisher-Yates; the standard library's shuffle differs between platforms.
#include "oscar/data/document_order.h"

#include <numeric>
#include <utility>

namespace oscar {

uint64_t SplitMix64::next() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

uint64_t SplitMix64::below(uint64_t bound) {
  const uint64_t uneven = (0 - bound) % bound;  // 2^64 mod bound: values that would favour some
  uint64_t value = next();
  while (value < uneven) value = next();
  return value % bound;
}

std::vector<size_t> shuffled_order(size_t count, uint64_t seed) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  SplitMix64 random(seed);
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace oscar
