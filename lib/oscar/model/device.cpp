// Memory and streams of a device.
#include "oscar/model/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <utility>
#include <vector>

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "oscar/base/error.h"
#endif

namespace oscar {

// The limit of libtorch's caching allocator.

#if defined(OSCAR_HAS_KERNELS)
void limit_device_memory(const torch::Device& device, int64_t bytes) {
  if (!device.is_cuda()) return;
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  const c10::DeviceGuard guard(device);
  size_t free = 0, total = 0;
  if (const cudaError_t status = cudaMemGetInfo(&free, &total); status != cudaSuccess) {
    throw Error({.what = "the GPU does not say how much memory it has",
                 .where = device.str(),
                 .found = cudaGetErrorString(status)});
  }
  // By its virtual functions: the half of libtorch that has them is loaded, not linked
  // (layer_weights.h). Compilers guess which function a virtual call of at::accelerator means, and
  // want it linked.
  auto* allocator = static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(
      c10::GetAllocator(c10::DeviceType::CUDA));
  allocator->setMemoryFraction(
      std::min(1.0, static_cast<double>(bytes) / static_cast<double>(total)), device.index());
}
#else
void limit_device_memory(const torch::Device&, int64_t) {}
#endif

// By registration: torch's own pinned tensors take the next power of two of bytes.

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

// Streams out of torch's pool, kept.

c10::Stream side_stream(torch::Device device, int number) {
  static const std::vector<c10::Stream> streams = [&] {
    const c10::impl::VirtualGuardImpl device_type(device.type());
    std::vector<c10::Stream> own;
    for (int i = 0; i < kSideStreams; ++i)
      own.push_back(device_type.getStreamFromGlobalPool(device));
    return own;
  }();
  return streams.at(static_cast<size_t>(number));
}

std::optional<c10::Stream> present_stream(torch::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void wait_for_stream(torch::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

}  // namespace oscar
