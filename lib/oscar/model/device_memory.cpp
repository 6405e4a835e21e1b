// The limit of libtorch's caching allocator.
#include "oscar/model/device_memory.h"

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#endif

namespace oscar {

#if defined(OSCAR_HAS_KERNELS)
void limit_device_memory(const torch::Device& device, int64_t bytes) {
  if (!device.is_cuda()) return;
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  const auto total = static_cast<double>(at::accelerator::getMemoryInfo(device.index()).second);
  // By its virtual functions: the half of libtorch that has them is loaded, not linked
  // (compute.cpp).
  auto* allocator = static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(
      c10::GetAllocator(c10::DeviceType::CUDA));
  allocator->setMemoryFraction(std::min(1.0, static_cast<double>(bytes) / total), device.index());
}
#else
void limit_device_memory(const torch::Device&, int64_t) {}
#endif

}  // namespace oscar
