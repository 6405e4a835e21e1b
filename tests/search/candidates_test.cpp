// Codecs put together on the device equal those of a composed transform.
#include "oscar/search/candidates.h"

#include <gtest/gtest.h>

#include "search/layer_search_case.h"

namespace {

using namespace oscar;
using namespace oscar::search_case;

void expect_equal(const torch::Tensor& found, const torch::Tensor& expected, const char* what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  if (found.defined()) {
    EXPECT_TRUE(torch::equal(found, expected)) << what;
  }
}

void expect_equal(const SideCodec& found, const SideCodec& expected) {
  expect_equal(found.forward, expected.forward, "forward");
  expect_equal(found.partner, expected.partner, "partner");
  expect_equal(found.mean, expected.mean, "mean");
  expect_equal(found.centres, expected.centres, "centres");
  expect_equal(found.feedback, expected.feedback, "feedback");
  expect_equal(found.metric, expected.metric, "metric");
  EXPECT_EQ(found.recipe, expected.recipe);
  EXPECT_EQ(found.format, expected.format);
}

class CandidateCodecsTest : public testing::Test {
 protected:
  LayerStatistics statistics_ = statistics_of({random_chunk(1), random_chunk(2)});
  LayerTransforms balanced_ = fit_layer(statistics_,
                                        {.kind = TransformKind::kBalanced,
                                         .center = true,
                                         .rounding = Rounding::kShaped,
                                         .scale_correction = ScaleCorrection::kMetric},
                                        Rope{});
  LayerTransforms plain_ = fit_layer(statistics_, {.kind = TransformKind::kOscar}, Rope{});
  // The first head has centres, whatever they were fitted to.
  LayerTransforms with_centres_ = [this] {
    LayerTransforms fit = balanced_;
    fit.key.centres = MatrixStack<float>(fit.key.forward.count, 2, fit.key.forward.cols);
    for (int i = 0; i < 2 * fit.key.forward.cols; ++i) {
      fit.key.centres.data[static_cast<size_t>(i)] = 0.1f * static_cast<float>(i % 13 - 6);
    }
    return fit;
  }();
  const Rope rope_ = [] {
    Rope rope;
    rope.rotary_dim = 2;
    rope.inv_freq = {0.01};
    rope.max_positions = 2048;
    return rope;
  }();
  CandidateCodecs codecs_{kQuantizer, 1, rope_, torch::kCPU};
};

TEST_F(CandidateCodecsTest, EqualTheCodecOfTheComposedHeads) {
  for (const Side side : {Side::kKey, Side::kValue}) {
    const auto of = [&](const LayerTransforms& fit, int head, ScaleCorrection correction,
                        Rounding rounding) {
      return FittedHead{
          .fit = side == Side::kKey ? &fit.key : &fit.value,
          .head = head,
          .recipe = {.clip_ratio = 0.9f, .scale_correction = correction, .rounding = rounding}};
    };
    using enum ScaleCorrection;
    for (const Candidate& heads :
         {Candidate{of(plain_, 0, kNone, Rounding::kPlain), of(plain_, 1, kNone, Rounding::kPlain)},
          Candidate{of(balanced_, 1, kMetric, Rounding::kShaped),
                    of(plain_, 0, kUnbiased, Rounding::kPlain),
                    of(balanced_, 0, kNone, Rounding::kPlain)},
          Candidate{of(with_centres_, 0, kNone, Rounding::kPlain),
                    of(with_centres_, 1, kNone, Rounding::kPlain),
                    of(plain_, 0, kNone, Rounding::kPlain)}}) {
      expect_equal(codecs_.codec(heads, side), make_side_codec(compose_heads(heads, side), side,
                                                               kQuantizer, 1, rope_, torch::kCPU));
    }
  }
}

}  // namespace
