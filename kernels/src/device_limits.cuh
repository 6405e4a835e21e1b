// What the current device offers a launch, and launches that may begin early.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace oscar {

struct DeviceLimits {
  int blocks = 0, shared_bytes = 0;
  bool overlaps = false;  // knows programmatic dependent launch (sm_90 and up)
};

inline cudaError_t device_limits(DeviceLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limits->blocks, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   device);
  }
  int major = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  limits->overlaps = major >= 9;
  return error;
}

// A launch that may begin before the kernel ahead of it has ended, where the device knows that. The
// kernel waits by itself (ptx.cuh).
struct EarlyLaunch {
  cudaLaunchAttribute early = {};
  cudaLaunchConfig_t config = {};

  EarlyLaunch(dim3 blocks, int threads, size_t shared_bytes, cudaStream_t stream,
              const DeviceLimits& limits) {
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = limits.overlaps ? 1 : 0;
  }
  EarlyLaunch(const EarlyLaunch&) = delete;
  EarlyLaunch& operator=(const EarlyLaunch&) = delete;
};

}  // namespace oscar
