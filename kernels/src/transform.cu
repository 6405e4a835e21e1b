// Rows times the matrix of their KV head, in fp32. A block has 32 columns of one matrix in
// registers, for all rows and heads that it is given.
#include <climits>

#include "device_limits.cuh"
#include "oscar_kernels/transform.h"
#include "ptx.cuh"
#include "row_codec.cuh"

namespace oscar {
namespace {

constexpr int kColumns = 32;  // of a block
constexpr int kDepth = 16;    // rows of the matrix of a warp; the warps of a block share them out

// A vector is one (row, head). A tile has as many rows as fit it with all heads of a KV head.
template <int kHeadDim>
struct Tile {
  static constexpr int kWarps = kHeadDim / kDepth, kThreads = 32 * kWarps;
  static constexpr int kResident = 512 / kThreads;  // blocks: 128 registers a thread
  static constexpr int kVectors = kHeadDim <= 128 ? 32 : 16;
  static constexpr int kLaneVectors = kVectors / 4;  // vectors of a lane: 4 of_lane + lane / 8
  static constexpr int kLoads = kVectors / 16;       // of eight values a thread, for a tile
  static constexpr int kOctets = kHeadDim / 8;       // of eight values in a row
  static constexpr int kPitch = kVectors + 4;  // keeps stores and loads off each other's banks
  static constexpr int kInFloats = kHeadDim * kPitch;
  static constexpr int kSharedBytes = 4 * (kInFloats + kWarps * kVectors * kColumns);
};

// Which rows a block takes of which tensor: blocks y in [first[t], first[t + 1]) share the tiles of
// tensor t.
struct TransformPlan {
  int first[kMaxTransforms + 1];
  int tile_rows[kMaxTransforms];
  int heads_per_kv[kMaxTransforms];
  uint32_t reciprocal[kMaxTransforms];  // vectors below 2^16 / heads_per_kv: v / heads_per_kv
};

// sums[of_lane] += x[vector `of_lane`][k] entries[k] over the warp's kDepth rows of the matrix. x
// lies in shared memory [row of the matrix][vector].
template <int kUsed, int kLaneVectors, int kPitch>
__device__ __forceinline__ void add_products(float4 (&sums)[kLaneVectors],
                                             const float4 (&entries)[kDepth], const float* x) {
#pragma unroll
  for (int of_lane = 0; of_lane < kUsed; ++of_lane)
    sums[of_lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
#pragma unroll
    for (int first = 0; first < kUsed; first += 4) {
      const float4 four = *reinterpret_cast<const float4*>(x + k * kPitch + 4 * first);
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4 && first + i < kUsed; ++i) {
        float4& sum = sums[first + i];
        sum.x = fmaf(values[i], entries[k].x, sum.x);
        sum.y = fmaf(values[i], entries[k].y, sum.y);
        sum.z = fmaf(values[i], entries[k].z, sum.z);
        sum.w = fmaf(values[i], entries[k].w, sum.w);
      }
    }
  }
}

// The same, and the sums to `to` [vector][kColumns].
template <int kUsed, int kLaneVectors, int kPitch>
__device__ __forceinline__ void multiply(const float4 (&entries)[kDepth], const float* x,
                                         float* to) {
  float4 sums[kLaneVectors];
  add_products<kUsed, kLaneVectors, kPitch>(sums, entries, x);
#pragma unroll
  for (int of_lane = 0; of_lane < kUsed; ++of_lane) {
    *reinterpret_cast<float4*>(to + 4 * of_lane * kColumns) = sums[of_lane];
  }
}

// Grid: x = KV head times column tiles, y = TransformPlan.
template <int kHeadDim>
__global__ void __launch_bounds__(Tile<kHeadDim>::kThreads, Tile<kHeadDim>::kResident)
    transform_kernel(const __grid_constant__ TransformParams p,
                     const __grid_constant__ TransformPlan plan) {
  using Shape = Tile<kHeadDim>;
  extern __shared__ __align__(16) float shared[];
  float* const in = shared;                      // [row of the matrix][vector], pitch kPitch
  float* const partial = in + Shape::kInFloats;  // [warp][vector][column]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int y = blockIdx.y;
  const int t = (y >= plan.first[1]) + (y >= plan.first[2]);
  const TransformRows& tensor = p.tensors[t];
  const int splits = plan.first[t + 1] - plan.first[t], group = plan.heads_per_kv[t];
  const int tile_rows = plan.tile_rows[t];
  const uint32_t reciprocal = plan.reciprocal[t];
  const int kv_head = blockIdx.x / (kHeadDim / kColumns);
  const int column = blockIdx.x % (kHeadDim / kColumns) * kColumns + 4 * (lane % 8);
  const auto row_of = [&](int vector) { return static_cast<int>(vector * reciprocal >> 16); };

  // What this thread brings of a tile: values 8 octet .. 8 octet + 7 of kLoads vectors. A warp
  // stores eight octets of four vectors at a time, which meet no bank twice.
  constexpr int kWide = kHeadDim / 64;
  const int octet = lane % 8 + 8 * (warp % kWide), place = lane / 8 + 4 * (warp / kWide);
  const int vector = place % 4 * 4 + place / 4;
  const uint16_t* from[Shape::kLoads];
  int row_in_tile[Shape::kLoads];
#pragma unroll
  for (int i = 0; i < Shape::kLoads; ++i) {
    row_in_tile[i] = row_of(vector + 16 * i);
    const int head = kv_head * group + vector + 16 * i - row_in_tile[i] * group;
    from[i] = row_at(tensor.x, row_in_tile[i], head) + 8 * octet;
    if (row_in_tile[i] >= tile_rows) row_in_tile[i] = INT_MAX / 2;  // beyond the tile
  }
  uint4 raw[Shape::kLoads];
  const auto fetch = [&](int first_row) {
#pragma unroll
    for (int i = 0; i < Shape::kLoads; ++i) {
      raw[i] = make_uint4(0, 0, 0, 0);
      if (row_in_tile[i] < p.rows - first_row) {
        raw[i] = *reinterpret_cast<const uint4*>(from[i] + first_row * tensor.x.row_stride);
      }
    }
  };
  const float* const mean =
      tensor.subtracted ? tensor.subtracted + kv_head * kHeadDim + 8 * octet : nullptr;
  const auto stage = [&]() {
    float less[8] = {};
    if (mean) {
      const float4 low = *reinterpret_cast<const float4*>(mean);
      const float4 high = *reinterpret_cast<const float4*>(mean + 4);
      less[0] = low.x, less[1] = low.y, less[2] = low.z, less[3] = low.w;
      less[4] = high.x, less[5] = high.y, less[6] = high.z, less[7] = high.w;
    }
#pragma unroll
    for (int i = 0; i < Shape::kLoads; ++i) {
      const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      float* const to = in + octet * Shape::kPitch + place + 16 * i;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const uint32_t bits = e % 2 ? words[e / 2] & 0xffff0000u : words[e / 2] << 16;
        to[e * Shape::kOctets * Shape::kPitch] = __uint_as_float(bits) - less[e];
      }
    }
  };

  // Row r = 16 warp + k of shared memory is entry r % kOctets * 8 + r / kOctets of a vector: the
  // first one of the warp, and how far the others are from it.
  const int first_entry = kDepth * warp % Shape::kOctets * 8 + kDepth * warp / Shape::kOctets;
  const auto entry_of = [](int k) { return k % Shape::kOctets * 8 + k / Shape::kOctets; };
  const float* const matrix =
      tensor.matrix + (int64_t{kv_head} * kHeadDim + first_entry) * kHeadDim + column;
  // The matrix is read before the wait: the kernel ahead does not write it (transform.h), and all
  // kernels before that one are done.
  float4 entries[kDepth];
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    entries[k] = *reinterpret_cast<const float4*>(matrix + entry_of(k) * kHeadDim);
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // Other addresses are worked out before it too: a branch that is never taken keeps them here.
  if (!from[0] || !from[Shape::kLoads - 1]) return;
  ptx::wait_for_previous();
  ptx::launch_next();
#endif
  int first_row = (y - plan.first[t]) * tile_rows;
  fetch(first_row);
#pragma unroll 1
  for (; first_row < p.rows; first_row += splits * tile_rows) {
    stage();
    const int next_row = first_row + splits * tile_rows;
    if (next_row < p.rows) fetch(next_row);
    __syncthreads();
    const int vectors = min(tile_rows, p.rows - first_row) * group;
    const float* const x = in + kDepth * warp * Shape::kPitch + 4 * (lane / 8);
    float* const sums = partial + (warp * Shape::kVectors + lane / 8) * kColumns + 4 * (lane % 8);
    if (vectors <= 4) {
      multiply<1, Shape::kLaneVectors, Shape::kPitch>(entries, x, sums);
    } else if (vectors <= 8) {
      multiply<2, Shape::kLaneVectors, Shape::kPitch>(entries, x, sums);
    } else if (vectors <= 16) {
      multiply<4, Shape::kLaneVectors, Shape::kPitch>(entries, x, sums);
    } else {
      multiply<Shape::kLaneVectors, Shape::kLaneVectors, Shape::kPitch>(entries, x, sums);
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < Shape::kVectors * 8; at += Shape::kThreads) {
      const int v = (at + threadIdx.x) / 8;
      if (v >= vectors) break;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const float4 part = *reinterpret_cast<const float4*>(
            partial + (w * Shape::kVectors + v) * kColumns + 4 * (lane % 8));
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      if (tensor.added) {
        const float4 add =
            *reinterpret_cast<const float4*>(tensor.added + kv_head * kHeadDim + column);
        sum.x += add.x, sum.y += add.y, sum.z += add.z, sum.w += add.w;
      }
      const int row = row_of(v), head = kv_head * group + v - row * group;
      const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum.x, sum.y),
                                       __floats2bfloat162_rn(sum.z, sum.w)};
      uint2 words;
      memcpy(&words, pairs, sizeof(words));
      uint16_t* const to =
          tensor.out + ((int64_t{first_row} + row) * tensor.num_heads + head) * kHeadDim + column;
      *reinterpret_cast<uint2*>(to) = words;
    }
  }
}

template <int kHeadDim>
cudaError_t launch_transform(const TransformParams& p, cudaStream_t stream) {
  using Shape = Tile<kHeadDim>;
  DeviceLimits limits;
  cudaError_t error = device_limits(&limits);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(transform_kernel<kHeadDim>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const int items = p.num_kv_heads * (kHeadDim / kColumns);
  TransformPlan plan = {};
  int64_t tiles[kMaxTransforms] = {}, all = 0;
  for (int t = 0; t < p.num_tensors; ++t) {
    const int group = p.tensors[t].num_heads / p.num_kv_heads;
    plan.heads_per_kv[t] = group;
    plan.tile_rows[t] = Shape::kVectors / group;
    plan.reciprocal[t] = (65536u + group - 1) / group;
    tiles[t] = (int64_t{p.rows} + plan.tile_rows[t] - 1) / plan.tile_rows[t];
    all += tiles[t] * items;
  }
  // A tile a block, until there are far more blocks than run at once: the matrix is read once for
  // all tiles of a block.
  constexpr int kRounds = 8;
  const int64_t at_once = int64_t{kRounds} * Shape::kResident * limits.blocks;
  const int64_t tiles_per_block = (all + at_once - 1) / at_once;
  for (int t = 0; t < kMaxTransforms; ++t) {
    plan.first[t + 1] =
        plan.first[t] + static_cast<int>((tiles[t] + tiles_per_block - 1) / tiles_per_block);
  }
  const EarlyLaunch launch(dim3(items, plan.first[kMaxTransforms]), Shape::kThreads,
                           Shape::kSharedBytes, stream, limits);
  return cudaLaunchKernelEx(&launch.config, transform_kernel<kHeadDim>, p, plan);
}

}  // namespace

bool valid_transform(const TransformParams& p) {
  const int d = p.head_dim;
  if ((d != 64 && d != 128 && d != 256) || p.num_kv_heads <= 0) return false;
  if (p.rows < 0 || p.rows > 1 << 30) return false;
  if (p.num_tensors < 1 || p.num_tensors > kMaxTransforms) return false;
  for (int t = 0; t < p.num_tensors; ++t) {
    const TransformRows& tensor = p.tensors[t];
    if (tensor.num_heads <= 0 || tensor.num_heads % p.num_kv_heads != 0) return false;
    if (tensor.num_heads / p.num_kv_heads > 16) return false;
    if (tensor.x.row_stride % 8 != 0 || tensor.x.head_stride % 8 != 0) return false;
    if (p.rows > 0 && (!tensor.x.data || !tensor.out || !tensor.matrix)) return false;
  }
  return true;
}

cudaError_t transform_rows(const TransformParams& params, cudaStream_t stream) {
  if (!valid_transform(params)) return cudaErrorInvalidValue;
  if (params.rows == 0) return cudaSuccess;
  if (params.head_dim == 64) return launch_transform<64>(params, stream);
  if (params.head_dim == 128) return launch_transform<128>(params, stream);
  return launch_transform<256>(params, stream);
}

}  // namespace oscar
