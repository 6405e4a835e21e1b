// Summaries of eigenvalue spectra whose answers are known.
#include "oscar/fit/spectrum.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

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
