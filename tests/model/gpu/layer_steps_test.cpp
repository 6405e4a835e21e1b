// The kernels between a layer's products beside the operations of torch that they stand for.
#include "oscar/model/transformer.h"

#include <gtest/gtest.h>

#include "oscar/model/attention.h"
#include "support/cuda_device.h"

namespace oscar {
namespace {

#define OSCAR_NEEDS_CUDA() \
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device"

torch::Tensor random_rows(std::vector<int64_t> shape, double scale = 1) {
  return (torch::randn(shape, torch::device(torch::kCUDA)) * scale).to(torch::kBFloat16);
}

// Share of values that differ, and at most by `steps` of bf16.
void expect_same_rounding(const torch::Tensor& found, const torch::Tensor& wanted, double share,
                          double steps) {
  ASSERT_EQ(found.sizes(), wanted.sizes());
  ASSERT_EQ(found.scalar_type(), wanted.scalar_type());
  const auto a = found.to(torch::kFloat64), b = wanted.to(torch::kFloat64);
  EXPECT_LE(a.ne(b).to(torch::kFloat64).mean().item<double>(), share);
  const auto step = b.abs().clamp_min(1e-30).log2().floor().sub(7).exp2();
  EXPECT_LE(((a - b).abs() / step).max().item<double>(), steps);
}

torch::Tensor norm_of(const torch::Tensor& x, const torch::Tensor& weight) {
  return torch::rms_norm(x, {x.size(-1)}, weight, 1e-6);
}

TEST(LayerStepsGpu, NormsAndSumsAreThoseOfTorch) {
  OSCAR_NEEDS_CUDA();
  for (const int64_t width : {576, 4096, 5120}) {
    const auto x = random_rows({2, 300, width}), more = random_rows({2, 300, width}, 8),
               weight = random_rows({width});
    expect_same_rounding(rms_norm(x, weight, 1e-6), norm_of(x, weight), 1e-3, 1);
    const NormedSum both = add_and_norm(x, more, weight, 1e-6);
    EXPECT_TRUE(torch::equal(both.sum, x + more));
    expect_same_rounding(both.norm, norm_of(x + more, weight), 1e-3, 1);
  }
}

TEST(LayerStepsGpu, HeadsAreNormedAndTurnedAsByTorch) {
  OSCAR_NEEDS_CUDA();
  constexpr int64_t kTokens = 130, kKvHeads = 3, kHeads = 9;
  for (const auto& [d, rotary] : {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {128, 64}}) {
    const auto qkv = random_rows({2, kTokens, kHeads + 2 * kKvHeads, d}, 4);
    const auto angles = torch::randn({kTokens, rotary / 2}, torch::device(torch::kCUDA)) * 3;
    const auto cos = angles.cos(), sin = angles.sin();
    for (const bool norms : {false, true}) {
      HeadNorms weights;
      weights.eps = 1e-6;
      if (norms) weights.q = random_rows({d}), weights.k = random_rows({d});
      const RotatedRows rows = split_and_rotate(qkv, kKvHeads, weights, cos, sin);
      const auto turned = [&](int64_t first, int64_t count, const torch::Tensor& norm) {
        auto own = qkv.narrow(2, first, count);
        if (norms) own = norm_of(own, norm);
        return apply_rope(own.transpose(1, 2), cos, sin);
      };
      expect_same_rounding(rows.q, turned(0, kHeads, weights.q), 2e-3, 256);
      expect_same_rounding(rows.k, turned(kHeads, kKvHeads, weights.k), 2e-3, 256);
      EXPECT_TRUE(torch::equal(rows.v, qkv.narrow(2, kHeads + kKvHeads, kKvHeads).transpose(1, 2)));
    }
  }
}

TEST(LayerStepsGpu, GatesAreThoseOfTorchToTheBit) {
  OSCAR_NEEDS_CUDA();
  const auto gate_up = random_rows({3, 100, 2 * 1536}, 4);
  const auto halves = gate_up.chunk(2, -1);
  EXPECT_TRUE(torch::equal(gated(gate_up, Activation::kSilu), torch::silu(halves[0]) * halves[1]));
  EXPECT_TRUE(torch::equal(gated(gate_up, Activation::kGeluTanh),
                           torch::gelu(halves[0], "tanh") * halves[1]));
}

TEST(LayerStepsGpu, WhatNoKernelTakesGoesThroughTorch) {
  OSCAR_NEEDS_CUDA();
  const auto wide = torch::randn({5, 100}, torch::device(torch::kCUDA));
  const auto weight = torch::randn({100}, torch::device(torch::kCUDA));
  EXPECT_TRUE(torch::equal(rms_norm(wide, weight, 1e-6), norm_of(wide, weight)));
  const auto odd = random_rows({5, 100}), odd_weight = random_rows({100});
  EXPECT_TRUE(torch::equal(rms_norm(odd, odd_weight, 1e-6), norm_of(odd, odd_weight)));
  const auto narrow = random_rows({5, 24});  // halves of 12
  EXPECT_TRUE(torch::equal(gated(narrow, Activation::kSilu),
                           torch::silu(narrow.slice(1, 0, 12)) * narrow.slice(1, 12)));
}

}  // namespace
}  // namespace oscar
