// By registration: torch's own pinned tensors take the next power of two of bytes.
#include "oscar/model/pinned_memory.h"

#include <utility>

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>
#endif

namespace oscar {

#if defined(OSCAR_HAS_KERNELS)
torch::Tensor pinned(torch::Tensor tensor, const torch::Device& device) {
  if (!device.is_cuda() || tensor.numel() == 0) return tensor;
  const c10::DeviceGuard guard(device);
  void* const memory = tensor.data_ptr();
  if (cudaHostRegister(memory, tensor.nbytes(), cudaHostRegisterPortable) != cudaSuccess) {
    (void)cudaGetLastError();
    return tensor;
  }
  const auto sizes = tensor.sizes().vec();
  const auto options = tensor.options();
  const auto unlock = [kept = std::move(tensor), device](void* locked) {
    const c10::DeviceGuard of_kept(device);
    (void)cudaDeviceSynchronize();  // copies that an error left behind
    (void)cudaHostUnregister(locked);
  };
  return torch::from_blob(memory, sizes, unlock, options);
}
#else
torch::Tensor pinned(torch::Tensor tensor, const torch::Device&) { return tensor; }
#endif

}  // namespace oscar
