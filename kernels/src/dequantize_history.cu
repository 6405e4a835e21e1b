// Pages back to rows: eight values a lane, all loads of a few rows before their stores.
#include <cuda_bf16.h>

#include "oscar_kernels/history.h"

namespace oscar {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // rows of a lane whose loads are under way together

// Eight codes of a row from dimension `dim` on, and what the codec makes of them.
struct EightCodes {
  uint32_t word;
  float2 scale_zero;
  bool second_center;
};

__device__ __forceinline__ float2 load_pair(const uint8_t* metadata, int group,
                                            MetadataDtype dtype) {
  if (dtype == MetadataDtype::kFp32) return reinterpret_cast<const float2*>(metadata)[group];
  const uint32_t pair = reinterpret_cast<const uint32_t*>(metadata)[group];
  const auto low = static_cast<uint16_t>(pair), high = static_cast<uint16_t>(pair >> 16);
  if (dtype == MetadataDtype::kBf16) return make_float2(bf16_to_float(low), bf16_to_float(high));
  return make_float2(fp16_to_float(low), fp16_to_float(high));
}

__device__ __forceinline__ EightCodes load_eight(const PageFormat& f, int head_dim,
                                                 const uint8_t* page_data, int row, int dim,
                                                 bool centered) {
  EightCodes out;
  const uint8_t* const codes = page_data + row * (head_dim / 4);
  out.word = *reinterpret_cast<const uint16_t*>(codes + dim / 4);
  const uint8_t* const metadata =
      page_data + metadata_offset(f, 0, 0) + row * metadata_row_bytes(f);
  out.scale_zero = load_pair(metadata, dim / f.rows.quant_group_size, f.rows.metadata);
  out.second_center = centered && center_of_scale(load_metadata(metadata, 0, f.rows.metadata)) != 0;
  return out;
}

__device__ __forceinline__ void values_of(const EightCodes& eight, float (&values)[8]) {
  const float scale = scale_without_center(eight.scale_zero.x), zero = eight.scale_zero.y;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = eight.word >> (2 * i);
    // 2^23 + code as its bits: the conversion of an int, on a pipe with more room.
    const float number = __uint_as_float((code & 3u) | 0x4b000000u) - 8388608.0f;
    values[i] = mul_rn(sub_rn(number, zero), scale);
  }
}

template <bool kBf16>
__device__ __forceinline__ void store_eight(void* to, int64_t offset, const float (&values)[8]) {
  if constexpr (kBf16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      memcpy(&words[i], &pair, 4);
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + offset) =
        make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    float4* const at = reinterpret_cast<float4*>(static_cast<float*>(to) + offset);
    at[0] = make_float4(values[0], values[1], values[2], values[3]);
    at[1] = make_float4(values[4], values[5], values[6], values[7]);
  }
}

// A block a page. Grid: x = page times KV head, heads side by side, y = request.
template <int kHeadDim, bool kBf16>
__global__ void __launch_bounds__(kThreads)
    dequantize_history_kernel(const __grid_constant__ HistoryRowsParams p) {
  constexpr int kLanes = kHeadDim / 8, kRows = kThreads / kLanes;
  constexpr int kRounds = 2 * kPageTokens / (kRows * kAtOnce);
  const PageFormat& f = p.format;
  const int b = blockIdx.y, head = blockIdx.x % p.num_kv_heads;
  const int page = p.first_token / kPageTokens + blockIdx.x / p.num_kv_heads;
  const int first = max(p.first_token, page * kPageTokens);
  const int end =
      min(min(p.first_token + p.tokens, p.history.history_len[b]), (page + 1) * kPageTokens);
  if (first >= end) return;
  const uint8_t* const page_data =
      p.history.pool + (page_of_token(p.history, b, first) * p.num_kv_heads + head) * page_bytes(f);
  const int dim = threadIdx.x % kLanes * 8, own = threadIdx.x / kLanes;
  const bool centered = p.centers.rows != nullptr;
  const uint16_t* centers = nullptr;
  if (centered) {
    const int segment = segment_of_page(p.centers, b, p.sink_tokens, page);
    centers = centers_of(p.centers, segment, head, p.num_kv_heads, kHeadDim) + dim;
  }
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    EightCodes eight[kAtOnce];
    const auto row_at_step = [&](int i) { return (round * kAtOnce + i) * kRows + own; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row_at_step(i);  // of the page: keys, then values
      eight[i] = load_eight(f, kHeadDim, page_data, row, dim, centered && row < kPageTokens);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row_at_step(i), token = page * kPageTokens + row % kPageTokens;
      if (token < first || token >= end) continue;
      float values[8];
      values_of(eight[i], values);
      if (centered && row < kPageTokens) {
        const uint4 o =
            *reinterpret_cast<const uint4*>(centers + (eight[i].second_center ? kHeadDim : 0));
        const uint32_t words[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          values[j] =
              add_rn(values[j], bf16_to_float(static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16))));
        }
      }
      const RowsOut& to = row < kPageTokens ? p.k : p.v;
      store_eight<kBf16>(to.data, offset_of(to, b, token - p.first_token, head) + dim, values);
    }
  }
}

template <int kHeadDim>
cudaError_t launch(const HistoryRowsParams& p, cudaStream_t stream) {
  const int64_t pages =
      (int64_t{p.first_token} % kPageTokens + p.tokens + kPageTokens - 1) / kPageTokens;
  const dim3 grid(static_cast<unsigned>(pages * p.num_kv_heads), static_cast<unsigned>(p.batch));
  if (p.bf16) {
    dequantize_history_kernel<kHeadDim, true><<<grid, kThreads, 0, stream>>>(p);
  } else {
    dequantize_history_kernel<kHeadDim, false><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

bool valid_strides(const RowsOut& rows, int per_16_bytes) {
  return rows.batch_stride % per_16_bytes == 0 && rows.token_stride % per_16_bytes == 0 &&
         rows.head_stride % per_16_bytes == 0;
}

}  // namespace

bool valid_history(const HistoryRowsParams& p) {
  const int d = p.format.head_dim, group = p.format.rows.quant_group_size;
  const int per_16_bytes = p.bf16 ? 8 : 4;
  return (d == 64 || d == 128 || d == 256) && group > 0 && d % group == 0 && 4 * group >= d &&
         p.batch >= 0 && p.batch <= 65535 && p.num_kv_heads > 0 && p.first_token >= 0 &&
         p.tokens >= 0 && p.first_token < 1 << 30 && p.tokens < 1 << 30 &&
         (int64_t{p.tokens} / kPageTokens + 2) * p.num_kv_heads <= 1 << 30 &&
         valid_strides(p.k, per_16_bytes) && valid_strides(p.v, per_16_bytes) &&
         (!p.centers.rows || p.centers.segments > 0);
}

cudaError_t dequantize_history(const HistoryRowsParams& p, cudaStream_t stream) {
  if (!valid_history(p)) return cudaErrorInvalidValue;
  if (p.batch == 0 || p.tokens == 0) return cudaSuccess;
  if (p.format.head_dim == 64) return launch<64>(p, stream);
  if (p.format.head_dim == 128) return launch<128>(p, stream);
  return launch<256>(p, stream);
}

}  // namespace oscar
