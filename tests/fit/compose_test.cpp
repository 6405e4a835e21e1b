// Heads of different fits side by side, each with what it needs and no more.
#include "oscar/fit/compose.h"

#include <gtest/gtest.h>

#include "fit/synthetic.h"
#include "oscar/fit/checks.h"
#include "oscar/fit/metric.h"

namespace oscar {
namespace {

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

}  // namespace
}  // namespace oscar
