// Fits made together equal fits made alone; rotations into a side's own basis.
#include "oscar/fit/fit.h"

#include <gtest/gtest.h>

#include "fit/synthetic.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/moments.h"

namespace oscar {
namespace {

FitOptions shaped_options(TransformKind kind, bool center, Granularity granularity) {
  return {.kind = kind,
          .granularity = granularity,
          .center = center,
          .rounding = Rounding::kShaped,
          .scale_correction = ScaleCorrection::kMetric,
          .position_span = 1000};
}

void expect_same_side(const SideTransform& a, const SideTransform& b) {
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.fallback, b.fallback);
  EXPECT_EQ(a.forward, b.forward);
  EXPECT_EQ(a.partner, b.partner);
  EXPECT_EQ(a.eigenvalues.data, b.eigenvalues.data);
  EXPECT_EQ(a.metric, b.metric);
  EXPECT_EQ(a.feedback, b.feedback);
  EXPECT_EQ(a.condition_number, b.condition_number);
}

TEST(FitLayerVariants, EqualFitsMadeAloneToTheBit) {
  // 20 tokens: moments are regularised, with a note in each fit.
  const LayerStatistics s = synthetic::statistics(2, 32, 20);
  const Rope rope = synthetic::rope(32);
  std::vector<FitRequest> requests;
  for (const auto kind :
       {TransformKind::kBalanced, TransformKind::kOscar, TransformKind::kHadamard}) {
    for (const bool center : {true, false}) {
      for (const auto granularity : {Granularity::kPerHead, Granularity::kShared}) {
        requests.push_back({shaped_options(kind, center, granularity)});
      }
    }
  }
  const std::vector<LayerTransforms> together = fit_layer_variants(s, requests, rope);
  ASSERT_EQ(together.size(), requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const LayerTransforms alone = fit_layer(s, requests[i].options, rope);
    expect_same_side(together[i].key, alone.key);
    expect_same_side(together[i].value, alone.value);
    EXPECT_EQ(together[i].warnings, alone.warnings);
  }
}

TEST(FitLayerVariants, InItsOwnBasisEveryChannelOfASideVariesAlike) {
  const int d = 64;
  const LayerStatistics s = synthetic::statistics(2, d);
  FitOptions options = shaped_options(TransformKind::kOscar, true, Granularity::kPerHead);
  options.position_span = 0;
  const auto fits = fit_layer_variants(s, {{options, true}, {options, false}}, Rope{});
  const LayerMoments m = layer_moments(s, options, Rope{});
  require_valid(fits[0].key, Side::kKey, "keys");
  require_valid(fits[0].value, Side::kValue, "values");
  for (int head = 0; head < 2; ++head) {
    EXPECT_EQ(fits[0].key.kind[head], TransformKind::kOscar);
    EXPECT_EQ(MatrixF(fits[0].key.forward[head]),
              oscar_rotation(eigh(m.key[head], "C_K")).rotation.cast<float>());
    const auto variances = [&](const LayerTransforms& fit) {
      const MatrixD r = fit.value.forward[head].cast<double>();
      return VectorD((r.transpose() * m.value[head] * r).diagonal().transpose());
    };
    const VectorD own = variances(fits[0]), published = variances(fits[1]);
    // The rotation is stored in f32.
    EXPECT_LE((own.array() / own.mean() - 1).abs().maxCoeff(), 1e-5);
    EXPECT_GT((published.array() / published.mean() - 1).abs().maxCoeff(), 0.05);
  }
}

TEST(FitLayerVariants, AHeadWithoutSpreadHasNoOwnBasisAndSaysSo) {
  LayerStatistics s = synthetic::statistics(2, 16);
  s.k_moment[0].setZero();
  s.k_sum[0].setZero();
  FitOptions options = shaped_options(TransformKind::kOscar, true, Granularity::kPerHead);
  options.position_span = 0;
  const auto fits = fit_layer_variants(s, {{options, true}}, Rope{});
  EXPECT_EQ(fits[0].key.kind[0], TransformKind::kHadamard);
  EXPECT_EQ(fits[0].key.fallback[0],
            "the covariance is zero: Hadamard instead of OSCAR's rotation");
  EXPECT_EQ(fits[0].key.kind[1], TransformKind::kOscar);
}

}  // namespace
}  // namespace oscar
