// Numbers as the codec sees them, on a CPU and on a GPU: fp16 and bf16 as bits, and arithmetic
// that is rounded once.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define OSCAR_HOST_DEVICE __host__ __device__
#else
#define OSCAR_HOST_DEVICE
#endif

namespace oscar {

// Conversions between fp32 and the 16-bit formats of the cache, the same bits on host and device
// (but for the payload of a NaN).

OSCAR_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

OSCAR_HOST_DEVICE inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

OSCAR_HOST_DEVICE inline float bf16_to_float(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

OSCAR_HOST_DEVICE inline bool is_finite_bf16(uint16_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

// Round to nearest even; NaN stays NaN, overflow becomes infinity.
OSCAR_HOST_DEVICE inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

OSCAR_HOST_DEVICE inline float fp16_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
  if (exponent == 31u) return float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0u) return float_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // * 2^-24
  return float_from_bits(sign | float_bits(magnitude));
#endif
}

// Round to nearest even, subnormals included; overflow becomes infinity.
OSCAR_HOST_DEVICE inline uint16_t float_to_fp16(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(float_bits(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
#endif
}

// fp32 arithmetic that rounds after every operation, on host and device: no fused multiply-add.

// The host side relies on -ffp-contract=off, which the build sets for every source.
#if defined(__CUDA_ARCH__)
__device__ inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float div_rn(float a, float b) { return __fdiv_rn(a, b); }
#else
OSCAR_HOST_DEVICE inline float add_rn(float a, float b) { return a + b; }
OSCAR_HOST_DEVICE inline float sub_rn(float a, float b) { return a - b; }
OSCAR_HOST_DEVICE inline float mul_rn(float a, float b) { return a * b; }
OSCAR_HOST_DEVICE inline float div_rn(float a, float b) { return a / b; }
#endif

}  // namespace oscar
