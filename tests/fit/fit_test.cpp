// Fits of a layer: made together and alone, what they are predicted to lose, and their spectra.
#include "oscar/fit/fit.h"

#include <gtest/gtest.h>
#include <cmath>

#include "fit/synthetic.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/linalg.h"
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

// The loss model against rows, its minimum, and what it cannot see.

constexpr int kLossDim = 32;

FitOptions options(TransformKind kind, bool center = true) {
  FitOptions fit;
  fit.kind = kind;
  fit.center = center;
  return fit;
}

TEST(PredictedLoss, IsMeanSquareOfTheRowsTimesMeanCostOfAUnitError) {
  const synthetic::Rows rows = synthetic::make_rows(2, kLossDim, 500, 2, 3);
  const LayerStatistics sums = synthetic::collect(rows, 4);
  const LayerStatistics other = synthetic::statistics(2, kLossDim, 500, 9);  // another mean, too
  const LayerTransforms fit = fit_layer(other, options(TransformKind::kBalanced), {});
  const LayerMoments moments = scoring_moments(sums, {}, {});
  for (const Side side : {Side::kKey, Side::kValue}) {
    const SideTransform& t = side == Side::kKey ? fit.key : fit.value;
    const auto losses = predicted_losses(t, side, moments);
    for (int h = 0; h < 2; ++h) {
      const MatrixD x = side == Side::kKey ? rows.k[h] : rows.v[h];
      const MatrixD written =
          (x.rowwise() - t.mean[h].cast<double>()) * t.forward[h].cast<double>();
      const MatrixD partner = partner_matrix(t, side, h).cast<double>();
      double cost = 0;  // of errors of one on one channel after another
      if (side == Side::kKey) {
        const MatrixD scores = rows.q[h] * partner;  // q e^T for every query
        cost = scores.squaredNorm() / static_cast<double>(scores.rows());
      } else {
        cost = (partner * sums.o_proj_metric[h] * partner.transpose()).trace();
      }
      const double expected =
          written.squaredNorm() / static_cast<double>(written.size()) * (cost / kLossDim);
      EXPECT_NEAR(losses[h] / expected, 1, 1e-9);
    }
  }
}

TEST(PredictedLoss, OfTheBalancedTransformIsTheSmallestThereCanBe) {
  const LayerStatistics sums = synthetic::statistics(2, kLossDim);
  const LayerMoments moments = scoring_moments(sums, {}, {});
  const auto balanced = predicted_losses(fit_layer(sums, options(TransformKind::kBalanced), {}).key,
                                         Side::kKey, moments);
  for (int h = 0; h < 2; ++h) {
    const Eigh c = eigh(moments.key[h], "C_K");
    const MatrixD root = symmetric_power(c.vectors, c.values, 0.5);
    const VectorD d = eigh(root * moments.query[h] * root, "K").values;
    const double least = std::pow(d.cwiseMax(0.0).cwiseSqrt().sum() / kLossDim, 2);
    EXPECT_GE(balanced[h], least * (1 - 1e-12));
    EXPECT_LE(balanced[h], least * 1.001);  // rounding of T to bf16
  }
  for (const auto kind : {TransformKind::kOscar, TransformKind::kHadamard}) {
    const auto other =
        predicted_losses(fit_layer(sums, options(kind), {}).key, Side::kKey, moments);
    // Every rotation loses mean diag(C_K) mean diag(C_Q): here 3.4 and 2.5 times the least.
    for (int h = 0; h < 2; ++h) EXPECT_GT(other[h], 2 * balanced[h]);
  }
}

TEST(PredictedLoss, CannotTellRotationsApart) {
  const LayerStatistics sums = synthetic::statistics(1, kLossDim);
  const LayerMoments moments = scoring_moments(sums, {}, {});
  const auto loss = [&](TransformKind kind) {
    return predicted_losses(fit_layer(sums, options(kind), {}).value, Side::kValue, moments)[0];
  };
  EXPECT_NEAR(loss(TransformKind::kOscar) / loss(TransformKind::kIdentity), 1, 1e-6);  // f32
}

TEST(PredictedLoss, OfRowsThatKeepTheirMeanCountsIt) {
  const LayerStatistics sums = synthetic::statistics(1, kLossDim);
  const LayerMoments moments = scoring_moments(sums, {}, {});
  const auto loss = [&](bool center) {
    const FitOptions fit = options(TransformKind::kIdentity, center);
    return predicted_losses(fit_layer(sums, fit, {}).key, Side::kKey, moments)[0];
  };
  const double energy = moments.key[0].trace();
  EXPECT_NEAR(loss(false) / loss(true), 1 + moments.key_mean[0].squaredNorm() / energy, 1e-6);
}

// Summaries of eigenvalue spectra whose answers are known.

TEST(Spectrum, OfEqualEigenvaluesHasFullEffectiveRank) {
  const SpectrumSummary s = summarise_spectrum(VectorD::Constant(128, 3.0));
  EXPECT_NEAR(s.effective_rank, 128, 1e-9);
  EXPECT_NEAR(s.participation_ratio, 128, 1e-9);
  EXPECT_DOUBLE_EQ(s.top_share, 1.0 / 128);
  EXPECT_EQ(s.dimensions_for_99_percent, 127);
  EXPECT_DOUBLE_EQ(s.trace, 384);
}

TEST(Spectrum, OfOneDirectionHasEffectiveRankOne) {
  const SpectrumSummary s = summarise_spectrum((VectorD(4) << -1e-18, 0, 0, 5).finished());
  EXPECT_DOUBLE_EQ(s.effective_rank, 1);
  EXPECT_DOUBLE_EQ(s.participation_ratio, 1);
  EXPECT_EQ(s.rank, 1);
  EXPECT_EQ(s.dimensions_for_99_percent, 1);
}

TEST(Spectrum, OfHalfAndTwoQuartersIsAsOnPaper) {
  const SpectrumSummary s = summarise_spectrum((VectorD(3) << 1, 1, 2).finished());
  EXPECT_NEAR(s.effective_rank, std::exp(1.5 * std::log(2.0)), 1e-12);
  EXPECT_NEAR(s.participation_ratio, 16.0 / 6.0, 1e-12);
  EXPECT_EQ(describe(s), "effective rank 2.8 of 3, participation 2.7, top share 50.0%, 99% in 3");
}

TEST(Spectrum, OfAZeroHeadSaysSo) {
  EXPECT_EQ(describe(summarise_spectrum(VectorD::Zero(8))), "no energy in 8 dimensions");
}

}  // namespace
}  // namespace oscar
