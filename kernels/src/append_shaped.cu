// Noise-shaped rounding: two rows a thread, sixteen columns at a time like a triangular solve.
#include "append_rows.cuh"
#include "append_shaped.h"
#include "oscar/cache/scale_correction.h"

namespace oscar {
namespace {

constexpr int kThreads = 128, kColumns = 16;

// A block takes kThreads * kPerThread tokens of one (request, head, side).
template <int kHeadDim>
struct ShapedTile {
  static constexpr int kPerThread = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kRows = kThreads * kPerThread;
  static constexpr int kErrorPitch = kRows, kValuePitch = kRows + 2;
  static constexpr size_t kErrorBytes = sizeof(float) * kHeadDim * kErrorPitch;
  static constexpr size_t kValueBytes = sizeof(uint16_t) * kHeadDim * kValuePitch;
  static constexpr size_t kScaleBytes = sizeof(ScaleZero) * 4 * kRows;
  static constexpr size_t kCodeBytes = sizeof(uint32_t) * kHeadDim / kColumns * kRows;
  static constexpr size_t kPanelBytes = sizeof(float) * kHeadDim * kColumns;
  static constexpr size_t kBytes =
      kErrorBytes + kValueBytes + kScaleBytes + kCodeBytes + kPanelBytes + kRows;
};

// Sums over j in [0, count) of left[j][row] * panel[j][..16) for this thread's rows.
// kExact: separately rounded products and sums, ascending, as the codec's definition has them.
template <int kHeadDim, bool kExact, typename Left>
__device__ __forceinline__ void column_sums(
    Left left, const float* panel, int count,
    float (&sums)[ShapedTile<kHeadDim>::kPerThread][kColumns]) {
  constexpr int kPer = ShapedTile<kHeadDim>::kPerThread;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    float entries[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) {
      const float4 v = *reinterpret_cast<const float4*>(panel + j * kColumns + c);
      entries[c] = v.x, entries[c + 1] = v.y, entries[c + 2] = v.z, entries[c + 3] = v.w;
    }
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      const float factor = left(j, r);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums[r][c] = kExact ? add_rn(sums[r][c], mul_rn(factor, entries[c]))
                            : fmaf(factor, entries[c], sums[r][c]);
      }
    }
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) shaped_kernel(const __grid_constant__ AppendParams p) {
  using Tile = ShapedTile<kHeadDim>;
  constexpr int kPer = Tile::kPerThread;
  extern __shared__ __align__(16) uint8_t shared[];
  float* errors = reinterpret_cast<float*>(shared);                            // [d][rows]
  uint16_t* values = reinterpret_cast<uint16_t*>(shared + Tile::kErrorBytes);  // [d][rows + 2]
  ScaleZero* scales =
      reinterpret_cast<ScaleZero*>(shared + Tile::kErrorBytes + Tile::kValueBytes);  // [rows][4]
  // Sixteen columns of a matrix, rows [0, count), for all threads.
  const auto load_panel = [&](const float* from, int column, int count, float* to) {
    __syncthreads();
    for (int i = threadIdx.x; i < count * (kColumns / 4); i += kThreads) {
      const int j = i / (kColumns / 4), c = i % (kColumns / 4) * 4;
      *reinterpret_cast<float4*>(to + j * kColumns + c) =
          __ldg(reinterpret_cast<const float4*>(from + j * kHeadDim + column + c));
    }
    __syncthreads();
  };
  uint32_t* codes = reinterpret_cast<uint32_t*>(scales + 4 * Tile::kRows);  // [d / 16][rows]
  float* panel = reinterpret_cast<float*>(codes + kHeadDim / kColumns * Tile::kRows);  // [d][16]
  uint8_t* writes = shared + Tile::kBytes - Tile::kRows;
  const int b = blockIdx.y, head = blockIdx.z / 2, side = blockIdx.z % 2;
  const int begin = p.old_history[b] + blockIdx.x * Tile::kRows, end = p.new_history[b];
  if (begin >= end) return;
  const int64_t matrix = static_cast<int64_t>(head) * kHeadDim * kHeadDim;
  const float* feedback = side ? p.feedback_v : p.feedback_k;
  const float* metric = side ? p.metric_v : p.metric_k;
  if (feedback) feedback += matrix;
  if (metric) metric += matrix;
  const int group_size = p.format.quant_group_size, groups = kHeadDim / group_size;

  // Four lanes a row: scales, and the values turned to [dimension][row].
  const int lane = threadIdx.x % 32, t = lane % 4;
  for (int base = threadIdx.x / 32 * 8; base < Tile::kRows; base += kThreads / 32 * 8) {
    const int row = base + lane / 4, token = min(begin + row, end - 1);
    const HistoryRow at = history_row(p, b, token, head, side);
    QuarterRow<kHeadDim> x;
    x.load(at.x, t);
    ScaleZero sz;
    const bool write =
        row_scale_zero<kHeadDim>(x, p.format, clip_of(p, head, side), sz, p.status) &&
        begin + row < end;
    const int lanes = 4 / groups;
    if (t % lanes == 0) scales[row * 4 + t / lanes] = sz;
    if (t == 0) writes[row] = write;
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      values[(t * (kHeadDim / 4) + i) * Tile::kValuePitch + row] =
          static_cast<uint16_t>(x.pair[i / 2] >> (16 * (i % 2)));
    }
  }
  __syncthreads();

  const auto row_of = [&](int r) { return static_cast<int>(threadIdx.x) + r * kThreads; };
  const auto value = [&](int j, int r) {
    return bf16_to_float(values[j * Tile::kValuePitch + row_of(r)]);
  };
  const auto error = [&](int j, int r) { return errors[j * Tile::kErrorPitch + row_of(r)]; };
#pragma unroll 1
  for (int block = 0; block < kHeadDim / kColumns; ++block) {
    const int column = block * kColumns;
    float pushed[kPer][kColumns] = {};
    if (feedback) {
      load_panel(feedback, column, column + kColumns, panel);
      column_sums<kHeadDim, false>(error, panel, column, pushed);
    }
    ScaleZero sz[kPer];
    uint32_t word[kPer] = {};
#pragma unroll
    for (int r = 0; r < kPer; ++r) sz[r] = scales[row_of(r) * 4 + column / group_size];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kPer; ++r) {
        const float x = value(column + c, r);
        const int code = code_of(sub_rn(x, pushed[r][c]), sz[r]);
        const float e = sub_rn(dequantize(code, sz[r]), x);
        word[r] |= static_cast<uint32_t>(code) << (2 * c);
        errors[(column + c) * Tile::kErrorPitch + row_of(r)] = e;
        if (feedback) {
#pragma unroll
          for (int later = c + 1; later < kColumns; ++later) {
            pushed[r][later] = fmaf(e, __ldg(feedback + (column + c) * kHeadDim + column + later),
                                    pushed[r][later]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kPer; ++r) codes[block * Tile::kRows + row_of(r)] = word[r];
  }

  float factor[kPer];
#pragma unroll
  for (int r = 0; r < kPer; ++r) factor[r] = 1.0f;
  if (metric) {
    float num[kPer] = {}, den[kPer] = {};
#pragma unroll 1
    for (int column = 0; column < kHeadDim; column += kColumns) {
      float weighted[kPer][kColumns] = {};  // (x M), exact: it decides how a scale rounds
      load_panel(metric, column, kHeadDim, panel);
      column_sums<kHeadDim, true>(value, panel, kHeadDim, weighted);
#pragma unroll
      for (int r = 0; r < kPer; ++r) {
        const ScaleZero sz = scales[row_of(r) * 4 + column / group_size];
        const uint32_t word = codes[column / kColumns * Tile::kRows + row_of(r)];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float y = dequantize(word >> (2 * c) & 3, sz);
          num[r] = add_rn(num[r], mul_rn(weighted[r][c], value(column + c, r)));
          den[r] = add_rn(den[r], mul_rn(weighted[r][c], y));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kPer; ++r) factor[r] = correction_factor(num[r], den[r]);
  }

#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int row = row_of(r);
    if (!writes[row]) continue;
    const HistoryRow at = history_row(p, b, begin + row, head, side);
    bool overflow = false;
    for (int g = 0; g < groups; ++g) {
      ScaleZero sz = scales[row * 4 + g];
      if (metric) sz.scale = round_to_metadata(mul_rn(sz.scale, factor[r]), p.format.metadata);
      overflow |= !is_finite(sz.scale);
      scales[row * 4 + g] = sz;
    }
    if (overflow) {
      if (p.status) atomicOr(p.status, static_cast<int>(RowStatus::kMetadataOverflow));
      continue;
    }
    for (int g = 0; g < groups; ++g) store_scale_zero(p.format, at, side, g, scales[row * 4 + g]);
    uint32_t* to = reinterpret_cast<uint32_t*>(at.chunk + code_offset(p.format, side, at.in_page));
#pragma unroll
    for (int w = 0; w < kHeadDim / kColumns; ++w) {
      if (p.format.order == PackOrder::kConsecutive) {
        to[w] = codes[w * Tile::kRows + row];
        continue;
      }
      uint32_t word = 0;  // bytes 4 w .. 4 w + 3, one dimension of each quarter in a byte
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int dim = 4 * w + i / 4 + i % 4 * (kHeadDim / 4);
        word |= (codes[dim / 16 * Tile::kRows + row] >> (2 * (dim % 16)) & 3u)
                << (8 * (i / 4) + 2 * (i % 4));
      }
      to[w] = word;
    }
  }
}

}  // namespace

template <int kHeadDim>
cudaError_t quantize_shaped(const AppendParams& p, int max_new_history, cudaStream_t stream) {
  using Tile = ShapedTile<kHeadDim>;
  const cudaError_t error =
      cudaFuncSetAttribute(shaped_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(Tile::kBytes));
  if (error != cudaSuccess) return error;  // less shared memory than a tile needs
  const dim3 grid((max_new_history + Tile::kRows - 1) / Tile::kRows, p.batch, 2 * p.num_kv_heads);
  shaped_kernel<kHeadDim><<<grid, kThreads, Tile::kBytes, stream>>>(p);
  return cudaGetLastError();
}

template cudaError_t quantize_shaped<64>(const AppendParams&, int, cudaStream_t);
template cudaError_t quantize_shaped<128>(const AppendParams&, int, cudaStream_t);
template cudaError_t quantize_shaped<256>(const AppendParams&, int, cudaStream_t);

}  // namespace oscar
