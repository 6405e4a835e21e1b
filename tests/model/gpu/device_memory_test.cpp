// On a GPU: libtorch takes no more than its limit, though streams keep what they have given back.
#include "oscar/model/device.h"

#include <ATen/DeviceAccelerator.h>
#include <gtest/gtest.h>

#include <limits>

#include "support/cuda_device.h"

namespace {

using namespace oscar;

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(DeviceMemoryGpu, TakesNoMoreThanItsLimit) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const torch::Device device(torch::kCUDA, 0);
  const auto take = [&](int64_t mebibytes) {
    return torch::empty({mebibytes * kMiB}, torch::dtype(torch::kUInt8).device(device));
  };
  const auto reserved_by_all_streams = [&] {
    at::accelerator::emptyCache();
    at::accelerator::resetPeakStats(0);
    for (int stream = 0; stream < kSideStreams; ++stream) {
      const InferenceOn on(side_stream(device, stream));
      take(600);
    }
    return at::accelerator::getDeviceStats(0).reserved_bytes[0].peak;
  };
  take(1);
  EXPECT_GE(reserved_by_all_streams(), kSideStreams * 600 * kMiB);
  limit_device_memory(device, 1024 * kMiB);
  EXPECT_LE(reserved_by_all_streams(), 1024 * kMiB);
  EXPECT_THROW(take(1100), c10::OutOfMemoryError);
  limit_device_memory(device, std::numeric_limits<int64_t>::max());
  EXPECT_NO_THROW(take(1100));
}

}  // namespace
