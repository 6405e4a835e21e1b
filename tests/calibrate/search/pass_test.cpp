#include "oscar/calibrate/search/pass.h"

#include <gtest/gtest.h>
#include <functional>

#include "calibrate/search/layer_search_case.h"
#include "oscar/calibrate/collector.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/moments.h"
#include "oscar/model/attention.h"
#include "oscar/model/checkpoint/checkpoint.h"

// Text that no healthy model makes, through the whole search: finite, explained, no worse than
// Hadamard on text that neither fit nor search has seen.

namespace {

using namespace oscar;
using namespace oscar::search_case;

struct HostileText {
  std::string name;
  std::function<void(HeldSequence&)> spoil;  // works on KV head 0 and its query heads
  bool falls_back;                           // whether head 0 can't have the balanced transform
};

// Rows of head 0: queries [kGroup, tokens, d], keys and values [1, tokens, d].
std::vector<torch::Tensor> first_head(const HeldSequence& sequence) {
  return {sequence.q.narrow(0, 0, kGroup), sequence.k.narrow(0, 0, 1), sequence.v.narrow(0, 0, 1)};
}

torch::Tensor fixed_row(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::randn({kDim});
}

std::vector<HostileText> hostile_texts() {
  return {{"RankOne",
           [](HeldSequence& sequence) {
             uint64_t seed = 90;
             for (auto& rows : first_head(sequence)) {
               rows.copy_(rows.narrow(2, 0, 1).clone() * fixed_row(seed++));
             }
           },
           false},
          {"ZeroHead",
           [](HeldSequence& sequence) {
             for (auto& rows : first_head(sequence)) rows.zero_();
           },
           true},
          {"OneTokenRepeated",
           [](HeldSequence& sequence) {
             uint64_t seed = 90;
             for (auto& rows : first_head(sequence)) rows.copy_(fixed_row(seed++).expand_as(rows));
           },
           true},
          {"HugeMean",
           [](HeldSequence& sequence) {
             // A thousand times the spread; the scores that attention sees still have digits left.
             sequence.k[0].add_(1e3 * fixed_row(91));
             sequence.v[0].add_(1e3 * fixed_row(92));
           },
           false},
          {"TwelveDecades",  // of the covariances' eigenvalues
           [](HeldSequence& sequence) {
             const auto scale = torch::logspace(0, -6, kDim);
             for (auto& rows : first_head(sequence)) rows.mul_(scale);
           },
           false},
          {"OppositeDecades",
           [](HeldSequence& sequence) {
             const auto scale = torch::logspace(0, -3, kDim);
             sequence.k[0].mul_(scale);
             sequence.v[0].mul_(scale);
             sequence.q.narrow(0, 0, kGroup).div_(scale);
           },
           false}};
}

class HostileSearch : public testing::TestWithParam<HostileText> {
 protected:
  static std::vector<HeldSequence> texts(std::initializer_list<uint64_t> seeds) {
    std::vector<HeldSequence> sequences;
    for (const uint64_t seed : seeds) {
      sequences.push_back(random_sequence(seed));
      GetParam().spoil(sequences.back());
    }
    return sequences;
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

// What a search is said to take: the rows that are held back, and the rest within its limits.

namespace {

using namespace oscar;

ModelConfig config_of(int num_qo_heads, int num_kv_heads, int head_dim) {
  ModelConfig config;
  config.num_qo_heads = num_qo_heads;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  return config;
}

constexpr int64_t kLength = 4096;

// At the worst moment, on the side that computes.
int64_t bytes_of(const ModelConfig& config, const HeldBackSize& held_back,
                 const SearchOptions& search, torch::Device device) {
  int64_t bytes = 0;
  for (const MemoryNeed& need :
       search_needs(config, held_back, {.kind = TransformKind::kBalanced}, search, device)) {
    EXPECT_EQ(need.host_bytes, 0) << need.name;
    if (need.moment == Moment::kBetween) bytes += need.compute_bytes;
  }
  return bytes;
}

int64_t bytes_of(const ModelConfig& config, int64_t sequences, torch::Device device = torch::kCPU) {
  return bytes_of(config,
                  {.tokens = sequences * kLength,
                   .search_sequences = sequences / 2,
                   .longest_sequence = kLength},
                  {.kind = true, .center = true, .granularity = true, .row_weights = true}, device);
}

// With many sequences what is kept is at its limit, and so is all else but the rows.
TEST(SearchMemory, GrowsWithTheRowsThatAreHeldBackAlone) {
  const ModelConfig config = config_of(32, 8, 128);
  const int64_t of_token = (32 + 2 * 8) * 128 * 4;
  for (const torch::Device device : {torch::Device(torch::kCPU), torch::Device("cuda")}) {
    EXPECT_EQ(bytes_of(config, 128, device) - bytes_of(config, 64, device),
              2 * 64 * kLength * of_token);
  }
}

// On the CPU a layer is searched when no batch runs; its rows are there before.
TEST(SearchMemory, RowsAreCollectedWhileBatchesPassWhereTheSearchWaitsForThem) {
  const ModelConfig config = config_of(4, 2, 32);
  const HeldBackSize size{.tokens = kLength, .search_sequences = 1, .longest_sequence = kLength};
  const auto passing = [&](torch::Device device) {
    int64_t bytes = 0;
    for (const MemoryNeed& need : search_needs(config, size, {}, {.clip = true}, device)) {
      if (need.moment == Moment::kPassing) bytes += need.compute_bytes;
    }
    return bytes;
  };
  EXPECT_EQ(passing(torch::kCPU), kLength * (4 + 2 * 2) * 32 * 4);
  EXPECT_EQ(passing(torch::Device("cuda")), 0);
}

TEST(SearchMemory, ClippingAloneTakesLessThanASearchOfTransforms) {
  const ModelConfig config = config_of(4, 2, 32);
  const int64_t rows = 2 * 6 * kLength * 2 * 32 * 4;  // of six candidates less of each side
  EXPECT_LT(
      bytes_of(config, {.tokens = 4 * kLength, .search_sequences = 2, .longest_sequence = kLength},
               {.clip = true}, torch::kCPU),
      bytes_of(config, 4) - rows);
}

TEST(SearchMemory, ASmallModelIsNotChargedTheLimitsOfALargeOne) {
  const SearchLimits& limits = search_limits(torch::Device("cuda"));
  const auto most = static_cast<int64_t>(sizeof(float)) * (limits.kept + limits.rows);
  EXPECT_LT(bytes_of(config_of(4, 2, 32), 4, torch::Device("cuda")), most);
  EXPECT_GT(bytes_of(config_of(64, 8, 128), 16, torch::Device("cuda")), most);
}

}  // namespace

// Held-back sequences are placed at served positions, and arrive in batches of any size.

namespace {

using namespace oscar;

Rope partial_rope() {
  Rope rope;
  rope.rotary_dim = 12;
  for (int i = 0; i < 6; ++i) rope.inv_freq.push_back(std::pow(1e4, -i / 6.0));
  return rope;
}

TEST(MovePositions, IsRopeAtALaterPosition) {
  const Rope rope = partial_rope();
  torch::manual_seed(1);
  const auto x = torch::randn({1, 2, 50, 16});
  const auto roped = [&](int64_t begin) {
    const auto position = torch::arange(begin, begin + 50, torch::kFloat64).unsqueeze(1);
    const auto angle = position * torch::tensor(rope.inv_freq, torch::kFloat64);
    const auto turned = apply_rope(x.slice(3, 0, 12), angle.cos().to(torch::kFloat32),
                                   angle.sin().to(torch::kFloat32));
    return torch::cat({turned, x.slice(3, 12)}, 3);
  };
  const auto shifted = move_positions(roped(7)[0], rope, torch::tensor({90000}));
  EXPECT_LT((shifted - roped(90007)[0]).abs().max().item<double>(), 1e-5);
  const auto scores = [](const torch::Tensor& rows) {
    return torch::matmul(rows, rows.transpose(1, 2));
  };
  EXPECT_LT((scores(shifted) - scores(roped(7)[0])).abs().max().item<double>(), 1e-4);
}

TEST(MovePositions, TurnsNeighboursWhereTheseArePairs) {
  Rope halves = partial_rope(), neighbours = partial_rope();
  neighbours.interleaved = true;
  torch::manual_seed(2);
  const auto x = torch::randn({2, 50, 16});
  // The same turn once pairs (2i, 2i + 1) lie where (i, i + 6) did.
  const auto order = torch::tensor({0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, 12, 13, 14, 15});
  const auto moved = move_positions(x, neighbours, torch::tensor({777}));
  const auto expected = move_positions(x.index_select(2, order), halves, torch::tensor({777}));
  EXPECT_TRUE(torch::equal(moved.index_select(2, order), expected));
  EXPECT_GT((moved - move_positions(x, halves, torch::tensor({777}))).abs().max().item<double>(),
            0.1);
}

TEST(PlacementOffsets, OneInEachPartOfTheSpan) {
  const auto offsets = placement_offsets(131072, 4, 9);
  ASSERT_EQ(offsets.size(), 4u);
  for (int64_t i = 0; i < 4; ++i) {
    const auto share = static_cast<double>(i);
    EXPECT_GE(offsets[i], static_cast<int64_t>(served_position(share / 4, 131072)));
    EXPECT_LE(static_cast<double>(offsets[i]), served_position((share + 1) / 4, 131072));
  }
  EXPECT_EQ(placement_offsets(131072, 4, 9), offsets);
  EXPECT_NE(placement_offsets(131072, 4, 10), offsets);
  EXPECT_EQ(placement_offsets(0, 3, 9), (std::vector<int64_t>{0, 0, 0}));
}

TEST(SearchPass, ABatchOfSequencesGivesTheDecisionsOfSingleSequences) {
  const Checkpoint checkpoint = open_checkpoint("tiny-gqa", {});
  const Transformer model(checkpoint, {torch::kCPU, torch::kFloat32});
  torch::manual_seed(3);
  const auto rows = [](int64_t heads) { return torch::randn({4, heads, 480, 128}); };
  const AttentionRecord all{.layer = 0, .q = rows(8), .k = rows(2), .v = rows(2), .o = rows(8)};
  MomentCollector collector(model.config().geometry(0, 256), torch::kCPU);
  collector.observe(all);
  std::vector<LayerStatistics> statistics = {collector.result()};
  statistics[0].o_proj_metric = model.o_proj_metric(0);
  SearchSettings settings{
      .fit = {.position_span = 1000}, .search = {.clip = true}, .quantizer = {}};
  const auto decisions = [&](int64_t batch) {
    SearchPass pass(model, statistics, settings, 2, 2);
    for (int64_t i = 0; i < 4; i += batch) {
      const auto part = [&](const torch::Tensor& t) { return t.slice(0, i, i + batch); };
      pass.observer(0)->observe(
          {.layer = 0, .q = part(all.q), .k = part(all.k), .v = part(all.v), .o = part(all.o)});
    }
    pass.layer_done({});
    return pass.take_decisions();
  };
  const auto single = decisions(1), joined = decisions(4);
  EXPECT_EQ(single[0].main.search, joined[0].main.search);
  EXPECT_EQ(single[0].main.key.recipe.clip_ratio, joined[0].main.key.recipe.clip_ratio);
  EXPECT_EQ(single[0].main.predicted_output_nmse, joined[0].main.predicted_output_nmse);
}

TEST(SearchPass, LayersOfOtherProcessesAreNeitherObservedNorDecided) {
  const Checkpoint checkpoint = open_checkpoint("tiny-gqa", {});
  const Transformer model(checkpoint, {torch::kCPU, torch::kFloat32});
  std::vector<LayerStatistics> statistics(2);
  for (int layer = 0; layer < 2; ++layer) {
    statistics[static_cast<size_t>(layer)].geometry = model.config().geometry(layer, 256);
  }
  SearchPass pass(model, statistics, {.fit = {}, .search = {.clip = true}, .quantizer = {}}, 2, 2,
                  1, {false, false});
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(pass.observer(layer), nullptr);
    pass.layer_done({});
  }
  const auto decisions = pass.take_decisions();
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_TRUE(decisions[1].choices.empty());
}

}  // namespace
