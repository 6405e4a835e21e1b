// On a GPU: memory that is page-locked while its tensor lives.
#include "oscar/model/device.h"

#include <gtest/gtest.h>

#include "support/cuda_device.h"

namespace {

using namespace oscar;

TEST(PinnedMemoryGpu, KeepsItsNumbersThereAndBack) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const torch::Device device(torch::kCUDA, 0);
  const torch::Tensor numbers = torch::randn({3, 1000, 17});
  torch::Tensor host = numbers.clone();
  const void* const memory = host.data_ptr();
  {
    const torch::Tensor locked = pinned(std::move(host), device);
    EXPECT_EQ(locked.data_ptr(), memory);
    EXPECT_TRUE(locked.is_pinned());
    const torch::Tensor there = locked.to(device, /*non_blocking=*/true);
    wait_for_stream(device);
    locked.copy_(there.mul(2), /*non_blocking=*/true);
    wait_for_stream(device);
    EXPECT_TRUE(torch::equal(locked, there.mul(2).cpu()));
  }
  // Given back: the same memory may be locked again.
  torch::Tensor again = numbers.clone();
  for (int i = 0; i < 3; ++i) {
    again = pinned(again.clone(), device);
    EXPECT_TRUE(again.is_pinned());
  }
  EXPECT_TRUE(torch::equal(again, numbers));
  EXPECT_FALSE(pinned(numbers.clone(), torch::kCPU).is_pinned());
}

}  // namespace
