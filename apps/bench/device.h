// Device memory, graph timing and the description of the machine, for oscar-bench.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// Throws Error naming the CUDA call.
void check_cuda(cudaError_t error, const char* what);

// Owned device memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// `host` in device memory of its own. Throws Error.
template <typename T>
std::unique_ptr<DeviceBytes> upload(const std::vector<T>& host) {
  std::unique_ptr<DeviceBytes> device = std::make_unique<DeviceBytes>(host.size() * sizeof(T));
  check_cuda(cudaMemcpy(device->as<void>(), host.data(), device->bytes(), cudaMemcpyHostToDevice),
             "cudaMemcpy");
  return device;
}

// Microseconds per call over replays of a captured graph.
struct Timing {
  double median = 0.0, p10 = 0.0, p90 = 0.0;
};

// Captures calls(i, stream) for i in [0, count) repeatedly until the graph holds at least
// `min_calls`, replays it `replays` times after warming up. The caller makes count large enough
// that what call i reads has left the L2 cache when call i comes round again.
Timing time_graph(int count, int min_calls, int replays,
                  const std::function<void(int, cudaStream_t)>& call);

// The number of copies of `bytes` that keeps the L2 cache cold (at least four times its size).
int cold_copies(size_t bytes);

// Device name, driver, runtime, clocks, commit: goes into every result file. Without a device,
// version and commit alone.
Json machine_record();

}  // namespace oscar
