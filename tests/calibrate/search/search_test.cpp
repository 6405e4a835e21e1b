#include "oscar/calibrate/search/search.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <csignal>
#include <cstdlib>
#include <numeric>

#include "calibrate/search/layer_search_case.h"
#include "oscar/attention/int2_attention.h"
#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/fit/fit.h"
#include "support/expect_transforms.h"

// What the search half preferred and the confirmation half denies is not believed.

namespace {

using namespace oscar;
using namespace oscar::search_case;

// In the search half nobody looks at the four channels with the outliers, so clipping them pays; in
// the confirmation half nobody looks at anything else.
TEST(Confirmation, RejectsAnOverfitChoice) {
  Search search = random_search();
  search.fixed = {.kind = TransformKind::kIdentity, .clip_k = 0, .clip_v = 0};
  search.options = {.clip = true};
  const auto with_outliers = [](uint64_t seed, bool seen) {
    HeldSequence sequence = random_sequence(seed);
    sequence.k.narrow(2, 0, 4).mul_(8.0f);
    (seen ? sequence.q.narrow(2, 4, kDim - 4) : sequence.q.narrow(2, 0, 4)).zero_();
    return sequence;
  };
  search.held.search = {with_outliers(10, false), with_outliers(11, false)};
  search.held.confirm = {with_outliers(12, false), with_outliers(13, false)};
  const LayerDecision agreed = search.run();
  for (const float ratio : agreed.main.key.recipe.clip_ratio) {
    EXPECT_TRUE(ratio > 0 && ratio < 0.9f) << "the planted gain was not found: " << ratio;
  }
  search.held.confirm = {with_outliers(12, true), with_outliers(13, true)};
  const LayerDecision denied = search.run();
  for (const float ratio : denied.main.key.recipe.clip_ratio) EXPECT_EQ(ratio, 0.0f);
  EXPECT_FALSE(denied.main.search["key"]["heads"][0]["confirmed"][0]["accepted"].get<bool>());
}

}  // namespace

// A decision that came from another process becomes the one that was made there.

namespace {

using namespace oscar;
using namespace oscar::search_case;

TEST(DecisionBytes, BecomeTheSameDecisionToTheBit) {
  const std::vector<HeldSequence> fit = {planted_sequence(1), planted_sequence(2)};
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
                                    {{planted_sequence(3)}, {planted_sequence(4)}});
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

// The search finds what was planted, and predicts the error that is made.

namespace {

using namespace oscar;
using namespace oscar::search_case;

// Of each head, by the engine that evaluation uses: loss and energy of every query behind the
// windows, sequence after sequence.
struct EngineLosses {
  std::vector<double> error, energy;

  double nmse() const {
    return std::accumulate(error.begin(), error.end(), 0.0) /
           std::accumulate(energy.begin(), energy.end(), 0.0);
  }
};

std::vector<EngineLosses> engine_losses(const LayerTransforms& layer,
                                        const std::vector<HeldSequence>& sequences) {
  const auto codec = std::make_shared<LayerCodec>();
  codec->key = make_side_codec(layer.key, Side::kKey, kQuantizer, 1, Rope{}, torch::kCPU);
  codec->value = make_side_codec(layer.value, Side::kValue, kQuantizer, 1, Rope{}, torch::kCPU);
  const CacheView view{.sink = kQuantizer.sink_tokens, .recent = kQuantizer.recent_tokens};
  std::vector<EngineLosses> losses(kHeads);
  for (const HeldSequence& c : sequences) {
    const auto attend = [&](const std::shared_ptr<LayerCodec>& used) {
      Int2Attention engine({used}, view, {0});
      return engine
          .attend(0, c.q.unsqueeze(0), c.k.unsqueeze(0), c.v.unsqueeze(0),
                  1 / std::sqrt(double{kDim}))
          .squeeze(0)
          .slice(1, view.sink + view.recent)
          .to(torch::kFloat64);
    };
    const auto exact = attend(nullptr), rounded = attend(codec);
    const auto metric = output_metric().to(torch::kFloat64);
    const auto weigh = [&](const torch::Tensor& x) {  // [Hkv, queries]
      return torch::matmul(x, metric).mul(x).sum(2).view({kHeads, kGroup, -1}).sum(1);
    };
    const auto append = [](std::vector<double>& all, const torch::Tensor& own) {
      all.insert(all.end(), own.data_ptr<double>(), own.data_ptr<double>() + own.numel());
    };
    const auto e = weigh(rounded - exact), o = weigh(exact);
    for (int h = 0; h < kHeads; ++h) {
      append(losses[h].error, e[h].contiguous());
      append(losses[h].energy, o[h].contiguous());
    }
  }
  return losses;
}

TEST(LayerSearch, ReplacesAClippingRatioThatIsClearlyWrong) {
  Search search = random_search();
  search.fixed.clip_k = search.fixed.clip_v = 0.4;  // most of every row is cut off
  search.options.clip = true;
  const LayerDecision decision = search.run();
  for (const SideTransform* side : {&decision.main.key, &decision.main.value}) {
    // The lowest ratio that is tried beside the fixed one, so any but that one.
    for (const float ratio : side->recipe.clip_ratio) EXPECT_GE(ratio, 0.84f);
  }
  Search none = search;
  none.options = {};
  const LayerDecision fixed = none.run();
  EXPECT_FLOAT_EQ(fixed.main.key.recipe.clip_ratio[0], 0.4f);
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_LT(decision.main.predicted_output_nmse[h], 0.7 * fixed.main.predicted_output_nmse[h]);
  }
}

TEST(LayerSearch, AHeadThatHadamardWritesBetterFallsBackToIt) {
  Search search = random_search();
  search.fixed.kind = TransformKind::kBalanced;
  search.fixed.clip_k = search.fixed.clip_v = 0.4;
  const LayerDecision kept = search.run();
  search.options.fallback = true;
  const LayerDecision decision = search.run();
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(kept.main.key.kind[h], TransformKind::kBalanced);
    EXPECT_EQ(decision.main.key.kind[h], TransformKind::kHadamard);
    EXPECT_EQ(decision.main.value.kind[h], TransformKind::kHadamard);
    EXPECT_LT(decision.main.predicted_output_nmse[h], 0.7 * kept.main.predicted_output_nmse[h]);
    EXPECT_TRUE(decision.main.search["pair"][h]["fell_back"]);
  }
  EXPECT_FLOAT_EQ(decision.main.key.recipe.clip_ratio[0], 0.96f);
  EXPECT_FLOAT_EQ(decision.main.value.recipe.clip_ratio[0], 0.92f);

  search.fixed.clip_k = search.fixed.clip_v = 0.92;
  search.statistics =
      statistics_of({planted_sequence(1), planted_sequence(2), planted_sequence(3)});
  search.held.confirm = {planted_sequence(12), planted_sequence(13)};
  const LayerDecision better = search.run();
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(better.main.key.kind[h], TransformKind::kBalanced);
    EXPECT_FALSE(better.main.search["pair"][h]["fell_back"]);
  }
}

TEST(LayerSearch, WhatWasChosenIsFittedAgainToOtherSums) {
  Search search = random_search();
  search.fixed.kind = TransformKind::kBalanced;
  search.options = {.kind = true, .clip = true, .rounding = true, .scale_correction = true};
  search.statistics =
      statistics_of({planted_sequence(1), planted_sequence(2), planted_sequence(3)});
  search.held.search = {planted_sequence(10), planted_sequence(11)};
  search.held.confirm = {planted_sequence(12), planted_sequence(13)};
  const LayerDecision decision = search.run();
  const LayerDecision same = fit_again(decision, search.statistics, search.fixed, search.rope);
  const auto more = statistics_of({planted_sequence(1), planted_sequence(2), planted_sequence(3),
                                   planted_sequence(10), planted_sequence(11)});
  const LayerDecision again = fit_again(decision, more, search.fixed, search.rope);
  for (const auto side : {Side::kKey, Side::kValue}) {
    const SideTransform& first = side_of(decision.main, side);
    EXPECT_EQ(side_of(same.main, side).forward.data, first.forward.data);
    EXPECT_EQ(side_of(same.main, side).metric.data, first.metric.data);
    EXPECT_EQ(side_of(same.main, side).feedback.data, first.feedback.data);
    EXPECT_EQ(side_of(same.portable.per_head, side).forward.data,
              side_of(decision.portable.per_head, side).forward.data);
    EXPECT_EQ(side_of(again.main, side).recipe, first.recipe);
    EXPECT_EQ(side_of(again.main, side).kind, first.kind);
    EXPECT_EQ(side_of(again.main, side).clip_losses, first.clip_losses);
    EXPECT_NE(side_of(again.main, side).forward.data, first.forward.data);
  }
  EXPECT_EQ(again.main.predicted_output_nmse, decision.main.predicted_output_nmse);
  EXPECT_EQ(again.main.search, decision.main.search);
}

TEST(LayerSearch, FindsTheKindThatSpreadsOutliersAndTheWriterThatHelps) {
  Search search = random_search();
  search.statistics =
      statistics_of({planted_sequence(1), planted_sequence(2), planted_sequence(3)});
  search.held.search = {planted_sequence(10), planted_sequence(11)};
  search.held.confirm = {planted_sequence(12), planted_sequence(13)};
  search.options = {.kind = true, .center = true, .rounding = true, .scale_correction = true};
  const LayerDecision decision = search.run();
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(decision.main.key.kind[h], TransformKind::kBalanced);
    EXPECT_NE(decision.main.key.mean[h].norm(), 0.0f);
  }
  search.options = {.kind = true, .center = true};
  const LayerDecision plain_writer = search.run();
  search.options = {};
  const LayerDecision fixed = search.run();
  for (int h = 0; h < kHeads; ++h) {
    const double found = decision.main.predicted_output_nmse[h];
    EXPECT_LT(found, 0.8 * fixed.main.predicted_output_nmse[h]);
    EXPECT_LT(found, 0.9 * plain_writer.main.predicted_output_nmse[h]) << "the writer's share";
  }
}

TEST(LayerSearch, PredictsTheErrorThatTheEngineMakes) {
  Search search = random_search();
  search.fixed.kind = TransformKind::kBalanced;
  search.fixed.center = true;
  search.fixed.rounding = Rounding::kShaped;
  search.fixed.scale_correction = ScaleCorrection::kMetric;
  search.options = {.kind = true, .center = true, .granularity = true, .clip = true};
  const LayerDecision decision = search.run();
  const auto losses = engine_losses(decision.main, search.held.confirm);
  for (int h = 0; h < kHeads; ++h) {
    const double expected = losses[h].nmse();
    EXPECT_NEAR(decision.main.predicted_output_nmse[h], expected, 2e-3 * expected);
  }
}

// The portable variants are judged on a sample of the queries. A ratio of sums over
// n of N queries drawn at random differs from that over all by a standard error of
// sqrt((1 - n/N) n) s / (n mean energy), s the spread of error - ratio * energy; drawing one from
// each stratum can only lower it.
TEST(LayerSearch, PredictsThePortableErrorFromASampleWithinItsStandardError) {
  Search search = random_search();
  constexpr int64_t kLong = 1100, kSample = 256;
  search.held.search = {random_sequence(10, kLong), random_sequence(11, kLong)};
  search.held.confirm = {random_sequence(12, kLong), random_sequence(13, kLong)};
  const LayerDecision decision = search.run();
  for (const LayerTransforms* layer : {&decision.portable.shared, &decision.portable.per_head}) {
    const auto losses = engine_losses(*layer, search.held.confirm);
    ASSERT_EQ(layer->search["confirm_queries"], 2 * kSample);
    for (int h = 0; h < kHeads; ++h) {
      const auto& [error, energy] = losses[h];
      const double ratio = losses[h].nmse(), all = static_cast<double>(error.size());
      double squares = 0, sum = 0;
      for (size_t i = 0; i < error.size(); ++i) {
        squares += std::pow(error[i] - ratio * energy[i], 2);
        sum += energy[i];
      }
      const double n = 2.0 * kSample;
      const double standard_error =
          std::sqrt((1 - n / all) / n * squares / (all - 1)) / (sum / all);
      EXPECT_LT(standard_error, 0.1 * ratio) << "this case would show nothing";
      // Four of them: once in 4,000 data sets, and these are fixed.
      EXPECT_NEAR(layer->predicted_output_nmse[h], ratio, 4 * standard_error);
    }
  }
}

// One direction holds most of what keys vary by, and queries say nothing about it: OSCAR's rotation
// spreads it over channels as it happens, that of the keys' own basis evenly.
TEST(LayerSearch, AmongRotationsTakesTheOwnBasisWhereItSpreadsKeysBetter) {
  Search search = random_search();
  const auto planted = [](uint64_t seed) {
    HeldSequence sequence = random_sequence(seed);
    const auto along = torch::randn({kHeads, kTokens, 1});
    torch::manual_seed(3);  // the same direction in every sequence
    sequence.k = 0.3 * sequence.k + along * torch::randn({kDim});
    return sequence;
  };
  search.fixed.kind = TransformKind::kOscar;
  search.fixed.rounding = Rounding::kShaped;
  search.fixed.scale_correction = ScaleCorrection::kMetric;
  search.statistics = statistics_of({planted(1), planted(2), planted(3)});
  search.held.search = {planted(10), planted(11)};
  search.held.confirm = {planted(12), planted(13)};
  search.options = {.kind = true, .orthogonal = true};
  const LayerDecision decision = search.run();
  search.options = {};
  const LayerDecision fixed = search.run();
  for (int h = 0; h < kHeads; ++h) {
    const auto& chosen = decision.main.search["key"]["heads"][h]["transform"];
    EXPECT_EQ(chosen, "oscar in own basis uncentred per-head");
    EXPECT_EQ(decision.main.key.kind[h], TransformKind::kOscar) << "a rotation in the file";
    EXPECT_LT(decision.main.predicted_output_nmse[h], fixed.main.predicted_output_nmse[h]);
  }
  EXPECT_TRUE(decision.main.key.partner.empty());
}

TEST(LayerSearch, ThePortableVariantIsOrthogonalPlainUncenteredWithOneClipPair) {
  Search search = random_search();
  search.fixed = {.kind = TransformKind::kBalanced, .center = true, .rounding = Rounding::kShaped};
  const LayerDecision decision = search.run();
  for (const LayerTransforms* layer : {&decision.portable.shared, &decision.portable.per_head}) {
    for (const SideTransform* side : {&layer->key, &layer->value}) {
      EXPECT_TRUE(side->partner.empty() && side->metric.empty() && side->feedback.empty());
      EXPECT_EQ(side->recipe.clip_ratio[0], side->recipe.clip_ratio[1]);
      EXPECT_EQ(side->recipe.scale_correction[0], ScaleCorrection::kNone);
      for (const float entry : side->mean.data) EXPECT_EQ(entry, 0.0f);
    }
  }
  EXPECT_EQ(decision.portable.shared.key.forward[0], decision.portable.shared.key.forward[1]);
}

TEST(LayerSearch, RepeatsItselfToTheBit) {
  Search search = random_search();
  search.options = {.kind = true, .granularity = true, .clip = true};
  const LayerDecision one = search.run(), two = search.run();
  EXPECT_EQ(one.main.search, two.main.search);
  EXPECT_EQ(one.main.key.forward, two.main.key.forward);
  EXPECT_EQ(one.main.predicted_output_nmse, two.main.predicted_output_nmse);
}

TEST(LayerSearch, ZzExperiment) {
  for (uint64_t seed = 0; seed < 200; seed += 20) {
    Search search = random_search();
    search.held.search = {random_sequence(seed + 10), random_sequence(seed + 11)};
    search.held.confirm = {random_sequence(seed + 12), random_sequence(seed + 13)};
    search.statistics = statistics_of(
        {random_sequence(seed + 1), random_sequence(seed + 2), random_sequence(seed + 3)});
    search.fixed.clip_k = search.fixed.clip_v = 0.4;
    search.options.clip = true;
    const LayerDecision d = search.run();
    std::vector<LayerTransforms> tried;
    for (const double r : {0.4, 0.84, 0.88, 0.90, 0.94, 0.96}) {
      FitOptions o = search.fixed;
      o.clip_k = o.clip_v = r;
      tried.push_back(fit_layer(search.statistics, o, Rope{}));
    }
    std::vector<const LayerTransforms*> layers = {&d.main};
    for (auto& t : tried) layers.push_back(&t);
    const LossTable t = losses_of(layers, search.held.confirm);
    for (int h = 0; h < kHeads; ++h) {
      std::printf("clip seed %d head %d k %.2f v %.2f found/fixed %.4f:", (int)seed, h,
                  d.main.key.recipe.clip_ratio[h], d.main.value.recipe.clip_ratio[h],
                  t.nmse(0, h) / t.nmse(1, h));
      for (int i = 1; i < 7; ++i) {
        auto c = compare(t, i, 0, h);
        std::printf(" %.4f(%.1f)", t.nmse(i, h), c.difference / c.standard_error);
      }
      std::printf("\n");
    }
  }
  for (uint64_t seed = 0; seed < 200; seed += 20) {
    Search search = random_search();
    search.statistics = statistics_of(
        {planted_sequence(seed + 1), planted_sequence(seed + 2), planted_sequence(seed + 3)});
    search.held.search = {planted_sequence(seed + 10), planted_sequence(seed + 11)};
    search.held.confirm = {planted_sequence(seed + 12), planted_sequence(seed + 13)};
    search.options = {.kind = true, .center = true, .rounding = true, .scale_correction = true};
    const LayerDecision d = search.run();
    search.options = {.kind = true, .center = true};
    const LayerDecision p = search.run();
    search.options = {};
    const LayerDecision f = search.run();
    FitOptions o = search.fixed;
    o.kind = TransformKind::kBalanced;
    o.center = true;
    const auto plain = fit_layer(search.statistics, o, Rope{});
    o.rounding = Rounding::kShaped;
    o.scale_correction = ScaleCorrection::kMetric;
    const auto shaped = fit_layer(search.statistics, o, Rope{});
    o.scale_correction = ScaleCorrection::kNone;
    const auto shaped_none = fit_layer(search.statistics, o, Rope{});
    const LossTable t =
        losses_of({&d.main, &p.main, &f.main, &plain, &shaped, &shaped_none}, search.held.confirm);
    for (int h = 0; h < kHeads; ++h) {
      std::printf("kind seed %d head %d %s/%s found/fixed %.4f found/plain %.4f:", (int)seed, h,
                  d.main.search["key"]["heads"][h].dump().substr(0, 0).c_str(), "",
                  t.nmse(0, h) / t.nmse(2, h), t.nmse(0, h) / t.nmse(1, h));
      for (int i = 1; i < 6; ++i) {
        auto c = compare(t, i, 0, h);
        std::printf(" %.4f(%.1f)", t.nmse(i, h), c.difference / c.standard_error);
      }
      std::printf(" K %s %s V %s %s\n",
                  d.main.search["key"]["heads"][h]["transform"].get<std::string>().c_str(),
                  d.main.search["key"]["heads"][h]["writer"].get<std::string>().c_str(),
                  d.main.search["value"]["heads"][h]["transform"].get<std::string>().c_str(),
                  d.main.search["value"]["heads"][h]["writer"].get<std::string>().c_str());
    }
  }
}

}  // namespace

// What the stages of the search try, and that they end when asked to.

namespace {

using namespace oscar;
using namespace oscar::search_case;

TEST(Stages, RatiosThatClipAtOneMagnitudeAreTriedOnce) {
  Search search = random_search();
  search.options.clip = true;
  const Json record = search.run().main.search;
  // Of 32 magnitudes .94 and .96 clip at the same one as the default, .90 as .88.
  EXPECT_EQ(record["key"]["stages"][0]["variants"], Json({"before", "0.84", "0.88"}));
}

TEST(Stages, RowWeightsAreTriedForTransformsWithDataInThem) {
  const FitOptions fixed{.kind = TransformKind::kBalanced};
  const auto wanted = fit_requests(fixed, {.kind = true, .row_weights = true});
  std::vector<std::string> by_attention;
  for (const FitRequest& request : wanted) {
    if (request.options.row_weights != RowWeights::kAttention) continue;
    by_attention.emplace_back(method_name(request.options.kind));
    EXPECT_FALSE(request.own_basis);
  }
  EXPECT_EQ(by_attention, (std::vector<std::string>{"balanced", "oscar"}));
  EXPECT_EQ(wanted.size(), 6u);  // and balanced, OSCAR's, in the own basis, Hadamard, all even
}

// A request to stop at the next tensor operation, once: a second signal would end the process.
std::unique_ptr<at::ObserverContext> ask_to_stop(const at::RecordFunction&) {
  [[maybe_unused]] static const int raised = std::raise(SIGTERM);
  return nullptr;
}

TEST(Stages, StopsBetweenStagesWhenAskedTo) {
  const auto run = [] {
    const Search search = random_search();
    VariantSearch variant;
    variant.search = {.kind = true, .clip = true};
    variant.fits =
        fit_for_search(search.statistics, variant.fixed, variant.search, search.rope).main;
    const HeldBackHalf half = all_queries(search.held.search);
    install_interrupt_handlers();
    at::addThreadLocalCallback(at::RecordFunctionCallback(ask_to_stop));
    try {
      run_stages(variant, half);
    } catch (const Interrupted&) {
      // Asked within the first stage: that one is complete, the next has not begun.
      const std::vector<StageWinner>& winners = variant.key.winners;
      std::exit(winners.size() == 1 && winners[0].stage == "transform" ? 42 : 43);
    }
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process of its own: the request stays
  EXPECT_EXIT(run(), testing::ExitedWithCode(42), "");
}

}  // namespace
