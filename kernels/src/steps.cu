// The numbers of a step: a thread a request.
#include "oscar_kernels/steps.h"

namespace oscar {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) step_numbers_kernel(const StepParams params) {
  const int request = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (request < params.requests) fill_step_numbers(params, request);
}

}  // namespace

cudaError_t step_numbers(const StepParams& params, cudaStream_t stream) {
  const int blocks = (params.requests + kThreads - 1) / kThreads;
  if (blocks > 0) step_numbers_kernel<<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace oscar
