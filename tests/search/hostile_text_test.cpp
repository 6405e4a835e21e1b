// Text that no healthy model makes, through the whole search: finite, explained, no worse than
// Hadamard on text that neither fit nor search has seen.
#include <gtest/gtest.h>

#include <functional>

#include "oscar/fit/checks.h"
#include "oscar/fit/presets.h"
#include "search/layer_search_case.h"

namespace {

using namespace oscar;
using namespace oscar::search_case;

struct HostileText {
  std::string name;
  std::function<void(HeldChunk&)> spoil;  // works on KV head 0 and its query heads
  bool falls_back;                        // whether head 0 can't have the balanced transform
};

// Rows of head 0: queries [kGroup, tokens, d], keys and values [1, tokens, d].
std::vector<torch::Tensor> first_head(const HeldChunk& chunk) {
  return {chunk.q.narrow(0, 0, kGroup), chunk.k.narrow(0, 0, 1), chunk.v.narrow(0, 0, 1)};
}

torch::Tensor fixed_row(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::randn({kDim});
}

std::vector<HostileText> hostile_texts() {
  return {{"RankOne",
           [](HeldChunk& chunk) {
             uint64_t seed = 90;
             for (auto& rows : first_head(chunk)) {
               rows.copy_(rows.narrow(2, 0, 1).clone() * fixed_row(seed++));
             }
           },
           false},
          {"ZeroHead",
           [](HeldChunk& chunk) {
             for (auto& rows : first_head(chunk)) rows.zero_();
           },
           true},
          {"OneTokenRepeated",
           [](HeldChunk& chunk) {
             uint64_t seed = 90;
             for (auto& rows : first_head(chunk)) rows.copy_(fixed_row(seed++).expand_as(rows));
           },
           true},
          {"HugeMean",
           [](HeldChunk& chunk) {
             // A thousand times the spread; the scores that attention sees still have digits left.
             chunk.k[0].add_(1e3 * fixed_row(91));
             chunk.v[0].add_(1e3 * fixed_row(92));
           },
           false},
          {"TwelveDecades",  // of the covariances' eigenvalues
           [](HeldChunk& chunk) {
             const auto scale = torch::logspace(0, -6, kDim);
             for (auto& rows : first_head(chunk)) rows.mul_(scale);
           },
           false},
          {"OppositeDecades",
           [](HeldChunk& chunk) {
             const auto scale = torch::logspace(0, -3, kDim);
             chunk.k[0].mul_(scale);
             chunk.v[0].mul_(scale);
             chunk.q.narrow(0, 0, kGroup).div_(scale);
           },
           false}};
}

class HostileSearch : public testing::TestWithParam<HostileText> {
 protected:
  static std::vector<HeldChunk> texts(std::initializer_list<uint64_t> seeds) {
    std::vector<HeldChunk> chunks;
    for (const uint64_t seed : seeds) {
      chunks.push_back(random_chunk(seed));
      GetParam().spoil(chunks.back());
    }
    return chunks;
  }
};

void expect_usable(const LayerTransforms& layer) {
  EXPECT_NO_THROW(require_valid(layer.key, Side::kKey, "keys"));
  EXPECT_NO_THROW(require_valid(layer.value, Side::kValue, "values"));
  for (const SideTransform* side : {&layer.key, &layer.value}) {
    for (const float entry : side->forward.data) EXPECT_TRUE(std::isfinite(entry));
    for (const float entry : side->mean.data) EXPECT_TRUE(std::isfinite(entry));
  }
  for (const double nmse : layer.predicted_output_nmse) EXPECT_TRUE(std::isfinite(nmse));
}

// A head that lacks the transform of its decision says why, and no other head does.
void expect_stated(const LayerTransforms& layer, const char* side_name, const SideTransform& side) {
  for (int head = 0; head < kHeads; ++head) {
    const bool default_kept = layer.search["pair"][head]["default_kept"].get<bool>();
    const auto chosen =
        default_kept ? "balanced centred per-head"
                     : layer.search[side_name]["heads"][head]["transform"].get<std::string>();
    const bool as_chosen = chosen.starts_with(method_name(side.kind[head]));
    EXPECT_EQ(as_chosen, side.fallback[head].empty())
        << side_name << " of head " << head << ", " << chosen << ": " << side.fallback[head];
  }
}

TEST_P(HostileSearch, EndsFiniteAndStatedAndNoWorseThanHadamardOnUnseenText) {
  Search search;
  search.fixed = find_preset("best").fit;
  search.fixed.position_span = 0;
  search.options = find_preset("best").search;
  search.statistics = statistics_of(texts({1, 2, 3, 4}));
  search.held.search = texts({10, 11});
  search.held.confirm = texts({12, 13});
  const LayerDecision decision = search.run();
  for (const LayerTransforms* layer :
       {&decision.main, &decision.portable.shared, &decision.portable.per_head}) {
    expect_usable(*layer);
  }
  expect_stated(decision.main, "key", decision.main.key);
  expect_stated(decision.main, "value", decision.main.value);
  EXPECT_TRUE(!GetParam().falls_back || decision.main.key.kind[0] != TransformKind::kBalanced);

  const LayerTransforms hadamard =
      fit_layer(search.statistics, {.kind = TransformKind::kHadamard}, Rope{});
  const LossTable losses = losses_of({&hadamard, &decision.main}, texts({20, 21, 22, 23}));
  for (int head = 0; head < kHeads; ++head) {
    const LossDifference against = compare(losses, 1, 0, head);
    EXPECT_LE(against.difference, against.standard_error)
        << "head " << head << ": " << losses.total(1, head) << " against Hadamard's "
        << losses.total(0, head);
  }
}

INSTANTIATE_TEST_SUITE_P(Layer, HostileSearch, testing::ValuesIn(hostile_texts()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
