// Attention of sampled queries in two passes over the scores, which are never stored: one by query,
// for its softmax and what it pays in all, one by key.
#include <cuda_bf16.h>

#include "oscar_kernels/received.h"
#include "ptx.cuh"

namespace oscar {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTile = 64;  // rows that a thread block owns, 16 a warp, and rows that pass them
constexpr int kMaxTokens = 1 << 30;
constexpr float kLog2E = 1.4426950408889634f;

// Of the softmax of a query, from the first pass.
struct QuerySum {
  float most, inverse;         // p = 2^(scaled score - most) inverse: near 1 as exact as elsewhere
  float even_key, even_value;  // what each of its INT2 rows gets of the even share
};

template <int kHeadDim>
struct Shape {
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kPitch = 2 * kHeadDim + 16;  // bytes: eight rows cover all banks
  static constexpr int kStageBytes = kTile * kPitch, kSharedBytes = 2 * kStageBytes;
};

// Starts the copies of 64 rows; rows from `count` on become zero.
template <int kHeadDim, typename RowAt>
__device__ void copy_rows(uint32_t to, int count, const RowAt& row_at) {
  constexpr int kOctets = kHeadDim / 8;  // of 16 bytes in a row
  for (int i = threadIdx.x; i < kTile * kOctets; i += kThreads) {
    const int row = i / kOctets, octet = i % kOctets;
    const bool copied = row < count;
    ptx::copy_16_or_zero(to + row * Shape<kHeadDim>::kPitch + 16 * octet,
                         row_at(copied ? row : 0) + 8 * octet, copied);
  }
  ptx::commit_copies();
}

// The warp's 16 rows as operand A, for all dims.
template <int kHeadDim>
struct OwnRows {
  uint32_t a[Shape<kHeadDim>::kSteps][4];

  // Copies the block's 64 rows to `stage`, which is free again when this returns.
  template <typename RowAt>
  __device__ void load(uint32_t stage, int count, const RowAt& row_at) {
    copy_rows<kHeadDim>(stage, count, row_at);
    ptx::wait_copies<0>();
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t at =
        stage + (16 * warp + lane % 16) * Shape<kHeadDim>::kPitch + 16 * (lane / 16);
#pragma unroll
    for (int s = 0; s < Shape<kHeadDim>::kSteps; ++s) ptx::ldmatrix_x4(a[s], at + 32 * s);
    __syncthreads();
  }
};

// Scores of the warp's rows and the 64 of a stage: of row lane / 4 and 8 further down (e / 2), and
// of the stage's row 8 n + 2 (lane % 4) + e % 2.
template <int kHeadDim>
__device__ void multiply(const OwnRows<kHeadDim>& own, uint32_t stage, float (&scores)[8][4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t at =
      stage + (lane % 8 + 8 * (lane / 16)) * Shape<kHeadDim>::kPitch + 16 * (lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (float& x : scores[n]) x = 0;
  }
#pragma unroll
  for (int s = 0; s < Shape<kHeadDim>::kSteps; ++s) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, at + 8 * n * Shape<kHeadDim>::kPitch + 32 * s);
      ptx::mma_bf16(scores[n], own.a[s][0], own.a[s][1], own.a[s][2], own.a[s][3], b[0], b[1]);
      ptx::mma_bf16(scores[n + 1], own.a[s][0], own.a[s][1], own.a[s][2], own.a[s][3], b[2], b[3]);
    }
  }
}

__device__ float sum_of_four(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

__device__ const __nv_bfloat16* row_of(const ReceivedRows& x, int head, int64_t token) {
  return static_cast<const __nv_bfloat16*>(x.rows) + head * x.head_stride + token * x.token_stride;
}

// Thread block (64 queries, query head).
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    query_kernel(const __grid_constant__ ReceivedParams p, QuerySum* sums) {
  extern __shared__ __align__(16) uint8_t shared_rows[];
  const uint32_t shared = ptx::shared_address(shared_rows);
  const int head = blockIdx.y, kv_head = head / (p.num_qo_heads / p.num_kv_heads);
  const int first_query = blockIdx.x * kTile;
  const int count = min(kTile, p.queries - first_query);
  const int32_t *at = p.reach + first_query, *seen = at + p.queries, *begin = seen + p.queries,
                *end = begin + p.queries;
  OwnRows<kHeadDim> own;
  own.load(shared, count, [&](int row) { return row_of(p.q, head, at[row]); });

  const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32) + lane / 4;
  // Keys from which on the two rows of this lane see nothing, and their other bounds.
  int first_key[2], last_key[2], int2_begin[2], int2_end[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = min(row + 8 * r, count - 1);
    first_key[r] = seen[i], last_key[r] = at[i], int2_begin[r] = begin[i], int2_end[r] = end[i];
  }
  const int from = seen[0] / kTile, to = at[count - 1] / kTile + 1;  // tiles of keys
  const auto copy_keys = [&](int tile) {
    copy_rows<kHeadDim>(shared + tile % 2 * Shape<kHeadDim>::kStageBytes,
                        min(kTile, p.tokens - tile * kTile),
                        [&](int key) { return row_of(p.k, kv_head, int64_t{tile} * kTile + key); });
  };
  const float scale = p.sm_scale * kLog2E;
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {}, int2_sum[2] = {}, int2_squares[2] = {};
  copy_keys(from);
  for (int tile = from; tile < to; ++tile) {
    ptx::wait_copies<0>();
    __syncthreads();
    if (tile + 1 < to) copy_keys(tile + 1);
    float scores[8][4];
    multiply(own, shared + tile % 2 * Shape<kHeadDim>::kStageBytes, scores);
    const int first = tile * kTile + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_most = most[r];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = first + 8 * n + c;
          float& x = scores[n][2 * r + c];
          x = key >= first_key[r] && key <= last_key[r] ? __fmul_rn(x, scale) : -INFINITY;
          tile_most = fmaxf(tile_most, x);
        }
      }
      if (tile_most == -INFINITY) continue;  // nothing seen so far
      const float factor = exp2f(most[r] - tile_most);
      most[r] = tile_most;
      sum[r] *= factor;
      int2_sum[r] *= factor;
      int2_squares[r] *= factor * factor;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = first + 8 * n + c;
          const float x = exp2f(scores[n][2 * r + c] - tile_most);
          sum[r] += x;
          if (key < int2_begin[r] || key >= int2_end[r]) continue;
          int2_sum[r] += x;
          int2_squares[r] += x * x;
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // The four lanes of a row have seen other keys each.
    float row_most = fmaxf(most[r], __shfl_xor_sync(~0U, most[r], 1));
    row_most = fmaxf(row_most, __shfl_xor_sync(~0U, row_most, 2));
    const float factor = most[r] == -INFINITY ? 0 : exp2f(most[r] - row_most);
    const float total = sum_of_four(sum[r] * factor);
    const float paid = sum_of_four(int2_sum[r] * factor) / total;
    const float squares = sum_of_four(int2_squares[r] * factor * factor) / (total * total);
    const int i = row + 8 * r;
    if (lane % 4 != 0 || i >= count) continue;
    const int64_t out = int64_t{head} * p.queries + first_query + i;
    const float share = p.even_share / static_cast<float>(int2_end[r] - int2_begin[r]);
    p.query[out] = paid - squares;
    sums[out] = {row_most, 1 / total, share * (paid - squares), share * squares};
  }
}

// Thread block (64 keys, KV head).
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    key_kernel(const __grid_constant__ ReceivedParams p, const QuerySum* sums) {
  extern __shared__ __align__(16) uint8_t shared_rows[];
  __shared__ QuerySum tile_sums[kTile];
  __shared__ int2 tile_reach[kTile];
  const uint32_t shared = ptx::shared_address(shared_rows);
  const int kv_head = blockIdx.y, group = p.num_qo_heads / p.num_kv_heads;
  const int first_key = blockIdx.x * kTile, keys = min(kTile, p.tokens - first_key);
  const int32_t *at = p.reach, *begin = at + 2 * p.queries, *end = begin + p.queries;
  OwnRows<kHeadDim> own;
  own.load(shared, keys, [&](int key) { return row_of(p.k, kv_head, int64_t{first_key} + key); });

  const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32) + lane / 4;
  const float scale = p.sm_scale * kLog2E, own_share = 1 - p.even_share;
  float key_weight[2] = {}, value_weight[2] = {}, attention[2] = {};
  for (int member = 0; member < group; ++member) {
    const int head = kv_head * group + member;
    for (int first = 0; first < p.queries; first += kTile) {
      const int count = min(kTile, p.queries - first);
      // Both bounds ascend: queries further on may begin behind these keys, none end before.
      if (end[first + count - 1] <= first_key) continue;
      if (begin[first] >= first_key + keys) break;
      copy_rows<kHeadDim>(shared, count, [&](int i) { return row_of(p.q, head, at[first + i]); });
      if (threadIdx.x < kTile) {
        const int i = threadIdx.x;
        if (i < count) tile_sums[i] = sums[int64_t{head} * p.queries + first + i];
        tile_reach[i] = i < count ? make_int2(begin[first + i], end[first + i]) : int2{0, 0};
      }
      ptx::wait_copies<0>();
      __syncthreads();
      float scores[8][4];
      multiply(own, shared, scores);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int i = 8 * n + lane % 4 * 2 + c;
          const int2 reach = tile_reach[i];
          const QuerySum query = tile_sums[i];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int key = first_key + row + 8 * r;
            if (key < reach.x || key >= reach.y) continue;
            const float x =
                exp2f(__fmul_rn(scores[n][2 * r + c], scale) - query.most) * query.inverse;
            key_weight[r] += own_share * (x - x * x) + query.even_key;
            value_weight[r] += own_share * x * x + query.even_value;
            attention[r] += x;
          }
        }
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float key = sum_of_four(key_weight[r]), value = sum_of_four(value_weight[r]);
    const float paid = sum_of_four(attention[r]);
    const int i = row + 8 * r;
    if (lane % 4 != 0 || i >= keys) continue;
    const int64_t out = int64_t{kv_head} * p.tokens + first_key + i;
    p.key[out] = key;
    p.value[out] = value;
    p.attention[out] = paid;
  }
}

bool readable(const ReceivedRows& x) {
  return reinterpret_cast<uintptr_t>(x.rows) % 16 == 0 && (x.head_stride | x.token_stride) % 8 == 0;
}

template <int kHeadDim>
cudaError_t launch(const ReceivedParams& p, QuerySum* sums, cudaStream_t stream) {
  const int bytes = Shape<kHeadDim>::kSharedBytes;
  for (const void* kernel : {reinterpret_cast<const void*>(query_kernel<kHeadDim>),
                             reinterpret_cast<const void*>(key_kernel<kHeadDim>)}) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  const auto tiles = [](int count) { return static_cast<unsigned>((count + kTile - 1) / kTile); };
  const auto blocks = [&](int count, int heads) {
    return dim3(tiles(count), static_cast<unsigned>(heads));
  };
  query_kernel<kHeadDim><<<blocks(p.queries, p.num_qo_heads), kThreads, bytes, stream>>>(p, sums);
  key_kernel<kHeadDim><<<blocks(p.tokens, p.num_kv_heads), kThreads, bytes, stream>>>(p, sums);
  return cudaGetLastError();
}

}  // namespace

size_t received_workspace(const ReceivedParams& params) {
  return sizeof(QuerySum) * static_cast<size_t>(params.num_qo_heads) *
         static_cast<size_t>(params.queries);
}

cudaError_t received_weights(const ReceivedParams& p, void* workspace, cudaStream_t stream) {
  constexpr int kMostHeads = 65535;  // in a grid
  if (p.num_kv_heads <= 0 || p.num_qo_heads <= 0 || p.num_qo_heads % p.num_kv_heads != 0 ||
      p.tokens <= 0 || p.tokens > kMaxTokens || p.queries <= 0 || p.queries > p.tokens ||
      !p.q.rows || !p.k.rows || !p.reach || !p.key || !p.value || !p.attention || !p.query ||
      !workspace) {
    return cudaErrorInvalidValue;
  }
  if (!readable(p.q) || !readable(p.k) || p.num_qo_heads > kMostHeads) {
    return cudaErrorNotSupported;
  }
  auto* sums = static_cast<QuerySum*>(workspace);
  switch (p.head_dim) {
    case 64:
      return launch<64>(p, sums, stream);
    case 80:
      return launch<80>(p, sums, stream);
    case 96:
      return launch<96>(p, sums, stream);
    case 128:
      return launch<128>(p, sums, stream);
    case 192:
      return launch<192>(p, sums, stream);
    case 256:
      return launch<256>(p, sums, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace oscar
