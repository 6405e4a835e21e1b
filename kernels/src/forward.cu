// Rows are read and written eight values, or a lane's share of a head, at a time; sums run over the
// lanes of a warp and then over the warps of a block, in an order that only the width decides.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstring>

#include "oscar_kernels/forward.h"

namespace oscar {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <int kPairs>
struct alignas(4 * kPairs) Packed {
  __nv_bfloat162 pair[kPairs];
};
using Eight = Packed<4>;

template <int kPairs>
__device__ __forceinline__ Packed<kPairs> load(const uint16_t* from) {
  return *reinterpret_cast<const Packed<kPairs>*>(from);
}
template <int kPairs>
__device__ __forceinline__ void store(uint16_t* to, const Packed<kPairs>& values) {
  *reinterpret_cast<Packed<kPairs>*>(to) = values;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// A row a block; a thread holds kVectors times eight values of it.
template <int kVectors>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormParams p) {
  __shared__ float partial[kWarps];
  const int64_t row = int64_t{blockIdx.x} * p.width;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Eight values[kVectors];
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = 8 * (v * kThreads + static_cast<int>(threadIdx.x));
    if (at >= p.width) continue;
    values[v] = load<4>(p.x + row + at);
    if (p.added) {
      const Eight more = load<4>(p.added + row + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = __bfloat1622float2(values[v].pair[i]);
        const float2 b = __bfloat1622float2(more.pair[i]);
        values[v].pair[i] = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
      }
      store(p.sum + row + at, values[v]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = __bfloat1622float2(values[v].pair[i]);
      squares = fmaf(x.x, x.x, squares);
      squares = fmaf(x.y, x.y, squares);
    }
  }
  squares = warp_sum(squares);
  if (lane == 0) partial[warp] = squares;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += partial[w];
  const float scale = rsqrtf(total / static_cast<float>(p.width) + p.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = 8 * (v * kThreads + static_cast<int>(threadIdx.x));
    if (at >= p.width) continue;
    const Eight weight = load<4>(p.weight + at);
    Eight out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = __bfloat1622float2(values[v].pair[i]);
      const float2 w = __bfloat1622float2(weight.pair[i]);
      out.pair[i] = __floats2bfloat162_rn(x.x * scale * w.x, x.y * scale * w.y);
    }
    store(p.out + row + at, out);
  }
}

// A token a block, heads in turn a warp: cosines and sines stay in registers. A lane holds
// neighbouring dimensions, and its partner those that turn with them.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) rotate_kernel(const __grid_constant__ RotateParams p) {
  constexpr int kOwn = kHeadDim / 32, kPairs = kOwn / 2;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int half = p.rotary_dim / 2, first = lane * kOwn;
  const bool low = first < half, turns = first < 2 * half;
  const int partner = low ? lane + half / kOwn : turns ? lane - half / kOwn : lane;
  float cos[kOwn], sin[kOwn];
  const int64_t angles = row % p.tokens * half + (low ? first : first - half);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    cos[i] = turns ? p.cos[angles + i] : 1.0f;
    sin[i] = turns ? (low ? -p.sin[angles + i] : p.sin[angles + i]) : 0.0f;
  }
  const int heads = p.num_qo_heads + p.num_kv_heads;
  const uint16_t* const from = p.qkv + row * (heads + p.num_kv_heads) * kHeadDim + first;
  for (int head = warp; head < heads; head += kWarps) {
    const bool query = head < p.num_qo_heads;
    const Packed<kPairs> own = load<kPairs>(from + head * kHeadDim);
    float x[kOwn];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = __bfloat1622float2(own.pair[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      squares = fmaf(pair.x, pair.x, squares);
      squares = fmaf(pair.y, pair.y, squares);
    }
    if (p.q_norm) {
      const float scale = rsqrtf(warp_sum(squares) / kHeadDim + p.eps);
      const Packed<kPairs> weight = load<kPairs>((query ? p.q_norm : p.k_norm) + first);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 w = __bfloat1622float2(weight.pair[i]);
        const float2 rounded = __bfloat1622float2(
            __floats2bfloat162_rn(x[2 * i] * scale * w.x, x[2 * i + 1] * scale * w.y));
        x[2 * i] = rounded.x, x[2 * i + 1] = rounded.y;
      }
    }
    float turned[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float other = __shfl_sync(~0u, x[i], partner);
      turned[i] = turns ? fmaf(other, sin[i], x[i] * cos[i]) : x[i];
    }
    Packed<kPairs> out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      out.pair[i] = __floats2bfloat162_rn(turned[2 * i], turned[2 * i + 1]);
    }
    uint16_t* const to = query ? p.q + (row * p.num_qo_heads + head) * kHeadDim
                               : p.k + (row * p.num_kv_heads + head - p.num_qo_heads) * kHeadDim;
    store(to + first, out);
  }
}

// Grid: x over the vectors of a row, y over rows.
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateParams p) {
  const int at = 8 * (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x));
  if (at >= p.width) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const uint16_t* const from = p.gate_up + row * 2 * p.width + at;
    const Eight gates = load<4>(from), ups = load<4>(from + p.width);
    Eight out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 g = __bfloat1622float2(gates.pair[i]), u = __bfloat1622float2(ups.pair[i]);
      const float2 s = __bfloat1622float2(
          __floats2bfloat162_rn(g.x / (1.0f + expf(-g.x)), g.y / (1.0f + expf(-g.y))));
      out.pair[i] = __floats2bfloat162_rn(s.x * u.x, s.y * u.y);
    }
    store(p.out + row * p.width + at, out);
  }
}

constexpr int64_t kMostRows = int64_t{1} << 31;  // blocks of a grid

}  // namespace

cudaError_t add_and_norm(const NormParams& p, cudaStream_t stream) {
  constexpr int kMostVectors = 8;
  if (p.width <= 0 || p.width % 8 != 0 || p.width > 8 * kThreads * kMostVectors) {
    return cudaErrorNotSupported;
  }
  if (p.rows < 0 || p.rows >= kMostRows || !p.added != !p.sum) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(p.rows);
  const int vectors = (p.width + 8 * kThreads - 1) / (8 * kThreads);
  if (vectors == 1) {
    norm_kernel<1><<<blocks, kThreads, 0, stream>>>(p);
  } else if (vectors == 2) {
    norm_kernel<2><<<blocks, kThreads, 0, stream>>>(p);
  } else if (vectors <= 4) {
    norm_kernel<4><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    norm_kernel<kMostVectors><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t norm_and_rotate(const RotateParams& p, cudaStream_t stream) {
  const int d = p.head_dim;
  if (d != 64 && d != 128 && d != 256) return cudaErrorNotSupported;
  if (p.rotary_dim < 0 || p.rotary_dim > d || p.rotary_dim % (d / 16) != 0) {
    return cudaErrorNotSupported;
  }
  if (p.rows < 0 || p.rows >= kMostRows || p.tokens <= 0) return cudaErrorInvalidValue;
  if (p.num_qo_heads < 0 || p.num_kv_heads < 0) return cudaErrorInvalidValue;
  if (!p.q_norm != !p.k_norm) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(p.rows);
  if (d == 64) {
    rotate_kernel<64><<<blocks, kThreads, 0, stream>>>(p);
  } else if (d == 128) {
    rotate_kernel<128><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    rotate_kernel<256><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t gate(const GateParams& p, cudaStream_t stream) {
  if (p.width <= 0 || p.width % 8 != 0) return cudaErrorNotSupported;
  if (p.rows < 0) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  constexpr int64_t kMostInY = 65535;
  const dim3 blocks(static_cast<unsigned>((p.width / 8 + kThreads - 1) / kThreads),
                    static_cast<unsigned>(std::min(p.rows, kMostInY)));
  gate_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace oscar
