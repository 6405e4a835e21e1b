// Graph timing on CUDA events.
#include "bench/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/base/error.h"
#include "oscar/base/version.h"

namespace oscar {

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error({.what = fmt::format("{} failed: {}", what, cudaGetErrorString(error)),
               .hint = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver
                           ? "oscar-bench needs an NVIDIA GPU and its driver"
                           : ""});
}

DeviceBytes::DeviceBytes(size_t bytes) : bytes_(bytes) {
  check_cuda(cudaMalloc(&data_, std::max<size_t>(bytes, 16)), "cudaMalloc");
}
DeviceBytes::~DeviceBytes() { cudaFree(data_); }

Timing time_graph(int count, int min_calls, int replays,
                  const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const int rounds = std::max(1, (min_calls + count - 1) / count), calls = rounds * count;
  call(0, stream);  // outside the graph: one-time attributes and lazy loading
  check_cuda(cudaStreamSynchronize(stream), "first call");
  cudaGraph_t graph;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) call(i % count, stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t exec;
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> us;
  for (int replay = -2; replay < replays; ++replay) {
    check_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
    check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    check_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "replay");
    float ms = 0.0f;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (replay >= 0) us.push_back(1e3 * ms / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(us.begin(), us.end());
  const auto at = [&](double p) {
    return us[static_cast<size_t>(std::llround(p * static_cast<double>(us.size() - 1)))];
  };
  return {at(0.5), at(0.1), at(0.9)};
}

int cold_copies(size_t bytes) {
  int device = 0, l2 = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "L2 size");
  return static_cast<int>((4 * static_cast<size_t>(l2) + bytes - 1) / std::max<size_t>(bytes, 1));
}

Json machine_record() {
  Json tool{{"version", kToolVersion}, {"commit", kToolCommit}};
  int device = 0, driver = 0, runtime = 0, clock = 0, memory_clock = 0;
  const cudaError_t found = cudaGetDevice(&device);
  if (found == cudaErrorNoDevice || found == cudaErrorInsufficientDriver) return tool;
  check_cuda(found, "cudaGetDevice");
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device);
  cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, device);
  Json record{{"device", properties.name},
              {"multiprocessors", properties.multiProcessorCount},
              {"l2_bytes", properties.l2CacheSize},
              {"driver_cuda", driver},
              {"runtime_cuda", runtime},
              {"clock_khz", clock},
              {"memory_clock_khz", memory_clock}};
  record.update(tool);
  return record;
}

}  // namespace oscar
