// Where codes begin: the codec's division, additions and comparisons as one comparison per code
// (math 4.4).
#pragma once

#include "oscar/cache/codec.h"

namespace oscar {

// The neighbour of a finite value other than zero, towards -infinity or +infinity.
OSCAR_HOST_DEVICE inline float float_below(float x) {
  const uint32_t bits = float_bits(x);
  return float_from_bits(x > 0.0f ? bits - 1 : bits + 1);
}
OSCAR_HOST_DEVICE inline float float_above(float x) {
  const uint32_t bits = float_bits(x);
  return float_from_bits(x > 0.0f ? bits + 1 : bits - 1);
}

// Smallest float >= x.
OSCAR_HOST_DEVICE inline float float_from_below(double x) {
#if defined(__CUDA_ARCH__)
  return __double2float_ru(x);
#else
  const float nearest = static_cast<float>(x);
  return static_cast<double>(nearest) < x ? float_above(nearest) : nearest;
#endif
}

// The smallest fp32 x with code_of(x, sz) >= k, k = 1, 2 or 3 (codec.h); infinity if there is none.
// The codec's arithmetic is undone from its end. w + 0.5 rounds to k or more from a certain float w
// on; so quotient + zero has to reach the middle between w and the float below it, `sum`: at k = 1
// that middle rounds down, at 2 and 3 up to the even w. From there on quotients are >= `quotient`,
// and x / scale has to pass the middle below it in turn. That middle has 25 significant bits, so
// no fp32 x equals scale times it, and the product is exact in double.
OSCAR_HOST_DEVICE inline float code_threshold(int k, ScaleZero sz) {
  constexpr double kUlp = 1.0 / (1 << 24);
  const double sum = (k == 1 ? 0.5 - 0.75 * kUlp : k == 2 ? 1.5 - kUlp : 2.5 - 2 * kUlp) - sz.zero;
  float quotient = float_from_below(sum);
  if (k == 1 && static_cast<double>(quotient) == sum) quotient = float_above(quotient);
  const double middle = 0.5 * (static_cast<double>(float_below(quotient)) + quotient);
  return float_from_below(middle * sz.scale);
}

// Bit pattern of the smallest bf16 that is >= x.
OSCAR_HOST_DEVICE inline uint32_t bf16_from_below(float x) {
  const uint32_t bits = float_bits(x);
  return (x < 0.0f ? bits : bits + 0xffffu) >> 16;
}

}  // namespace oscar
