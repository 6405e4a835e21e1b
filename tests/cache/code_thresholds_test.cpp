// Code thresholds against the codec's own arithmetic, at and around every place where they matter.
#include "oscar/cache/code_thresholds.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace {

using oscar::MetadataDtype;
using oscar::ScaleZero;

// What rows lead to, and then some: clipped and constant rows, zeros at and beside half codes.
std::vector<ScaleZero> scales_and_zeros(int random) {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  std::vector<ScaleZero> all;
  for (const MetadataDtype dtype :
       {MetadataDtype::kFp16, MetadataDtype::kBf16, MetadataDtype::kFp32}) {
    for (int i = 0; i < random; ++i) {
      const float middle = i % 3 ? normal(rng) : 0.0f, size = std::exp(3.0f * normal(rng));
      const float half = std::fabs(normal(rng));
      all.push_back(oscar::scale_and_zero(size * (middle - half), size * (middle + half), dtype));
    }
    for (const float zero : {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f, 0.24999999f, 0.40000001f,
                             -0.5f, 1024.0f, -1024.0f, 5.9604645e-8f, -7.25f}) {
      for (const float scale : {1.0f, 0.33325195f, 6.1035156e-5f, 3.3333333e-9f, 3.0e4f, 0.7f}) {
        const ScaleZero exact{round_to_metadata(scale, dtype), round_to_metadata(zero, dtype)};
        if (!(exact.scale > 0.0f) || !oscar::is_finite(exact.scale)) continue;
        all.push_back(exact);
        for (const float beside : {oscar::float_from_bits(oscar::float_bits(exact.zero) + 1),
                                   oscar::float_from_bits(oscar::float_bits(exact.zero) - 1)}) {
          if (exact.zero != 0.0f) all.push_back({exact.scale, beside});
        }
      }
    }
    for (const float x : {0.0f, 100.0f, -100.0f, 3.0e38f, -3.0e38f, 1.0e-30f}) {
      all.push_back(oscar::scale_and_zero(x, x, dtype));
    }
  }
  all.push_back({3.3333333e-9f, 3.0e10f});
  all.push_back({3.3333333e-9f, -12345679.0f});
  return all;
}

TEST(CodeThresholds, AreTheFirstValueOfTheirCode) {
  int finite = 0;
  for (const ScaleZero sz : scales_and_zeros(20000)) {
    if (!oscar::is_finite(sz.scale) || !oscar::is_finite(sz.zero)) continue;
    for (int k = 1; k <= 3; ++k) {
      const float t = oscar::code_threshold(k, sz);
      if (std::isinf(t)) {
        EXPECT_LT(code_of(3.4028235e38f, sz), k);
        continue;
      }
      ++finite;
      ASSERT_GE(code_of(t, sz), k) << "scale " << sz.scale << " zero " << sz.zero;
      if (t > -3.4028235e38f) {
        ASSERT_LT(code_of(oscar::float_below(t), sz), k)
            << "scale " << sz.scale << " zero " << sz.zero << " threshold " << t;
      }
    }
  }
  EXPECT_GT(finite, 100000);
}

TEST(CodeThresholds, InBf16GiveTheCodeOfEveryFiniteBf16) {
  for (const ScaleZero sz : scales_and_zeros(40)) {
    if (!oscar::is_finite(sz.scale) || !oscar::is_finite(sz.zero)) continue;
    float bound[3];
    for (int k = 1; k <= 3; ++k) {
      const uint32_t bits = oscar::bf16_from_below(oscar::code_threshold(k, sz));
      bound[k - 1] = oscar::bf16_to_float(static_cast<uint16_t>(bits));
    }
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
      const float x = oscar::bf16_to_float(static_cast<uint16_t>(bits));
      if (!oscar::is_finite(x)) continue;
      const int code = (x >= bound[0]) + (x >= bound[1]) + (x >= bound[2]);
      ASSERT_EQ(code, code_of(x, sz)) << "x " << x << " scale " << sz.scale << " zero " << sz.zero;
    }
  }
}

}  // namespace
