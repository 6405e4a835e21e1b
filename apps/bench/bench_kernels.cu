// Random fill and read ceilings.
#include "bench_kernels.h"

#include "ptx.cuh"

namespace oscar {
namespace {

__device__ uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

__global__ void fill_bf16_kernel(uint16_t* to, int64_t count, uint32_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += stride) {
    const uint32_t r = mix(static_cast<uint32_t>(i) * 2654435761u + seed);
    to[i] = static_cast<uint16_t>((r & 0x8000u) | (0x3f00u + (r & 0x00ffu)));  // +-[0.5, 2)
  }
}

__global__ void fill_pages_kernel(PageFormat f, uint8_t* pool, int64_t head_pages, uint32_t seed) {
  const int bytes = page_bytes(f), codes = metadata_offset(f, 0, 0);
  const int row_bytes = metadata_offset(f, 0, 1) - codes, key_end = metadata_offset(f, 1, 0);
  const int64_t total = head_pages * bytes / 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += stride) {
    const uint32_t r = mix(static_cast<uint32_t>(i) * 2654435761u + seed);
    const int at = static_cast<int>(i * 4 % bytes);
    uint32_t value = r;
    if (at >= codes) {
      const bool second = at < key_end && (at - codes) % row_bytes == 0 && mix(r) % 2;
      const float scale = (second ? -1.0f : 1.0f) * (0.3f + 0.5f * (r & 0xffffu) / 65536.0f);
      const float zero = 1.0f + (r >> 16) / 65536.0f;
      if (f.rows.metadata == MetadataDtype::kFp32) {
        value = float_bits((at - codes) / 4 % 2 ? zero : scale);
      } else if (f.rows.metadata == MetadataDtype::kFp16) {
        value = float_to_fp16(scale) | static_cast<uint32_t>(float_to_fp16(zero)) << 16;
      } else {
        value = float_to_bf16(scale) | static_cast<uint32_t>(float_to_bf16(zero)) << 16;
      }
    }
    reinterpret_cast<uint32_t*>(pool)[i] = value;
  }
}

__device__ uint32_t fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__global__ void __launch_bounds__(1024) read_kernel(const uint4* data, int64_t vectors, int* sink) {
  constexpr int kUnroll = 8;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  uint32_t sum = 0;
  for (; i + (kUnroll - 1) * stride < vectors; i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum ^= fold(v[u]);
  }
  for (; i < vectors; i += stride) sum ^= fold(__ldcs(data + i));
  if (sum == 0x9e3779b9u) atomicAdd(sink, 1);  // keeps the loads
}

// One warp a page; kVectors 16-byte loads in flight per lane.
__global__ void __launch_bounds__(1024)
    paged_read_kernel(PagedHistory h, int batch, int pages, int heads, int bytes, int* sink) {
  constexpr int kVectors = 9;
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  const int64_t total = static_cast<int64_t>(batch) * pages * heads;
  uint32_t sum = 0;
  for (int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32; c < total;
       c += warps) {
    const int64_t in_batch = c / heads, b = in_batch / pages;
    const int64_t page = h.block_table[b * h.table_stride + in_batch - b * pages];
    const uint4* from = reinterpret_cast<const uint4*>(h.pool + (page * heads + c % heads) * bytes);
    const int vectors = bytes / 16;
    for (int base = 0; base < vectors; base += 32 * kVectors) {
      uint4 v[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int at = base + 32 * u + lane;
        v[u] = at < vectors ? __ldcs(from + at) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) sum ^= fold(v[u]);
    }
  }
  if (sum == 0x9e3779b9u) atomicAdd(sink, 1);
}

__global__ void subnormal_kernel(float* out) {
  for (int i = 0; i < 20; ++i) {
    const uint32_t code = static_cast<uint32_t>(i % 4) << (2 * (i / 4));
    const uint32_t pair = code | code << 16, one = 0x3c003c00u;
    float d[4] = {};
    ptx::mma_f16(d, pair, pair, pair, pair, one, one);
    if (threadIdx.x == 0) out[i] = d[0];
  }
}

int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace

cudaError_t fill_bf16(uint16_t* to, int64_t count, uint32_t seed, cudaStream_t stream) {
  fill_bf16_kernel<<<multiprocessors() * 4, 512, 0, stream>>>(to, count, seed);
  return cudaGetLastError();
}
cudaError_t fill_pages(const PageFormat& format, uint8_t* pool, int64_t head_pages, uint32_t seed,
                       cudaStream_t stream) {
  fill_pages_kernel<<<multiprocessors() * 4, 512, 0, stream>>>(format, pool, head_pages, seed);
  return cudaGetLastError();
}
cudaError_t subnormal_products(float* out, cudaStream_t stream) {
  subnormal_kernel<<<1, 32, 0, stream>>>(out);
  return cudaGetLastError();
}
cudaError_t read_ceiling(const void* data, int64_t bytes, int* sink, cudaStream_t stream) {
  read_kernel<<<multiprocessors() * 2, 1024, 0, stream>>>(static_cast<const uint4*>(data),
                                                          bytes / 16, sink);
  return cudaGetLastError();
}
cudaError_t paged_read_ceiling(const PagedHistory& history, int batch, int pages, int num_kv_heads,
                               int bytes, int* sink, cudaStream_t stream) {
  paged_read_kernel<<<multiprocessors() * 2, 1024, 0, stream>>>(history, batch, pages, num_kv_heads,
                                                                bytes, sink);
  return cudaGetLastError();
}

}  // namespace oscar
