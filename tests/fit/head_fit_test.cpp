// OSCAR's rotation, heads of different fits side by side, and decompositions that are shared.
#include "oscar/fit/head_fit.h"

#include <gtest/gtest.h>
#include <cmath>
#include <future>
#include <limits>
#include <random>
#include <vector>

#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/statistics.h"

namespace oscar {
namespace {

using synthetic::from_identity;
using synthetic::largest;

TEST(OscarRotation, IsOrthogonalAndKeepsTheTrace) {
  for (const int d : {1, 8, 12, 64, 96, 128, 256}) {
    const LayerStatistics s = synthetic::statistics(1, d, 600);
    const MatrixD c = s.q_moment[0] / static_cast<double>(s.count_q);
    const OscarRotation r = oscar_rotation(eigh(c, "test"));
    EXPECT_LE(from_identity(r.rotation.transpose() * r.rotation), 1e-12) << d;
    EXPECT_NEAR(r.eigenvalues.sum(), c.trace(), 1e-11 * c.trace()) << d;
  }
}

TEST(OscarRotation, OfADistinctDiagonalIsTheShuffledHadamardWrittenOut) {
  // Energies 40, 10, 30, 20: ascending eigenvectors are e1, e3, e2, e0. U H has row e1 = H row 0,
  // e3 = H row 1, e2 = H row 2, e0 = H row 3; perm of 4 is [3, 1, 2, 0].
  const MatrixD c = (VectorD(4) << 40, 10, 30, 20).finished().asDiagonal();
  MatrixD expected(4, 4);
  expected << 1, -1, -1, 1,  //
      1, 1, 1, 1,            //
      -1, 1, -1, 1,          //
      -1, -1, 1, 1;
  const OscarRotation r = oscar_rotation(eigh(c, "test"));
  EXPECT_LE(largest(r.rotation - 0.5 * expected), 1e-15) << r.rotation;
  EXPECT_EQ(r.eigenvalues, (VectorD(4) << 10, 20, 30, 40).finished());
}

TEST(OscarRotation, SpreadsTheEnergyEvenlyOverAllColumns) {
  const LayerStatistics s = synthetic::statistics(1, 128, 3000);
  const MatrixD c = s.q_moment[0] / static_cast<double>(s.count_q);
  const OscarRotation r = oscar_rotation(eigh(c, "test"));
  const MatrixD rotated = r.rotation.transpose() * c * r.rotation;
  for (int i = 0; i < 128; ++i) EXPECT_NEAR(rotated(i, i), c.trace() / 128, 1e-10 * c.trace());
}

TEST(FitLayer, OscarUsesQueriesForKeysAndAttentionOutputsForValues) {
  const LayerStatistics s = synthetic::statistics(2, 32);
  const LayerTransforms t = fit_layer(s, FitOptions{}, Rope{});
  for (int head = 0; head < 2; ++head) {
    const MatrixD c_q = s.q_moment[head] / static_cast<double>(s.count_q);
    const MatrixD c_s = s.attn_out_moment[head] / static_cast<double>(s.count_q);
    EXPECT_EQ(MatrixF(t.key.forward[head]), oscar_rotation(eigh(c_q, "q")).rotation.cast<float>());
    EXPECT_EQ(MatrixF(t.value.forward[head]),
              oscar_rotation(eigh(c_s, "s")).rotation.cast<float>());
    EXPECT_EQ(t.key.kind[head], TransformKind::kOscar);
    EXPECT_EQ(t.key.fallback[head], "");
  }
  EXPECT_TRUE(t.key.partner.empty());
  EXPECT_TRUE(t.warnings.empty());
  EXPECT_TRUE(std::isnan(t.predicted_output_nmse[1]));
}

TEST(FitLayer, EnergyObjectiveUsesTheEnergyMoment) {
  LayerStatistics s = synthetic::statistics(1, 16);
  FitOptions options;
  options.objective_v = ValueObjective::kEnergy;
  EXPECT_THROW(fit_layer(s, options, Rope{}), Error);
  s.v_energy_moment = s.k_moment;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const MatrixD c = s.k_moment[0] / static_cast<double>(s.count_kv);
  EXPECT_EQ(MatrixF(t.value.forward[0]), oscar_rotation(eigh(c, "energy")).rotation.cast<float>());
}

TEST(FitLayer, SharedFitsThePlainMeanOverHeadsAndWritesItForEachHead) {
  const LayerStatistics s = synthetic::statistics(3, 16);
  FitOptions options;
  options.granularity = Granularity::kShared;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const MatrixD mean = (s.q_moment[0] + s.q_moment[1] + s.q_moment[2]) / (3.0 * s.count_q);
  const OscarRotation expected = oscar_rotation(eigh(mean, "mean"));
  for (int head = 0; head < 3; ++head) {
    EXPECT_LE((t.key.forward[head] - expected.rotation.cast<float>()).cwiseAbs().maxCoeff(), 1e-6f);
    EXPECT_EQ(MatrixF(t.key.forward[head]), MatrixF(t.key.forward[0]));
    EXPECT_LE(largest(t.key.eigenvalues[head] - expected.eigenvalues),
              1e-12 * expected.eigenvalues[15]);
  }
}

TEST(FitLayer, ScoresAndOutputsAreUnchangedByEveryKind) {
  const int d = 24;
  const synthetic::Rows rows = synthetic::make_rows(2, d, 900, 2, 23);
  const LayerStatistics s = synthetic::collect(rows, 24);
  for (const TransformKind kind : {TransformKind::kIdentity, TransformKind::kHadamard,
                                   TransformKind::kOscar, TransformKind::kBalanced}) {
    for (const bool center : {false, true}) {
      FitOptions options;
      options.kind = kind;
      options.center = center;
      const LayerTransforms t = fit_layer(s, options, Rope{});
      for (int head = 0; head < 2; ++head) {
        EXPECT_EQ(t.key.kind[head], kind) << t.key.fallback[head];
        EXPECT_EQ(t.value.kind[head], kind) << t.value.fallback[head];
        const VectorD k_mean = t.key.mean[head].cast<double>();
        const MatrixD k = rows.k[head].rowwise() - k_mean;
        const MatrixD q_side = partner_matrix(t.key, Side::kKey, head).cast<double>();
        const MatrixD scores =
            (rows.q[head] * q_side) * (k * t.key.forward[head].cast<double>()).transpose();
        const MatrixD exact = rows.q[head] * k.transpose();
        EXPECT_LE(largest(scores - exact), 1e-5 * largest(exact));

        const VectorD v_mean = t.value.mean[head].cast<double>();
        const MatrixD v = (rows.v[head].rowwise() - v_mean) * t.value.forward[head].cast<double>();
        const MatrixD o_side = partner_matrix(t.value, Side::kValue, head).cast<double>();
        const MatrixD again = (v * o_side).rowwise() + v_mean;
        EXPECT_LE(largest(again - rows.v[head]), 1e-5 * largest(rows.v[head]));
      }
      EXPECT_NO_THROW(require_valid(t.key, Side::kKey, "layer 3"));
      EXPECT_NO_THROW(require_valid(t.value, Side::kValue, "layer 3"));
    }
  }
}

TEST(FitLayer, MeansAreThoseOfTheRowsAndZeroWithoutCentering) {
  const synthetic::Rows rows = synthetic::make_rows(2, 8, 300, 2, 3);
  const LayerStatistics s = synthetic::collect(rows, 4);
  FitOptions options;
  EXPECT_EQ(VectorF(fit_layer(s, options, Rope{}).key.mean[1]), VectorF::Zero(8));
  options.center = true;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const VectorF k_mean = rows.k[1].colwise().mean().cast<float>();
  const VectorF v_mean = rows.v[1].colwise().mean().cast<float>();
  EXPECT_LE((t.key.mean[1] - k_mean).cwiseAbs().maxCoeff(), 1e-6f);
  EXPECT_LE((t.value.mean[1] - v_mean).cwiseAbs().maxCoeff(), 1e-6f);
}

TEST(FitLayer, HadamardAndIdentityNeedNoDirections) {
  const LayerStatistics s = synthetic::statistics(1, 12, 50);
  FitOptions options;
  options.kind = TransformKind::kHadamard;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  EXPECT_EQ(MatrixF(t.key.forward[0]), hadamard(12).cast<float>());
  EXPECT_EQ(VectorD(t.key.eigenvalues[0]), VectorD::Ones(12));
  options.kind = TransformKind::kIdentity;
  EXPECT_EQ(MatrixF(fit_layer(s, options, Rope{}).value.forward[0]), MatrixF::Identity(12, 12));
}

TEST(FitLayer, EqualStatisticsGiveEqualBytes) {
  const LayerStatistics s = synthetic::statistics(2, 64);
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.center = true;
  options.position_span = 131072;
  options.rounding = Rounding::kShaped;
  options.scale_correction = ScaleCorrection::kMetric;
  const Rope rope = synthetic::rope(64);
  const LayerTransforms a = fit_layer(s, options, rope), b = fit_layer(s, options, rope);
  EXPECT_EQ(a.key.forward, b.key.forward);
  EXPECT_EQ(a.key.partner, b.key.partner);
  EXPECT_EQ(a.key.eigenvalues, b.key.eigenvalues);
  EXPECT_EQ(a.value.feedback, b.value.feedback);
  EXPECT_EQ(a.value.metric, b.value.metric);
}

TEST(FitLayer, PositionsChangeKeysAndLeaveValuesAlone) {
  const LayerStatistics s = synthetic::statistics(1, 16);
  FitOptions options;
  const Rope rope = synthetic::rope(16);
  const LayerTransforms still = fit_layer(s, options, rope);
  options.position_span = 4096;
  const LayerTransforms moved = fit_layer(s, options, rope);
  EXPECT_EQ(still.value.forward, moved.value.forward);
  EXPECT_FALSE(still.key.forward == moved.key.forward);
}

// Heads of different fits side by side, each with what it needs and no more.

LayerTransforms balanced_fit(const LayerStatistics& statistics) {
  return fit_layer(statistics,
                   {.kind = TransformKind::kBalanced,
                    .center = true,
                    .rounding = Rounding::kShaped,
                    .scale_correction = ScaleCorrection::kMetric},
                   Rope{});
}

TEST(ComposeHeads, PutsShapedAndPlainHeadsOfDifferentFitsTogether) {
  const LayerStatistics statistics = synthetic::statistics(2, 16);
  const LayerTransforms balanced = balanced_fit(statistics);
  const LayerTransforms plain = fit_layer(statistics, {.kind = TransformKind::kOscar}, Rope{});
  ASSERT_TRUE(plain.key.metric.empty() && plain.key.feedback.empty());
  const SideTransform mixed =
      compose_heads({{.fit = &balanced.key,
                      .head = 1,
                      .recipe = {.clip_ratio = 0.9f,
                                 .scale_correction = ScaleCorrection::kMetric,
                                 .rounding = Rounding::kShaped}},
                     {.fit = &plain.key, .head = 0, .recipe = {.clip_ratio = 0.8f}}},
                    Side::kKey);
  EXPECT_EQ(mixed.kind, (std::vector{TransformKind::kBalanced, TransformKind::kOscar}));
  EXPECT_EQ(mixed.recipe.clip_ratio, (std::vector{0.9f, 0.8f}));
  EXPECT_EQ(mixed.metric[0], balanced.key.metric[1]);
  EXPECT_EQ(mixed.feedback[0], balanced.key.feedback[1]);
  EXPECT_EQ(mixed.mean[0], balanced.key.mean[1]);
  EXPECT_EQ(mixed.partner[0], balanced.key.partner[1]);
  EXPECT_EQ(MatrixF(mixed.partner[1]), MatrixF(plain.key.forward[0]));
  EXPECT_TRUE(mixed.feedback[1].isIdentity(0));
  for (int head = 0; head < 2; ++head) {  // what a reader of the file makes of the factors
    EXPECT_EQ(mixed.recipe[head].rounding, rounding_of(mixed.feedback, head));
  }
  EXPECT_EQ(mixed.recipe[0].rounding, Rounding::kShaped);
  EXPECT_EQ(plain.key.recipe[0].rounding, Rounding::kPlain);  // has no factors at all
  EXPECT_NO_THROW(require_valid(mixed, Side::kKey, "test"));
}

TEST(ComposeHeads, LeavesOutWhatNoHeadNeeds) {
  const LayerTransforms balanced = balanced_fit(synthetic::statistics(2, 16));
  const LayerTransforms plain =
      fit_layer(synthetic::statistics(2, 16), {.kind = TransformKind::kHadamard}, Rope{});
  const SideTransform no_writer = compose_heads({{.fit = &balanced.value}}, Side::kValue);
  EXPECT_TRUE(no_writer.metric.empty() && no_writer.feedback.empty());
  EXPECT_EQ(no_writer.partner.count, 1);
  const SideTransform orthogonal =
      compose_heads({{.fit = &plain.value}, {.fit = &plain.value, .head = 1}}, Side::kValue);
  EXPECT_TRUE(orthogonal.partner.empty());
}

// Decompositions are shared between fits and threads.

TEST(Decompositions, OfEqualMatricesAreOneFromAnyThread) {
  std::mt19937_64 generator(3);
  const MatrixD rows = synthetic::normal_rows(200, 64, generator);
  const MatrixD moment = rows.transpose() * rows;
  Decompositions decompositions;
  std::vector<std::future<const Eigh*>> found;
  for (int i = 0; i < 8; ++i) {
    found.push_back(std::async(std::launch::async, [&, i] {
      const MatrixD own = i % 2 ? MatrixD(moment) : MatrixD(2 * moment);
      return &decompositions.of(own, "test");
    }));
  }
  std::vector<const Eigh*> all;
  for (auto& one : found) all.push_back(one.get());
  for (size_t i = 2; i < all.size(); ++i) EXPECT_EQ(all[i], all[i - 2]);
  EXPECT_NE(all[0], all[1]);
  const Eigh alone = eigh(moment, "test");
  EXPECT_EQ(all[1]->vectors, alone.vectors) << "side by side, the same bits";
  EXPECT_EQ(all[1]->values, alone.values);
}

TEST(Decompositions, FailForEveryoneWhoAsks) {
  Decompositions decompositions;
  MatrixD broken = MatrixD::Identity(4, 4);
  broken(1, 2) = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 2; ++i) EXPECT_THROW(decompositions.of(broken, "test"), Error);
}

}  // namespace
}  // namespace oscar
