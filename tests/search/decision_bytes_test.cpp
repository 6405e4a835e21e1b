// A decision that came from another process becomes the one that was made there.
#include "oscar/search/decision_bytes.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"
#include "search/layer_search_case.h"
#include "support/expect_transforms.h"

namespace {

using namespace oscar;
using namespace oscar::search_case;

TEST(DecisionBytes, BecomeTheSameDecisionToTheBit) {
  const std::vector<HeldChunk> fit = {planted_chunk(1), planted_chunk(2)};
  const LayerStatistics statistics = statistics_of(fit);
  const FitOptions fixed;
  const SearchOptions search{
      .kind = true, .center = true, .clip = true, .rounding = true, .scale_correction = true};
  const Rope rope;
  LayerDecision made = search_layer({.statistics = statistics,
                                     .fixed = fixed,
                                     .search = search,
                                     .rope = rope,
                                     .quantizer = kQuantizer,
                                     .output_metric = output_metric()},
                                    {{planted_chunk(3)}, {planted_chunk(4)}});
  made.main.warnings = {"noticed \xc3\xa4"};
  const LayerDecision read = decision_from_bytes(decision_bytes(made), kGeometry);
  EXPECT_EQ(read.main.warnings, made.main.warnings);
  const LayerDecision again = fit_again(read, statistics, fixed, rope);
  const LayerDecision here = fit_again(made, statistics, fixed, rope);
  expect_equal(again.main, here.main);
  expect_equal(again.portable.shared, here.portable.shared);
  expect_equal(again.portable.per_head, here.portable.per_head);
}

TEST(DecisionBytes, OfAnotherLayerAreRefused) {
  LayerGeometry wider = kGeometry;
  wider.num_kv_heads = 4;
  const HeadChoice head{.fit = {}, .recipe = {}};
  const std::vector<HeadChoice> two = {head, head};
  const auto bytes = decision_bytes({.main = {}, .portable = {}, .choices = {{two, two}}});
  EXPECT_NO_THROW(decision_from_bytes(bytes, kGeometry));
  EXPECT_THROW(decision_from_bytes(bytes, wider), Error);
  EXPECT_THROW(decision_from_bytes({1, 2, 3}, kGeometry), Error);
}

}  // namespace
