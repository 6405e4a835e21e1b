// Noise-shaped rounding and metric scale correction: a row a lane, sixteen columns at a time like a
// triangular solve.
#include "append_rows.cuh"
#include "append_shaped.h"
#include "metric_scale.cuh"
#include "row_scales.cuh"
#include "shaped_push.cuh"

namespace oscar {
namespace {

// Shared memory of a block, which takes kRows tokens of one (request, head, side). Columns are done
// in two halves: errors of the first make room for what they push onto the second.
template <int kHeadDim>
struct ShapedTile {
  static constexpr int kBlocks = kHeadDim / kColumns, kHalf = kBlocks / 2;  // of columns
  static constexpr int kWarps = kHeadDim == 128 ? 8 : 4;
  static constexpr int kThreads = kWarps * 32, kRows = kThreads;
  static constexpr int kResident = kHeadDim == 64 ? 5 : 2;  // blocks a large multiprocessor holds
  static constexpr int kPanel = kHalf * kPanelBytes;
  uint8_t buffers[kWarps][kHalf][kBufferBytes];  // errors, or what was pushed
  uint8_t panels[2][kPanel];
  float diagonal[2][kColumns * kColumns];
  uint32_t codes[kBlocks][kRows];
  ScaleZero scales[kRows][4];  // a quantization group each
  int centers[kRows];          // places in the table of key centers; negative: none
};

// A power of two that brings the largest value and error a row can have to [2^8, 2^9).
__device__ __forceinline__ float error_scale(const ScaleZero* scales, int groups, uint32_t top) {
  float bound = __uint_as_float(top << 16);
  for (int g = 0; g < groups; ++g) {
    bound = fmaxf(bound, (fabsf(scales[g].zero) + 3.0f) * scales[g].scale);
  }
  const int exponent = min(126, static_cast<int>(__float_as_uint(2.0f * bound) >> 23) - 127);
  return __uint_as_float(static_cast<uint32_t>(127 + 9 - exponent) << 23);
}

// What a lane needs to code values of one quantization group of its row. Targets are scaled by `up`
// and kFeedbackScale, errors by `up`. A target is at a threshold or above when its distance from
// the float below the threshold, times a power of two that makes the smallest such distance 1, is 1
// or more: one saturated multiply-add.
struct RowCoder {
  float power, below[3], zero, scale;
  RowCoder() = default;
  __device__ __forceinline__ RowCoder(ScaleZero sz, float up)
      : zero(sz.zero), scale(sz.scale * up) {
    float least = 3.4e38f;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      below[k] = float_below(code_threshold(k + 1, sz) * (up * kFeedbackScale));
      least = fminf(least, fabsf(below[k]));
    }
    // The distance is at least half a unit in the last place.
    const int exponent = static_cast<int>(__float_as_uint(least) >> 23) - 127;
    power = __uint_as_float(static_cast<uint32_t>(min(24 - exponent, 100) + 127) << 23);
#pragma unroll
    for (int k = 0; k < 3; ++k) below[k] *= -power;
  }
};

__device__ __forceinline__ float saturated_fma(float a, float b, float c) {
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
  return out;
}

// Codes of sixteen columns x of a row, one after the other: each error is pushed onto the columns
// after it (`diagonal`, the square of the feedback matrix, scaled). pushed: what earlier columns
// pushed, in the scale of targets.
__device__ __forceinline__ uint32_t code_columns(const RowCoder& coder, const uint4 (&x)[2],
                                                 float up, const float* diagonal,
                                                 float (&pushed)[kColumns],
                                                 float (&errors)[kColumns]) {
  // Codes are gathered in the low bits of two mantissas.
  float words[2] = {8388608.0f, 8388608.0f};
  const float target_up = up * kFeedbackScale;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(x)[c / 2];
    const float value = __uint_as_float(c % 2 ? pair & 0xffff0000u : pair << 16);
    const float target = fmaf(value, target_up, -pushed[c]);  // the product is exact
    const float one = saturated_fma(target, coder.power, coder.below[0]);
    const float two = saturated_fma(target, coder.power, coder.below[1]);
    const float three = saturated_fma(target, coder.power, coder.below[2]);
    const float code = one + two + three;
    words[c / 8] = fmaf(code, static_cast<float>(1 << (2 * (c % 8))), words[c / 8]);
    errors[c] = fmaf(-value, up, mul_rn(sub_rn(code, coder.zero), coder.scale));
#pragma unroll
    for (int later = c + 1; later < kColumns; ++later) {
      pushed[later] = fmaf(errors[c], diagonal[c * kColumns + later], pushed[later]);
    }
  }
  return __byte_perm(__float_as_uint(words[0]), __float_as_uint(words[1]), 0x5410);
}

// The codes of row `row` of the tile.
template <int kHeadDim>
__device__ __forceinline__ void store_row_codes(const ShapedTile<kHeadDim>& tile, int row,
                                                uint8_t* to) {
#pragma unroll
  for (int v = 0; v < kHeadDim / 64; ++v) {
    reinterpret_cast<uint4*>(to)[v] =
        make_uint4(tile.codes[4 * v][row], tile.codes[4 * v + 1][row], tile.codes[4 * v + 2][row],
                   tile.codes[4 * v + 3][row]);
  }
}

// Panels of the feedback matrix in the order in which they are used, each on its way while the one
// before is: those of the first half, those from sixteen columns of the first half to the second,
// those of the second.
template <int kHeadDim>
struct FeedbackPanels {
  using Tile = ShapedTile<kHeadDim>;
  static constexpr int kHalf = Tile::kHalf;
  static constexpr int kSquare = kColumns * kColumns / Tile::kThreads;  // entries a thread
  const float* matrix;
  Tile& tile;
  Panel<kHeadDim, kHalf, Tile::kThreads> next;
  float square[kSquare];
  const AppendParams& p;
  int stage = 0;

  __device__ __forceinline__ FeedbackPanels(const float* m, Tile& t, const AppendParams& params)
      : matrix(m), tile(t), p(params) {
    load();
    store();
  }
  // Waits for the panel of this stage, and asks for the next one. Returns its index.
  __device__ __forceinline__ int arrive() {
    __syncthreads();  // the panel is there, and the one before may be replaced
    ++stage;
    if (stage < 3 * kHalf) load();
    return (stage - 1) % 2;
  }
  __device__ __forceinline__ void store() {
    if (stage == 3 * kHalf) return;
    next.store(part(), kFeedbackScale, kLargestFeedback, tile.panels[stage % 2], p);
    if (across()) return;
#pragma unroll
    for (int j = 0; j < kSquare; ++j) {
      tile.diagonal[stage % 2][j * Tile::kThreads + threadIdx.x] = square[j] * kFeedbackScale;
    }
  }

 private:
  __device__ __forceinline__ bool across() const { return stage >= kHalf && stage < 2 * kHalf; }
  __device__ __forceinline__ PanelPart part() const {
    constexpr int kMiddle = kHalf * kColumns;
    if (across()) return {(stage - kHalf) * kColumns, kMiddle, kHalf, true};
    return stage < kHalf ? PanelPart{0, stage * kColumns, stage}
                         : PanelPart{kMiddle, (stage - kHalf) * kColumns, stage - 2 * kHalf};
  }
  __device__ __forceinline__ void load() {
    const PanelPart next_part = part();
    next.load(matrix, next_part);
    if (across()) return;
    const float* from = matrix + next_part.column * (kHeadDim + 1);
#pragma unroll
    for (int j = 0; j < kSquare; ++j) {
      const int i = j * Tile::kThreads + threadIdx.x;
      square[j] = __ldg(from + i / kColumns * kHeadDim + i % kColumns);
    }
  }
};

// What the errors in the buffers before buffer i push onto the columns of buffer i, for row `lane`;
// kAdd: besides what the buffer holds.
template <int kBuffers>
__device__ __forceinline__ void push_onto(uint8_t (*buffers)[kBufferBytes], int i, bool add,
                                          const uint8_t* panel, int lane,
                                          float (&pushed)[kColumns]) {
  if (i > 0) {
    RowSums sums, small;  // apart, or the small products would round away
#pragma unroll
    for (int step = 0; step < kBuffers - 1; ++step) {
      if (step >= i) break;
      const uint8_t* square = panel + step * kPanelBytes;
      ErrorOperand errors;
      errors.load(buffers[step], lane);
      const uint4 high = high_parts(square, lane);
      small.add(low_parts(square, lane), errors.rows);
      sums.add(high, errors.rows);
      small.add_low_rows(high, errors.rows);
    }
    sums.add(small);
    if (add) {
      sums.store<true>(buffers[i], lane);
    } else {
      sums.store<false>(buffers[i], lane);
    }
    __syncwarp();
  }
  load_row(buffers[i], lane, pushed);
  __syncwarp();
}

// Errors of the first half in the buffers give way to what they push onto the second half.
template <int kHeadDim>
__device__ __forceinline__ void push_across(FeedbackPanels<kHeadDim>& panels,
                                            uint8_t (*buffers)[kBufferBytes], bool busy, int lane) {
  constexpr int kHalf = ShapedTile<kHeadDim>::kHalf;
  RowSums sums[kHalf];
#pragma unroll 1
  for (int i = 0; i < kHalf; ++i) {
    const uint8_t* panel = panels.tile.panels[panels.arrive()];
    if (busy) {
      ErrorOperand errors;
      errors.load(buffers[i], lane);
#pragma unroll
      for (int product = 0; product < 3; ++product) {  // a sum has to wait for its last product
#pragma unroll
        for (int block = 0; block < kHalf; ++block) {
          const uint8_t* square = panel + block * kPanelBytes;
          if (product == 0) sums[block].add(low_parts(square, lane), errors.rows);
          if (product == 1) sums[block].add_low_rows(high_parts(square, lane), errors.rows);
          if (product == 2) sums[block].add(high_parts(square, lane), errors.rows);
        }
      }
    }
    panels.store();
  }
  if (!busy) return;
  __syncwarp();
#pragma unroll
  for (int block = 0; block < kHalf; ++block)
    sums[block].template store<false>(buffers[block], lane);
  __syncwarp();
}

// Codes of row x of each lane by shaped rounding, to the tile.
template <int kHeadDim>
__device__ __forceinline__ void shape_rows(ShapedTile<kHeadDim>& tile, int row,
                                           const float* feedback, const CodedRow& x, float up,
                                           int group_size, bool busy, const AppendParams& p) {
  constexpr int kHalf = ShapedTile<kHeadDim>::kHalf;
  const int lane = row % 32;
  uint8_t(*buffers)[kBufferBytes] = tile.buffers[row / 32];
  FeedbackPanels<kHeadDim> panels(feedback, tile, p);
  RowCoder coder{};
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
#pragma unroll 1
    for (int i = 0; i < kHalf; ++i) {
      const int block = half * kHalf + i, column = block * kColumns;
      uint4 values[2] = {x.plain_eight(2 * block), x.plain_eight(2 * block + 1)};
      const int at = panels.arrive();
      if (busy) {
        values[0] = x.around(values[0], 2 * block);
        values[1] = x.around(values[1], 2 * block + 1);
        if ((column & (group_size - 1)) == 0) {  // a power of two
          coder = RowCoder(tile.scales[row][column / group_size], up);
        }
        float pushed[kColumns] = {}, errors[kColumns];
        if (block > 0) push_onto<kHalf>(buffers, i, half > 0, tile.panels[at], lane, pushed);
        tile.codes[block][row] = code_columns(coder, values, up, tile.diagonal[at], pushed, errors);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          *reinterpret_cast<uint4*>(buffers[i] + quad_offset(lane, c)) =
              split_four(errors[4 * c], errors[4 * c + 1], errors[4 * c + 2], errors[4 * c + 3]);
        }
        __syncwarp();
      }
      panels.store();
    }
    if (half > 0) break;
    push_across(panels, buffers, busy, lane);
  }
}

// The same by plain rounding.
template <int kHeadDim>
__device__ __forceinline__ void round_rows(ShapedTile<kHeadDim>& tile, const CodedRow& x,
                                           int group_size) {
#pragma unroll 1
  for (int block = 0; block < tile.kBlocks; ++block) {
    const ScaleZero sz = tile.scales[threadIdx.x][block * kColumns / group_size];
    const uint4 values[2] = {x.eight(2 * block), x.eight(2 * block + 1)};
    uint32_t word = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(values)[c / 2];
      word |= code_of(__uint_as_float(c % 2 ? pair & 0xffff0000u : pair << 16), sz) << (2 * c);
    }
    tile.codes[block][threadIdx.x] = word;
  }
}

// The factor of this thread's row that needs no metric, summed as the codec's definition does.
template <int kHeadDim>
__device__ __forceinline__ float unbiased_row_factor(const ShapedTile<kHeadDim>& tile,
                                                     const CodedRow& x, int group_size) {
  float num = 0.0f, den = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kHeadDim; ++i) {
    const ScaleZero sz = tile.scales[threadIdx.x][i / group_size];
    const int code = tile.codes[i / kColumns][threadIdx.x] >> (2 * (i % kColumns)) & 3u;
    const float value = x.value(i);
    num = add_rn(num, mul_rn(value, value));
    den = add_rn(den, mul_rn(value, dequantize(code, sz)));
  }
  return correction_factor(num, den);
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
  const int row = threadIdx.x, lane = row % 32, warp = row / 32, first = begin + warp * kWarpRows;
  const bool busy = first < end;  // the others only bring panels
  const SideWriter& writer = writer_of(p, side);
  const RowRecipe recipe = head_recipe(writer, head);
  const int64_t matrix = static_cast<int64_t>(head) * kHeadDim * kHeadDim;
  const int group_size = p.format.rows.quant_group_size, groups = kHeadDim / group_size;
  const auto place = [&](int i) { return history_row(p, b, min(first + i, end - 1), head, side); };
  const auto row_at = [&](int i) {
    return CodedRow{place(i).x, p.centers.rows, tile.centers[warp * kWarpRows + i]};
  };

  uint8_t(*buffers)[kBufferBytes] = tile.buffers[warp];
  float up = 1.0f;
  if (busy) {
    auto& planes = *reinterpret_cast<MagnitudePlanes<kHeadDim>*>(buffers);
    static_assert(sizeof(planes) <= sizeof(tile.buffers[0]));
    tile.centers[row] = choose_centers<kHeadDim>(p, b, head, side, first, end);
    __syncwarp();
    const uint32_t top =
        scale_rows<kHeadDim>(p, row_at, recipe, tile.scales + warp * kWarpRows, planes);
    up = error_scale(tile.scales[row], groups, top);
  }
  if (recipe.rounding == Rounding::kShaped) {
    shape_rows(tile, row, writer.feedback + matrix, row_at(lane), up, group_size, busy, p);
  } else if (busy) {
    round_rows(tile, row_at(lane), group_size);
  }

  float factor = 1.0f;
  const bool corrected = recipe.scale_correction != ScaleCorrection::kNone;
  if (recipe.scale_correction == ScaleCorrection::kUnbiased && busy) {
    factor = unbiased_row_factor(tile, row_at(lane), group_size);
  }
  if (recipe.scale_correction == ScaleCorrection::kMetric) {
    __syncwarp();
    factor = MetricScale<kHeadDim, Tile::kThreads>::factor(
        row_at, writer.metric + matrix, up, &tile.codes[0][row], Tile::kRows, tile.scales[row],
        group_size, tile.panels[0], buffers[0], busy, p);
  }
  if (first + lane >= end) return;
  const float first_scale = tile.scales[row][0].scale;
  const bool refused = first_scale != first_scale;
  bool overflow = false;
  for (int g = 0; g < groups; ++g) {
    ScaleZero& sz = tile.scales[row][g];
    if (corrected) sz.scale = round_to_metadata(mul_rn(sz.scale, factor), p.format.rows.metadata);
    overflow |= !is_finite(sz.scale);
  }
  if (overflow && !refused) report_refused(p, static_cast<int>(RowStatus::kMetadataOverflow));
  const HistoryRow at = place(lane);
  if (overflow) {
    for (int g = 0; g < groups; ++g) store_scale_zero(p.format, at, side, g, refused_scale_zero());
    return;
  }
  ScaleZero& signed_one = tile.scales[row][0];
  signed_one.scale = scale_with_center(signed_one.scale, is_second(tile.centers[row], kHeadDim));
  for (int g = 0; g < groups; ++g) store_scale_zero(p.format, at, side, g, tile.scales[row][g]);
  store_row_codes<kHeadDim>(tile, row, at.page_data + code_offset(p.format, side, at.in_page));
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
