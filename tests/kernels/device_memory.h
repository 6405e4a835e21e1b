// Device buffers with guard bytes on both sides, and the reason a GPU test is skipped.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace oscar_test {

// Empty when a CUDA device can be used, else why not.
inline std::string no_device_reason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(error);
  return count > 0 ? "" : "no CUDA device";
}

#define OSCAR_NEEDS_DEVICE()                                                      \
  if (const std::string reason = oscar_test::no_device_reason(); !reason.empty()) \
  GTEST_SKIP() << reason

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

// Owned device memory between two guards of 256 bytes of 0xa5. What lies between them is 0xa5 too,
// or not initialised where OSCAR_TEST_UNINITIALISED is set: for initcheck, which then sees a kernel
// that reads what nobody has written.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&base_), bytes() + 2 * kGuard), cudaSuccess);
    if (std::getenv("OSCAR_TEST_UNINITIALISED") == nullptr) cudaMemset(get(), 0xa5, bytes());
    cudaMemset(base_, 0xa5, kGuard);
    cudaMemset(base_ + tail(), 0xa5, bytes() + 2 * kGuard - tail());
  }
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size()) { upload(host); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(base_); }

  T* get() const { return reinterpret_cast<T*>(base_ + kGuard); }
  size_t count() const { return count_; }
  size_t bytes() const { return (count_ * sizeof(T) + 255) / 256 * 256; }
  void upload(const std::vector<T>& host) {
    ASSERT_EQ(cudaMemcpy(get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  void fill(int byte) { cudaMemset(get(), byte, count_ * sizeof(T)); }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    EXPECT_EQ(cudaMemcpy(host.data(), get(), count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return host;
  }
  // True while nothing was written outside [get(), get() + count).
  bool guards_intact() const {
    const auto clean = [&](size_t from, size_t to) {
      std::vector<uint8_t> guard(to - from);
      cudaMemcpy(guard.data(), base_ + from, guard.size(), cudaMemcpyDeviceToHost);
      return std::all_of(guard.begin(), guard.end(), [](uint8_t byte) { return byte == 0xa5; });
    };
    return clean(0, kGuard) && clean(tail(), bytes() + 2 * kGuard);
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t tail() const { return kGuard + count_ * sizeof(T); }  // where the guard behind begins
  uint8_t* base_ = nullptr;
  size_t count_;
};

}  // namespace oscar_test
