// Other projects' codecs and other widths on a GPU, beside the CPU.
#include "oscar/eval/rival_codecs.h"

#include <gtest/gtest.h>

#include <chrono>

#include "attention/random_codec.h"
#include "oscar/attention/wide_codes.h"
#include "support/cuda_device.h"

namespace {

using namespace oscar;

constexpr int64_t kHeads = 2, kDim = 128;

// torch on a GPU divides by a number as times its reciprocal. What lay halfway between two codes or
// scales then falls to the other: in 3.6% of NVFP4's rows and 3% of INT4's on an H100, and in as
// many on a CPU that divides so. What is lost of `x` is the same.
void expect_like(const torch::Tensor& gpu, const torch::Tensor& cpu, const torch::Tensor& x,
                 const std::string& what) {
  const auto found = gpu.to(torch::kCPU), size = cpu.abs().amax(3, true) + 1e-6;
  const auto off = (found - cpu).abs().gt(0x1p-10 * size).any(3);
  EXPECT_LE(off.to(torch::kFloat64).mean().item<double>(), 0.05) << what;
  const auto lost = [&](const torch::Tensor& y) { return (y - x).square().mean().item<double>(); };
  EXPECT_NEAR(lost(found), lost(cpu), 0.01 * lost(cpu)) << what;
}

torch::Tensor random_rows(int64_t tokens) {
  auto x = torch::randn({1, kHeads, tokens, kDim});
  x.select(3, 7) += 300;  // as biased keys have it
  return x.to(torch::kBFloat16).to(torch::kFloat32);
}

TEST(RivalCodecsOnTheGpu, ReadBackWhatTheCpuDoes) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const c10::InferenceMode guard;
  torch::manual_seed(6);
  const auto x = random_rows(500);
  for (const RivalFormat& rival : rival_formats()) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const auto code = [&](torch::Device device) {
        return rival_codec(rival, side, kDim, 64, device)(x.to(device));
      };
      expect_like(code(torch::kCUDA), code(torch::kCPU), x, rival.name);
    }
  }
}

TEST(RivalCodecsOnTheGpu, OtherWidthsAreThoseOfTheCpu) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const c10::InferenceMode guard;
  torch::manual_seed(7);
  const auto codec = oscar_test::random_codec(kHeads, kDim, {.shaped = true, .group = 32});
  const auto x = torch::randn({1, kHeads, 500, kDim}).to(torch::kBFloat16).to(torch::kFloat32);
  SideCodec host = codec->key;
  host.code_bits = 3;
  SideCodec device = host;
  for (torch::Tensor* matrix :
       {&device.forward, &device.partner, &device.feedback, &device.metric}) {
    *matrix = matrix->to(torch::kCUDA);
  }
  expect_like(quantize_dequantize_wide(device, x.to(torch::kCUDA), "test"),
              quantize_dequantize_wide(host, x, "test"), x, "3 bits");
}

// A batch of 16,384 tokens through one side of a layer. Of 36 methods, 28 layers and 90,000 tokens
// those 200 ms would be 40 minutes: a codec that takes longer has lost its vectors.
TEST(RivalCodecsOnTheGpu, TakeMillisecondsForABatch) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  const c10::InferenceMode guard;
  const auto x = random_rows(16384).to(torch::kCUDA);
  for (const RivalFormat& rival : rival_formats()) {
    const auto code = rival_codec(rival, Side::kKey, kDim, 64, torch::kCUDA);
    code(x).sum().item<float>();  // warms up
    const auto start = std::chrono::steady_clock::now();
    code(x).sum().item<float>();
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    printf("%-20s %6.2f ms\n", rival.name, ms);
    EXPECT_LT(ms, 200) << rival.name;
  }
}

}  // namespace
