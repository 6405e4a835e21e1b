// Helpers of the benchmark on the device: random fill and the ceilings that memory sets.
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/pages.h"

namespace oscar {

// Fills with pseudo-random 16-bit patterns that are finite bf16 values around 1.
cudaError_t fill_bf16(uint16_t* to, int64_t count, uint32_t seed, cudaStream_t stream);

// Random codes, scales in [0.3, 0.8) and zeros in [1, 2) for `pages` pages of a head. Half of the
// keys' first scales are negative: those have the second center, where keys have centers.
cudaError_t fill_pages(const PageFormat& format, uint8_t* pool, int64_t head_pages, uint32_t seed,
                       cudaStream_t stream);

// Reads every byte once in order and keeps nothing: the read-only ceiling.
cudaError_t read_ceiling(const void* data, int64_t bytes, int* sink, cudaStream_t stream);

// Reads the same pages through the same block table as attention does, and only sums them.
// pages: of every request; page_bytes is a multiple of 16.
cudaError_t paged_read_ceiling(const PagedHistory& history, int batch, int pages, int num_kv_heads,
                               int page_bytes, int* sink, cudaStream_t stream);

// out[4 j + c] = the sum over sixteen k of (c 4^j 2^-24 as fp16) * 1, from one mma each; [20].
cudaError_t subnormal_products(float* out, cudaStream_t stream);

}  // namespace oscar
