// The seeded order of documents, the same on every platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oscar {

// SplitMix64 (Steele, Lea and Flood 2014).
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next();
  // Uniform in [0, bound), by rejection; bound > 0.
  uint64_t below(uint64_t bound);

 private:
  uint64_t state_;
};

// Fisher-Yates shuffle of 0 .. count-1 driven by SplitMix64(seed).
std::vector<size_t> shuffled_order(size_t count, uint64_t seed);

}  // namespace oscar
