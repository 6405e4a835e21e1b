// Noise-shaped rounding and metric scale correction: a row a lane, sixteen columns at a time like a
// triangular solve.
#include "append_rows.cuh"
#include "append_shaped.h"
#include "metric_scale.cuh"
#include "shaped_push.cuh"

namespace oscar {
namespace {

// Shared memory of a block, which takes kRows tokens of one (request, head, side).
template <int kHeadDim>
struct ShapedTile {
  static constexpr int kBlocks = kHeadDim / kColumns;  // of columns
  static constexpr int kWarps = kHeadDim <= 128 ? 4 : 2;
  static constexpr int kThreads = kWarps * 32, kRows = kThreads;
  static constexpr int kSlots = kBlocks - 1;  // nothing follows the last block of columns
  static constexpr int kResident = kHeadDim <= 128 ? 3 : 1;  // blocks a large multiprocessor holds
  uint8_t errors[kWarps][kSlots][kSlotBytes];
  uint8_t panel[kSlots][kPanelBytes];
  float diagonal[2][kColumns * kColumns];
  uint32_t codes[kBlocks][kRows];
  ScaleZero scales[kRows][4];  // a quantization group each
  uint32_t tops[kRows];        // largest magnitude, a bf16 pattern; sign bit: the row is written
};

// What a lane needs to code values of one quantization group of its row.
struct RowCoder {
  float threshold[3], value[4];
  __device__ explicit RowCoder(ScaleZero sz) {
#pragma unroll
    for (int k = 0; k < 3; ++k) threshold[k] = code_threshold(k + 1, sz);
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = dequantize(k, sz);
  }
};

// Scales of 32 rows, four lanes a row, several rows in step.
template <int kHeadDim>
__device__ __forceinline__ void scale_rows(const AppendParams& p, ShapedTile<kHeadDim>& tile, int b,
                                           int head, int side, int begin, int end, int first_row) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int lanes = 4 * p.format.quant_group_size / kHeadDim;
  constexpr int kAtOnce = kHeadDim <= 128 ? 4 : 2;
  const float clip = clip_of(p, head, side);
#pragma unroll 1
  for (int row = first_row + lane / 4; row < first_row + kWarpRows; row += 8 * kAtOnce) {
    QuarterRow<kHeadDim> x[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      x[r].load(history_row(p, b, min(begin + row + 8 * r, end - 1), head, side).x, t);
    }
    uint32_t top[kAtOnce], limit[kAtOnce];
    row_limits<kHeadDim, kAtOnce>(x, clip, top, limit);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int at = row + 8 * r;
      ScaleZero sz;
      const bool write = row_scale_zero<kHeadDim>(x[r], p.format, top[r], limit[r], sz, p.status) &&
                         begin + at < end;
      if (t % lanes == 0) tile.scales[at][t / lanes] = sz;
      if (t == 0) tile.tops[at] = top[r] | (write ? 0x80000000u : 0);
    }
  }
  __syncwarp();
}

// A power of two that brings the largest error a row can have to [2^9, 2^10), and its inverse
// with the scale of the feedback matrix.
struct ErrorScale {
  float up, down;
  __device__ ErrorScale(const ScaleZero* scales, int groups, uint32_t top) {
    float bound = __uint_as_float(top << 16);
    for (int g = 0; g < groups; ++g) {
      bound = fmaxf(bound, (fabsf(scales[g].zero) + 3.0f) * scales[g].scale);
    }
    const int exponent = min(126, static_cast<int>(__float_as_uint(2.0f * bound) >> 23) - 127);
    up = __uint_as_float(static_cast<uint32_t>(127 + 9 - exponent) << 23);
    down = 1.0f / (up * kFeedbackScale);
  }
};

// Codes of sixteen columns x of a row, one after the other: each error is pushed onto the columns
// after it (`diagonal`, the square of the feedback matrix). pushed: what earlier columns pushed.
__device__ __forceinline__ uint32_t code_columns(const RowCoder& coder, const uint4 (&x)[2],
                                                 const float* diagonal, float (&pushed)[kColumns],
                                                 float (&errors)[kColumns]) {
  uint32_t word = 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(x)[c / 2];
    const float value = __uint_as_float(c % 2 ? pair & 0xffff0000u : pair << 16);
    const float target = sub_rn(value, pushed[c]);
    const bool one = target >= coder.threshold[0], two = target >= coder.threshold[1];
    const bool three = target >= coder.threshold[2];
    const float near = one ? coder.value[1] : coder.value[0];
    const float far = three ? coder.value[3] : coder.value[2];
    const uint32_t bits = two ? (three ? 3u : 2u) : (one ? 1u : 0u);
    word |= bits << (2 * c);
    errors[c] = sub_rn(two ? far : near, value);
#pragma unroll
    for (int later = c + 1; later < kColumns; ++later) {
      pushed[later] = fmaf(errors[c], diagonal[c * kColumns + later], pushed[later]);
    }
  }
  return word;
}

// The codes of row `row` of the tile, in the order of the page.
template <int kHeadDim>
__device__ __forceinline__ void store_row_codes(const ShapedTile<kHeadDim>& tile, PackOrder order,
                                                int row, uint8_t* to) {
#pragma unroll
  for (int v = 0; v < kHeadDim / 64; ++v) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int w = 4 * v + i;
      if (order == PackOrder::kConsecutive) {
        words[i] = tile.codes[w][row];
        continue;
      }
      uint32_t word = 0;  // bytes 4 w .. 4 w + 3, one dimension of each quarter in a byte
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int dim = 4 * w + j / 4 + j % 4 * (kHeadDim / 4);
        word |= (tile.codes[dim / 16][row] >> (2 * (dim % 16)) & 3u) << (8 * (j / 4) + 2 * (j % 4));
      }
      words[i] = word;
    }
    reinterpret_cast<uint4*>(to)[v] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(ShapedTile<kHeadDim>::kThreads, ShapedTile<kHeadDim>::kResident)
    shaped_kernel(const __grid_constant__ AppendParams p) {
  using Tile = ShapedTile<kHeadDim>;
  extern __shared__ __align__(16) uint8_t shared[];
  Tile& tile = *reinterpret_cast<Tile*>(shared);
  const int b = blockIdx.y, head = blockIdx.z / 2, side = blockIdx.z % 2;
  const int begin = p.old_history[b] + blockIdx.x * Tile::kRows, end = p.new_history[b];
  if (begin >= end) return;
  const int row = threadIdx.x, lane = row % 32, warp = row / 32;
  const int64_t matrix = static_cast<int64_t>(head) * kHeadDim * kHeadDim;
  const float* feedback = side ? p.feedback_v : p.feedback_k;
  const float* metric = side ? p.metric_v : p.metric_k;
  if (feedback) feedback += matrix;
  if (metric) metric += matrix;
  const int group_size = p.format.quant_group_size, groups = kHeadDim / group_size;

  scale_rows<kHeadDim>(p, tile, b, head, side, begin, end, warp * kWarpRows);
  const HistoryRow at = history_row(p, b, min(begin + row, end - 1), head, side);
  const ErrorScale scale(tile.scales[row], groups, tile.tops[row] & 0x7fffffffu);
  uint8_t(*slots)[kSlotBytes] = tile.errors[warp];
  FeedbackColumns<kHeadDim, Tile::kThreads> columns;
  bool fits = true;
  if (feedback) {
    columns.load(feedback, 0);
    columns.store(0, tile.panel[0], tile.diagonal[0]);
  } else {  // nothing is pushed
    for (int i = row; i < kColumns * kColumns; i += Tile::kThreads) {
      tile.diagonal[0][i] = tile.diagonal[1][i] = 0.0f;
    }
    __syncthreads();
  }
  RowCoder coder(tile.scales[row][0]);
  int group = 0, group_end = group_size;
  const uint4* from = reinterpret_cast<const uint4*>(at.x);
  uint4 next[2] = {__ldg(from), __ldg(from + 1)};
#pragma unroll 1
  for (int block = 0; block < Tile::kBlocks; ++block) {
    const int column = block * kColumns;
    const uint4 raw[2] = {next[0], next[1]};
    if (block + 1 < Tile::kBlocks) {
      from += 2;
      next[0] = __ldg(from), next[1] = __ldg(from + 1);
    }
    const float* diagonal = tile.diagonal[block % 2];
    float pushed[kColumns] = {};
    if (feedback) {
      __syncthreads();  // the panel and the diagonal are there
      if (block > 0) {
        uint8_t* sums = slots[block < Tile::kSlots ? block : 0];
        push_errors(slots[0], tile.panel[0], block, sums, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 v = *reinterpret_cast<const float4*>(sums + chunk_offset(lane, i));
          pushed[4 * i] = v.x * scale.down, pushed[4 * i + 1] = v.y * scale.down;
          pushed[4 * i + 2] = v.z * scale.down, pushed[4 * i + 3] = v.w * scale.down;
        }
      }
      __syncthreads();  // and may be replaced
      if (block < Tile::kSlots) columns.load(feedback, column + kColumns);
    }
    if (column == group_end) {
      coder = RowCoder(tile.scales[row][++group]);
      group_end += group_size;
    }
    float errors[kColumns];
    tile.codes[block][row] = code_columns(coder, raw, diagonal, pushed, errors);
    if (feedback && block < Tile::kSlots) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint4*>(slots[block] + chunk_offset(lane, i)) =
            split_four(errors[4 * i] * scale.up, errors[4 * i + 1] * scale.up,
                       errors[4 * i + 2] * scale.up, errors[4 * i + 3] * scale.up);
      }
      fits &= columns.store(column + kColumns, tile.panel[0], tile.diagonal[(block + 1) % 2]);
    }
  }
  if (!fits && p.status) atomicOr(p.status, static_cast<int>(RowStatus::kNonFinite));

  float factor = 1.0f;
  if (metric) {
    factor =
        metric_scale<kHeadDim>(at.x, metric, &tile.codes[0][row], Tile::kRows, tile.scales[row],
                               group_size, reinterpret_cast<float*>(tile.errors));
  }
  if (tile.tops[row] >> 31 == 0) return;
  bool overflow = false;
  for (int g = 0; g < groups; ++g) {
    ScaleZero& sz = tile.scales[row][g];
    if (metric) sz.scale = round_to_metadata(mul_rn(sz.scale, factor), p.format.metadata);
    overflow |= !is_finite(sz.scale);
  }
  if (overflow) {
    if (p.status) atomicOr(p.status, static_cast<int>(RowStatus::kMetadataOverflow));
    return;
  }
  for (int g = 0; g < groups; ++g) store_scale_zero(p.format, at, side, g, tile.scales[row][g]);
  store_row_codes<kHeadDim>(tile, p.format.order, row,
                            at.chunk + code_offset(p.format, side, at.in_page));
}

}  // namespace

template <int kHeadDim>
cudaError_t quantize_shaped(const AppendParams& p, int max_new_history, cudaStream_t stream) {
  using Tile = ShapedTile<kHeadDim>;
  static_assert(sizeof(Tile) <= 99 * 1024 - 1024, "fits a block of every supported device");
  const cudaError_t error =
      cudaFuncSetAttribute(shaped_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(Tile)));
  if (error != cudaSuccess) return error;
  const dim3 grid((max_new_history + Tile::kRows - 1) / Tile::kRows, p.batch, 2 * p.num_kv_heads);
  shaped_kernel<kHeadDim><<<grid, Tile::kThreads, sizeof(Tile), stream>>>(p);
  return cudaGetLastError();
}

template cudaError_t quantize_shaped<64>(const AppendParams&, int, cudaStream_t);
template cudaError_t quantize_shaped<128>(const AppendParams&, int, cudaStream_t);
template cudaError_t quantize_shaped<256>(const AppendParams&, int, cudaStream_t);

}  // namespace oscar
