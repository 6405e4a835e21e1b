// SDPA of libtorch over a contiguous bf16 cache, with its flash and its cuDNN backend.
#include "bench/attention.h"

#if OSCAR_BENCH_TORCH
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace oscar {

#if OSCAR_BENCH_TORCH
namespace {

double time_backend(const std::vector<std::array<at::Tensor, 3>>& caches, int replays) {
  const auto call = [&](size_t i) {
    return at::scaled_dot_product_attention(caches[i][0], caches[i][1], caches[i][2], {}, 0.0,
                                            false, std::nullopt, /*enable_gqa=*/true);
  };
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  try {
    for (size_t i = 0; i < std::min<size_t>(3, caches.size()); ++i) call(i);
    check_cuda(cudaStreamSynchronize(stream), "SDPA");
  } catch (const std::exception&) {
    return -1.0;  // this backend does not take the shape
  }
  const int rounds = std::max(1, 8 / static_cast<int>(caches.size()));
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (int r = 0; r < rounds; ++r) {
    for (size_t i = 0; i < caches.size(); ++i) call(i);
  }
  graph.capture_end();
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> us;
  for (int replay = -2; replay < replays; ++replay) {
    cudaEventRecord(begin, stream);
    graph.replay();
    cudaEventRecord(end, stream);
    check_cuda(cudaEventSynchronize(end), "SDPA replay");
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, begin, end);
    if (replay >= 0) us.push_back(1e3 * ms / (rounds * static_cast<double>(caches.size())));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

}  // namespace

SdpaTiming time_sdpa(const AttentionBenchShape& shape, int batch, int context, int replays) {
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA);
  const size_t bytes =
      static_cast<size_t>(batch) * context * shape.num_kv_heads * 4 * shape.head_dim;
  std::vector<std::array<at::Tensor, 3>> caches;
  const int copies = cold_copies(bytes);
  for (int i = 0; i < copies; ++i) {
    caches.push_back({at::randn({batch, shape.num_qo_heads, shape.q_len, shape.head_dim}, options),
                      at::randn({batch, shape.num_kv_heads, context, shape.head_dim}, options),
                      at::randn({batch, shape.num_kv_heads, context, shape.head_dim}, options)});
  }
  at::Context& context_settings = at::globalContext();
  const auto only = [&](bool flash, bool cudnn) {
    context_settings.setSDPUseFlash(flash);
    context_settings.setSDPUseCuDNN(cudnn);
    context_settings.setSDPUseMemEfficient(false);
    context_settings.setSDPUseMath(false);
  };
  SdpaTiming timing;
  only(true, false);
  timing.flash = time_backend(caches, replays);
  only(false, true);
  timing.cudnn = time_backend(caches, replays);
  caches.clear();
  c10::cuda::CUDACachingAllocator::emptyCache();
  return timing;
}
bool sdpa_available() { return at::hasCUDA(); }
#else
SdpaTiming time_sdpa(const AttentionBenchShape&, int, int, int) { return {}; }
bool sdpa_available() { return false; }
#endif

}  // namespace oscar
