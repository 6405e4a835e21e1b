// fp32 arithmetic that rounds after every operation, on host and device: no fused multiply-add.
#pragma once

#include "oscar/cache/numeric.h"

namespace oscar {

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
