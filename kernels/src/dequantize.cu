// The row codec as it is defined, a row a lane: every sum in ascending order, so that bits agree
// with the CPU's.
#include "oscar/cache/codec.h"
#include "oscar_kernels/dequantize.h"

namespace oscar {
namespace {

constexpr int kRows = 32;          // of a block, one a lane
constexpr int kPitch = kRows + 1;  // so that neither columns nor rows of the block share a bank
constexpr int kStrip = 4;          // columns whose sums a lane holds at a time

// Columns of the block's rows, lanes side by side: values[column][lane].
struct RowColumns {
  float (*values)[kPitch];
  int lane;
  __device__ float& operator[](int column) const { return values[column][lane]; }
};

// sums[c] += sum over j in [0, count), ascending, of row[j] matrix[j, column + c].
__device__ __forceinline__ void strip_sums(const RowColumns& row, const float* matrix, int head_dim,
                                           int column, int count, float (&sums)[kStrip]) {
#pragma unroll 8
  for (int j = 0; j < count; ++j) {
    const float4 entries =
        __ldg(reinterpret_cast<const float4*>(matrix + int64_t{j} * head_dim + column));
    const float value = row[j];
    sums[0] = add_rn(sums[0], mul_rn(value, entries.x));
    sums[1] = add_rn(sums[1], mul_rn(value, entries.y));
    sums[2] = add_rn(sums[2], mul_rn(value, entries.z));
    sums[3] = add_rn(sums[3], mul_rn(value, entries.w));
  }
}

// The magnitude of the given rank, by bisection on bf16 patterns: the smallest one with more than
// `rank` magnitudes up to it.
__device__ __forceinline__ float magnitude_of_rank(const RowColumns& x, int begin, int end,
                                                   int rank) {
  uint32_t low = 0, high = 0x7f7f;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    int up_to = 0;
    for (int i = begin; i < end; ++i) {
      up_to += (float_bits(x[i]) >> 16 & 0x7fffu) <= middle ? 1 : 0;
    }
    if (up_to > rank) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return float_from_bits(low << 16);
}

// Magnitude at which columns [begin, end) are clipped; infinite for none.
__device__ __forceinline__ float clip_threshold(float clip_ratio, const RowColumns& x, int begin,
                                                int end) {
  const int rank = clip_threshold_index(clip_ratio, end - begin);
  return rank < 0 ? __int_as_float(0x7f800000) : magnitude_of_rank(x, begin, end, rank);
}

__device__ __forceinline__ GroupScale columns_scale(const RowFormat& format, const RowColumns& x,
                                                    int begin, int end, float threshold) {
  float lo = x[begin], hi = lo;
  for (int i = begin + 1; i < end; ++i) {
    lo = fminf(lo, x[i]);
    hi = fmaxf(hi, x[i]);
  }
  // Clamping is monotone, so it commutes with min and max.
  lo = fminf(fmaxf(lo, -threshold), threshold);
  hi = fminf(fmaxf(hi, -threshold), threshold);
  return group_scale(format, lo, hi);
}

__global__ void __launch_bounds__(kRows) dequantize_kernel(const DequantizeParams p) {
  extern __shared__ float shared[];
  const int d = p.head_dim, group_size = p.format.quant_group_size, groups = d / group_size;
  const int lane = threadIdx.x, head = blockIdx.y;
  const RowRecipe recipe = head_recipe(p.writer, head);
  const CodecRules rules = p.format.rules;
  const RowColumns row{reinterpret_cast<float(*)[kPitch]>(shared), lane};
  auto* scales = reinterpret_cast<GroupScale(*)[kRows]>(shared + d * kPitch);
  auto* codes = reinterpret_cast<uint8_t(*)[kRows]>(scales + groups);
  const int64_t first = (blockIdx.z * p.num_heads + head) * p.tokens;
  const int64_t begin = int64_t{blockIdx.x} * kRows, count = min(int64_t{kRows}, p.tokens - begin);
  const int64_t matrix = int64_t{head} * d * d;

  // A lane beyond the last row repeats it. Rows are read by all lanes together, column by column.
  const auto load = [&] {
    for (int r = 0; r < kRows; ++r) {
      const float* from = p.x + (first + begin + min(int64_t{r}, count - 1)) * d;
      for (int i = lane; i < d; i += kRows) row.values[i][r] = from[i];
    }
    __syncwarp();
  };
  load();
  int status = 0;
  for (int i = 0; i < d; ++i) {
    if (!is_finite(row[i])) status = static_cast<int>(RowStatus::kNonFinite);
  }
  const bool by_group = rules.clip_span == ClipSpan::kQuantGroup;
  float threshold = by_group ? 0.0f : clip_threshold(recipe.clip_ratio, row, 0, d);
  for (int g = 0; g < groups; ++g) {
    const int from = g * group_size, to = from + group_size;
    if (by_group) threshold = clip_threshold(recipe.clip_ratio, row, from, to);
    const GroupScale sz = columns_scale(p.format, row, from, to, threshold);
    scales[g][lane] = sz;
    if (status == 0 && (!is_finite(sz.stored.scale) || !is_finite(sz.stored.zero))) {
      status = static_cast<int>(RowStatus::kMetadataOverflow);
    }
  }

  // Codes; behind the column that is coded, errors take the place of values.
  const float* feedback =
      recipe.rounding == Rounding::kShaped ? p.writer.feedback + matrix : nullptr;
  for (int column = 0; column < d; column += kStrip) {
    float pushed[kStrip] = {};
    if (feedback) strip_sums(row, feedback, d, column, column, pushed);
#pragma unroll
    for (int c = 0; c < kStrip; ++c) {
      const int i = column + c;
      const ScaleZero sz = scales[i / group_size][lane].coding;
      const float value = row[i];
      if (feedback) {
#pragma unroll
        for (int j = 0; j < c; ++j) {
          pushed[c] = add_rn(
              pushed[c], mul_rn(row[column + j], __ldg(feedback + int64_t{column + j} * d + i)));
        }
      }
      const int code = code_of(rules, sub_rn(value, pushed[c]), sz);
      codes[i][lane] = static_cast<uint8_t>(code);
      row[i] = sub_rn(dequantize(code, sz), value);
    }
  }

  const ScaleCorrection correction = recipe.scale_correction;
  if (correction != ScaleCorrection::kNone) {
    __syncwarp();
    load();
    float num = 0.0f, den = 0.0f;
    for (int column = 0; column < d; column += kStrip) {
      float weighted[kStrip] = {};
      if (correction == ScaleCorrection::kMetric) {
        strip_sums(row, p.writer.metric + matrix, d, column, d, weighted);
      } else {
#pragma unroll
        for (int c = 0; c < kStrip; ++c) weighted[c] = row[column + c];
      }
#pragma unroll
      for (int c = 0; c < kStrip; ++c) {
        const int i = column + c;
        const ScaleZero sz = scales[i / group_size][lane].coding;
        num = add_rn(num, mul_rn(weighted[c], row[i]));
        den = add_rn(den, mul_rn(weighted[c], dequantize(codes[i][lane], sz)));
      }
    }
    const float factor = correction_factor(num, den);
    for (int g = 0; g < groups; ++g) {
      float& scale = scales[g][lane].stored.scale;
      scale = round_to_metadata(mul_rn(scale, factor), p.format.metadata);
      if (status == 0 && !is_finite(scale)) {
        status = static_cast<int>(RowStatus::kMetadataOverflow);
      }
    }
  }
  if (status != 0) atomicOr(p.status, status);
  __syncwarp();
  for (int r = 0; r < count; ++r) {
    float* to = p.out + (first + begin + r) * d;
    for (int i = lane; i < d; i += kRows) {
      to[i] = dequantize(rules, codes[i][r], scales[i / group_size][r].stored);
    }
  }
}

}  // namespace

cudaError_t dequantize_rows(const DequantizeParams& p, cudaStream_t stream) {
  const int d = p.head_dim;
  const int size = p.format.quant_group_size;
  if (d <= 0 || d % 8 != 0 || d > kMaxHeadDim || size <= 0 || d % size != 0 || p.batch > 65535 ||
      p.num_heads > 65535) {
    return cudaErrorInvalidValue;
  }
  if (p.batch == 0 || p.num_heads == 0 || p.tokens == 0) return cudaSuccess;
  const int groups = d / size;
  const size_t bytes = sizeof(float) * d * kPitch + sizeof(GroupScale) * groups * kRows + d * kRows;
  const cudaError_t error = cudaFuncSetAttribute(
      dequantize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((p.tokens + kRows - 1) / kRows),
                  static_cast<unsigned>(p.num_heads), static_cast<unsigned>(p.batch));
  dequantize_kernel<<<grid, kRows, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace oscar
