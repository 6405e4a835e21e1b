// x^T x and sum of x on the tensor cores, and the addition of the partial sums.
#pragma once

#include <cuda_bf16.h>

#include "gram_work.cuh"
#include "ptx.cuh"

namespace oscar {

// One warp for each 16 dims. Warp w multiplies its own 16 dims with those of warps w, w + 1, ...,
// half way round the circle: each pair of warps meets once (with an even number of warps, the pairs
// farthest apart meet twice and one of the two results is ignored), so the half of the symmetric
// matrix that is computed falls on the warps in equal parts.
template <int kHeadDim>
struct GramShape {
  static_assert(kHeadDim % 16 == 0 && kHeadDim >= 32 && kHeadDim <= 256);
  static constexpr int kWarps = kHeadDim / 16, kThreads = 32 * kWarps;
  static constexpr int kDistances = kWarps / 2 + 1;
  // Accumulators of many distances do not fit into the registers: the distances are then split
  // among thread blocks, which read the same rows.
  static constexpr int kSplits = kHeadDim <= 128 ? 1 : kHeadDim <= 192 ? 2 : 3;
  static constexpr int kColumns = (kDistances + kSplits - 1) / kSplits;

  // Rows lie 16 bytes further apart than they are long: eight rows then cover all banks.
  static constexpr int kPitch = 2 * kHeadDim + 16;
  static constexpr int kStageRows = 64, kStageBytes = kStageRows * kPitch;
  static constexpr int kResident = kHeadDim <= 64 ? 4 : kHeadDim <= 80 ? 3 : kHeadDim <= 96 ? 2 : 1;
  static constexpr int kMostShared = 99 * 1024;  // of sm_86, sm_89 and sm_120
  static constexpr int kStages = 4 * kStageBytes <= kMostShared   ? 4
                                 : 3 * kStageBytes <= kMostShared ? 3
                                                                  : 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMostShared && kGramBlockRows == 2 * kStageRows);

  // Doubles of one partial sum: [split][warp][column][8][lane], then the sum of x [kHeadDim].
  static constexpr int kTile = 8 * 32, kTiles = kSplits * kWarps * kColumns;
  static constexpr int kPartial = kTiles * kTile + kHeadDim;
};

// Kahan's sum; value() is the part that the next addition would still correct included.
struct CompensatedSum {
  float high = 0, low = 0;

  __device__ void add(float x) {
    const float y = __fsub_rn(x, low);
    const float total = __fadd_rn(high, y);
    low = __fsub_rn(__fsub_rn(total, high), y);
    high = total;
  }
  __device__ double value() const { return static_cast<double>(high) - static_cast<double>(low); }
};

// Copies the rows of one output, stage by stage, from some block of it on. A thread copies 16 bytes
// of every 16th row.
template <typename Shape>
struct GramReader {
  static constexpr int kOctets = Shape::kThreads / 16;  // of 16 bytes in a row

  const GramRows& tensor;
  const __nv_bfloat16* head;  // the group's first head in batch 0
  const __nv_bfloat16* from;  // this thread's part of the next stage
  int64_t row_step;           // 16 rows
  uint32_t to;
  int group, padded_tokens, batch, member, token;

  __device__ GramReader(const GramWork& work, int i, int kv_head, int64_t block, uint32_t shared)
      : tensor(work.params.tensors[i]) {
    group = tensor.num_heads / work.params.num_kv_heads;
    padded_tokens = work.sequence_blocks[i] * kGramBlockRows;
    head = static_cast<const __nv_bfloat16*>(tensor.rows) +
           int64_t{kv_head} * group * tensor.head_stride;
    row_step = 16 * tensor.token_stride;
    to = shared + threadIdx.x / kOctets * Shape::kPitch + threadIdx.x % kOctets * 16;
    const auto index = static_cast<int>(block / work.sequence_blocks[i]);
    batch = index / group;
    member = index % group;
    find(static_cast<int>(block % work.sequence_blocks[i]) * kGramBlockRows);
  }

  __device__ void find(int first_token) {
    token = first_token + threadIdx.x / kOctets;
    from = head + batch * tensor.batch_stride + member * tensor.head_stride +
           token * tensor.token_stride + threadIdx.x % kOctets * 8;
  }

  // Starts the copies of the next stage; rows past the end of the sequence become zero.
  __device__ void next(int index) {
#pragma unroll
    for (int i = 0; i < Shape::kStageRows / 16; ++i) {
      ptx::copy_16_or_zero(to + index * Shape::kStageBytes + i * 16 * Shape::kPitch, from,
                           token + 16 * i < tensor.tokens);
      from += row_step;
    }
    token += Shape::kStageRows;
    if (token < padded_tokens) return;
    if (++member == group) {
      member = 0;
      ++batch;
    }
    find(0);
  }
};

// Operands of 16 rows, transposed on the way from shared memory: A of the warp's own dims, B of its
// columns. Each holds 16 rows x 16 dims as four 8 x 8 matrices, in A with the dims running first,
// in B with the rows running first.
template <typename Shape>
struct GramOperands {
  uint32_t a[4], b[Shape::kColumns][4];

  __device__ void load(uint32_t rows, uint32_t own, const uint32_t (&other)[Shape::kColumns]) {
    ptx::ldmatrix_x4_trans(a, rows + own);
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) {
      if (Shape::kSplits == 1 && c == 0) {
        b[0][0] = a[0];
        b[0][1] = a[2];
        b[0][2] = a[1];
        b[0][3] = a[3];
      } else {
        ptx::ldmatrix_x4_trans(b[c], rows + other[c]);
      }
    }
  }
};

// Adds up `blocks` blocks and writes one partial sum.
template <typename Shape>
__device__ void gram_segment(GramReader<Shape> reader, int64_t blocks, uint32_t shared, int split,
                             double* partial) {
  constexpr int kColumns = Shape::kColumns, kSteps = Shape::kStageRows / 16;
  constexpr uint32_t kOnes = 0x3f803f80;  // two bf16 ones
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t stages = 2 * blocks;
#pragma unroll
  for (int s = 0; s < Shape::kStages - 1; ++s) {
    if (s < stages) reader.next(s);
    ptx::commit_copies();
  }

  // A lane names one row of one of the four matrices: 0 or 8 rows down, 0 or 8 dims (16 bytes) on.
  const int down = lane / 8 % 2, on = lane / 16;
  const uint32_t own = (lane % 8 + 8 * on) * Shape::kPitch + 16 * down + 32 * warp;
  uint32_t other[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int dims = (warp + split * kColumns + c) % Shape::kWarps;
    other[c] = (lane % 8 + 8 * down) * Shape::kPitch + 16 * on + 32 * dims;
  }
  float fresh[kColumns][2][4] = {}, fresh_sum[4] = {};
  CompensatedSum moment[kColumns][8], sum[2];
  int index = 0;
  for (int64_t s = 0; s < stages; ++s) {
    ptx::wait_copies<Shape::kStages - 2>();
    __syncthreads();
    const uint32_t stage = shared + index * Shape::kStageBytes;
    // The operands of the next 16 rows are on their way while these are multiplied.
    GramOperands<Shape> operands[2];
    operands[0].load(stage, own, other);
    if (s + Shape::kStages - 1 < stages) reader.next(index == 0 ? Shape::kStages - 1 : index - 1);
    ptx::commit_copies();
    index = index + 1 == Shape::kStages ? 0 : index + 1;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        operands[(step + 1) % 2].load(stage + (step + 1) * 16 * Shape::kPitch, own, other);
      }
      const GramOperands<Shape>& x = operands[step % 2];
      ptx::mma_bf16(fresh_sum, x.a[0], x.a[1], x.a[2], x.a[3], kOnes, kOnes);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        ptx::mma_bf16(fresh[c][0], x.a[0], x.a[1], x.a[2], x.a[3], x.b[c][0], x.b[c][1]);
        ptx::mma_bf16(fresh[c][1], x.a[0], x.a[1], x.a[2], x.a[3], x.b[c][2], x.b[c][3]);
      }
    }
    if (s % 2 == 0) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        moment[c][e].add(fresh[c][e / 4][e % 4]);
        fresh[c][e / 4][e % 4] = 0;
      }
    }
    sum[0].add(fresh_sum[0]);
    sum[1].add(fresh_sum[2]);
#pragma unroll
    for (float& x : fresh_sum) x = 0;
  }

  double* tile = partial + (split * Shape::kWarps + warp) * kColumns * Shape::kTile + lane;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) tile[c * Shape::kTile + e * 32] = moment[c][e].value();
  }
  if (split == 0 && lane % 4 == 0) {
    double* dims = partial + Shape::kTiles * Shape::kTile + 16 * warp + lane / 4;
    dims[0] = sum[0].value();
    dims[8] = sum[1].value();
  }
}

// Thread block kSplits * share + split: its share of the list, one output after the other.
template <int kHeadDim>
__global__ void __launch_bounds__(GramShape<kHeadDim>::kThreads, GramShape<kHeadDim>::kResident)
    gram_kernel(const __grid_constant__ GramWork work, double* partials) {
  using Shape = GramShape<kHeadDim>;
  extern __shared__ __align__(16) uint8_t rows[];
  const int split = blockIdx.x % Shape::kSplits;
  const int64_t share = blockIdx.x / Shape::kSplits;
  const int64_t end = work.share_begin(share + 1);
  int tensor = 0;
  for (int64_t block = work.share_begin(share); block < end;) {
    while (block >= work.first_block[tensor + 1]) ++tensor;
    const int64_t in_tensor = block - work.first_block[tensor];
    const auto kv_head = static_cast<int>(in_tensor / work.head_blocks[tensor]);
    const int64_t in_head = in_tensor % work.head_blocks[tensor];
    const int64_t left = work.head_blocks[tensor] - in_head;
    const int64_t count = left < end - block ? left : end - block;
    const int output = tensor * work.params.num_kv_heads + kv_head;
    const uint32_t shared = ptx::shared_address(rows);
    gram_segment(GramReader<Shape>(work, tensor, kv_head, in_head, shared), count, shared, split,
                 partials + (share + output) * Shape::kPartial);
    __syncthreads();  // the next segment writes to stages that other warps may still read
    block += count;
  }
}

// Thread block (output, tile): adds that tile of all partial sums in the order of the shares, and
// adds the total to the moment, on both sides of the diagonal. The last tile is the sum of x.
template <int kHeadDim>
__global__ void __launch_bounds__(GramShape<kHeadDim>::kTile)
    gram_total_kernel(const __grid_constant__ GramWork work, const double* partials) {
  using Shape = GramShape<kHeadDim>;
  const int output = blockIdx.x, tile = blockIdx.y, thread = threadIdx.x;
  const int tensor = output / work.params.num_kv_heads, kv_head = output % work.params.num_kv_heads;
  const GramRows& t = work.params.tensors[tensor];
  const bool is_sum = tile == Shape::kTiles;
  const int column = tile % Shape::kColumns, warp = tile / Shape::kColumns % Shape::kWarps;
  const int distance = tile / (Shape::kColumns * Shape::kWarps) * Shape::kColumns + column;
  const bool computed_twice =
      Shape::kWarps % 2 == 0 && distance == Shape::kWarps / 2 && warp >= Shape::kWarps / 2;
  if (!is_sum && (distance >= Shape::kDistances || computed_twice)) return;
  if ((is_sum && thread >= kHeadDim) || work.head_blocks[tensor] == 0) return;

  const int64_t first = work.first_block[tensor] + kv_head * work.head_blocks[tensor];
  const int64_t last_share = work.share_of(first + work.head_blocks[tensor] - 1);
  const int64_t first_share = work.share_of(first);
  const auto count = static_cast<int>(last_share - first_share + 1);
  const double* from =
      partials + (first_share + output) * Shape::kPartial + tile * Shape::kTile + thread;
  constexpr int kTogether = 16;  // loads in flight
  double total = 0;
  for (int i = 0; i < count; i += kTogether, from += kTogether * Shape::kPartial) {
    double part[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) part[j] = i + j < count ? from[j * Shape::kPartial] : 0;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) total += part[j];
  }
  if (is_sum) {
    t.sum[int64_t{kv_head} * kHeadDim + thread] += total;
    return;
  }
  // Where the tensor cores leave element e of a lane in two 16 x 8 accumulators side by side.
  const int lane = thread % 32, e = thread / 32;
  const int i = 16 * warp + lane / 4 + e / 2 % 2 * 8;
  const int j = 16 * ((warp + distance) % Shape::kWarps) + e / 4 * 8 + lane % 4 * 2 + e % 2;
  if (distance == 0 && i > j) return;
  double* moment = t.moment + int64_t{kv_head} * kHeadDim * kHeadDim;
  moment[i * kHeadDim + j] += total;
  if (i != j) moment[j * kHeadDim + i] += total;
}

}  // namespace oscar
