#include "oscar/calibrate/collector.h"

#include <gtest/gtest.h>
#include <array>
#include <cmath>

#include "calibrate/random_record.h"
#include "model/small_model.h"
#include "oscar/base/error.h"
#include "oscar/fit/moments.h"
#include "oscar/model/attention.h"
#include "support/listed_offsets.h"

// Rows weighted by the attention they receive, against loops in double over single queries.

namespace {

using namespace oscar;

constexpr int64_t kHeadsOfGroup = 3;
constexpr CacheView kSmallWindows{.sink = 4, .recent = 10, .demote_block = 3};

const Rope kPartialRope = [] {
  Rope rope;
  rope.rotary_dim = 6;  // two dimensions do not turn
  rope.inv_freq = {1.0, 0.3, 0.01};
  return rope;
}();

// Weights by the definition, one query of one head after another (math 2.6).
struct Expected {
  torch::Tensor key, value, query;  // [2, tokens], [2, tokens], [6, queries], float64
};

Expected weights_by_definition(const torch::Tensor& q, const torch::Tensor& k,
                               const CacheView& view, const std::vector<int64_t>& queries) {
  const int64_t tokens = k.size(1);
  const auto zeros = [](int64_t rows, int64_t cols) {
    return torch::zeros({rows, cols}, torch::kFloat64);
  };
  Expected e{zeros(2, tokens), zeros(2, tokens), zeros(6, static_cast<int64_t>(queries.size()))};
  for (int64_t head = 0; head < 6; ++head) {
    const auto key = e.key[head / kHeadsOfGroup], value = e.value[head / kHeadsOfGroup];
    for (size_t n = 0; n < queries.size(); ++n) {
      const int64_t i = queries[n], first = first_visible(view, i);
      const auto scores =
          torch::mv(k[head / kHeadsOfGroup].to(torch::kFloat64).slice(0, first, i + 1),
                    q[head][i].to(torch::kFloat64));
      const auto p = (scores * kSmScale).softmax(0);
      const int64_t begin = std::max(view.sink, first), end = int2_end(view, i);
      double rest = 0, squares = 0;
      for (int64_t t = begin; t < end; ++t) {
        const double own = p[t - first].item<double>();
        rest += own * (1 - own);
        squares += own * own;
      }
      for (int64_t t = begin; t < end; ++t) {
        const double own = p[t - first].item<double>(), rows = static_cast<double>(end - begin);
        key[t] += .9 * own * (1 - own) + .1 * rest / rows;
        value[t] += .9 * own * own + .1 * squares / rows;
      }
      e.query[head][static_cast<int64_t>(n)] = rest;
    }
  }
  return e;
}

double distance(const torch::Tensor& found, const torch::Tensor& expected) {
  return ((found.to(torch::kFloat64) - expected).norm() / expected.norm()).item<double>();
}

void expect_weights_of_definition(const CacheView& view, int64_t tokens) {
  const AttentionRecord record = random_record(1, tokens, 3);
  const auto q = record.q[0], k = record.k[0];
  const ReceivedAttention found = received_attention(q, k, view, kSmScale);
  ASSERT_FALSE(found.queries.empty());
  const Expected expected = weights_by_definition(q, k, view, found.queries);
  // Scores, exponentials and sums of some hundred terms in float32.
  EXPECT_LT(distance(found.key, expected.key), 1e-6);
  EXPECT_LT(distance(found.value, expected.value), 1e-6);
  EXPECT_LT(distance(found.query, expected.query), 1e-6);
}

TEST(ReceivedAttention, EqualsTheDefinitionQueryByQuery) {
  expect_weights_of_definition(kSmallWindows, 150);
}

TEST(ReceivedAttention, SeesNothingBeyondASlidingWindow) {
  CacheView view = kSmallWindows;
  view.sliding_window = 40;
  expect_weights_of_definition(view, 150);
}

TEST(ReceivedAttention, DoesNotDependOnHowManyQueriesAreLookedAtTogether) {
  // 6 heads of 9000 tokens: at most 38 queries fit among the scores that are held.
  const AttentionRecord record = random_record(1, 9000, 4);
  const auto q = record.q[0], k = record.k[0];
  const ReceivedAttention whole = received_attention(q, k, kSmallWindows, kSmScale);
  const ReceivedAttention half =
      received_attention(q.slice(1, 0, 4500), k.slice(1, 0, 4500), kSmallWindows, kSmScale);
  const auto count = static_cast<int64_t>(half.queries.size());
  EXPECT_EQ(std::vector<int64_t>(whole.queries.begin(), whole.queries.begin() + count),
            half.queries);
  EXPECT_LT(distance(whole.query.slice(1, 0, count), half.query.to(torch::kFloat64)), 1e-6);
}

TEST(ReceivedAttention, SamplesOneQueryOfEachStrideAtAllPlaces) {
  const AttentionRecord record = random_record(1, 16 * 16, 5);
  const ReceivedAttention found =
      received_attention(record.q[0], record.k[0], kSmallWindows, kSmScale);
  std::vector<int> places(16, 0);
  for (const int64_t i : found.queries) ++places[static_cast<size_t>(i % 16)];
  EXPECT_EQ(found.queries.size(), 15u);  // the first stride's reads no INT2 row
  EXPECT_EQ(std::count(places.begin(), places.end(), 1), 15);
}

TEST(ReceivedAttention, IsZeroWhereNoQueryReadsInt2Rows) {
  const AttentionRecord record = random_record(1, 14, 6);
  const ReceivedAttention found =
      received_attention(record.q[0], record.k[0], kSmallWindows, kSmScale);
  EXPECT_TRUE(found.queries.empty());
  EXPECT_EQ(found.key.abs().sum().item<double>(), 0);
}

TEST(AttendedCollector, AddsWhatTheWeightsSay) {
  const AttentionRecord record = random_record(2, 150, 8);
  AttendedCollector collector(kSmallGeometry, kPartialRope, kSmallWindows, torch::kCPU);
  collector.observe(record);
  const AttendedSums s = collector.result();
  MatrixD k_moment = MatrixD::Zero(8, 8), v_moment = MatrixD::Zero(4, 4);
  double weight = 0, query_weight = 0;
  // As the collector asks: products of other shapes round otherwise on some processors.
  const ReceivedAttention w =
      received_attention(record.q.flatten(0, 1), record.k.flatten(0, 1), kSmallWindows, kSmScale);
  for (int64_t i = 0; i < 2; ++i) {
    const auto k0 = move_positions(record.k[i], kPartialRope, -torch::arange(150));
    const ReceivedAttention alone =
        received_attention(record.q[i], record.k[i], kSmallWindows, kSmScale);
    const int64_t head = 2 * i + 1;
    EXPECT_LT(distance(w.key[head], alone.key[1].to(torch::kFloat64)), 1e-6);
    for (int64_t t = 0; t < 150; ++t) {
      const auto row = [](const torch::Tensor& x) {
        const torch::Tensor exact = x.to(torch::kFloat64).contiguous();
        return VectorD(Eigen::Map<const VectorD>(exact.data_ptr<double>(), exact.numel()));
      };
      const VectorD k = row(k0[1][t]), v = row(record.v[i][1][t]);
      const double own = w.key[head][t].item<float>();
      k_moment += own * k.transpose() * k;
      v_moment += static_cast<double>(w.value[head][t].item<float>()) * v.transpose() * v;
      weight += own;
    }
    query_weight += w.query.slice(0, 3 * head, 3 * head + 3).sum().item<double>();
  }
  EXPECT_LT((s.k_moment[1] - k_moment).norm(), 1e-12 * k_moment.norm());
  EXPECT_LT((s.v_moment[1] - v_moment).norm(), 1e-12 * v_moment.norm());
  EXPECT_NEAR(s.k_weight[1], weight, 1e-12 * weight);
  EXPECT_NEAR(s.q_weight[1], query_weight, 1e-5 * query_weight);
}

TEST(AttendedCollector, KeysAreTakenBeforeRope) {
  // The same rows at another place: queries and keys turn together, so attention stays.
  const AttentionRecord here = random_record(1, 150, 9);
  const auto away = torch::tensor({5000});
  const AttentionRecord there{.layer = 3,
                              .first_position = 5000,
                              .sm_scale = kSmScale,
                              .q = move_positions(here.q[0], kPartialRope, away).unsqueeze(0),
                              .k = move_positions(here.k[0], kPartialRope, away).unsqueeze(0),
                              .v = here.v,
                              .o = {}};
  AttendedCollector first(kSmallGeometry, kPartialRope, kSmallWindows, torch::kCPU),
      second(kSmallGeometry, kPartialRope, kSmallWindows, torch::kCPU);
  first.observe(here);
  second.observe(there);
  const AttendedSums a = first.result(), b = second.result();
  EXPECT_LT((a.k_moment[0] - b.k_moment[0]).norm(), 1e-5 * a.k_moment[0].norm());
  EXPECT_LT((a.k_sum[1] - b.k_sum[1]).norm(), 1e-5 * a.k_sum[1].norm());
  EXPECT_GT((a.q_moment[0] - b.q_moment[0]).norm(), 1e-2 * a.q_moment[0].norm());
}

}  // namespace

// Collected sums equal plain double loops over the observer's own tensors.

namespace {

using namespace oscar;

// Sum over batch, the heads of KV head h, and tokens, of x_a x_b, the slow way.
double moment_entry(const torch::Tensor& x, int64_t h, int64_t num_kv_heads, int64_t a, int64_t b) {
  const torch::Tensor values = x.to(torch::kFloat64);
  const auto view = values.accessor<double, 4>();
  const int64_t group = x.size(1) / num_kv_heads;
  double sum = 0;
  for (int64_t i = 0; i < x.size(0); ++i) {
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      for (int64_t t = 0; t < x.size(2); ++t) sum += view[i][head][t][a] * view[i][head][t][b];
    }
  }
  return sum;
}

TEST(MomentCollector, EqualsPlainLoopsOverTwoBatches) {
  const AttentionRecord first = random_record(2, 5, 1), second = random_record(1, 7, 2);
  MomentCollector collector(kSmallGeometry, torch::kCPU);
  collector.observe(first);
  collector.observe(second);
  const LayerStatistics s = collector.result();
  EXPECT_EQ(s.count_kv, 17);
  EXPECT_EQ(s.count_q, 51);
  for (int h = 0; h < 2; ++h) {
    for (int a = 0; a < 8; ++a) {
      for (int b = 0; b < 8; ++b) {
        EXPECT_NEAR(s.q_moment[h](a, b),
                    moment_entry(first.q, h, 2, a, b) + moment_entry(second.q, h, 2, a, b), 1e-11);
        EXPECT_NEAR(s.k_moment[h](a, b),
                    moment_entry(first.k, h, 2, a, b) + moment_entry(second.k, h, 2, a, b), 1e-11);
        if (a < 4 && b < 4) {
          EXPECT_NEAR(s.v_moment[h](a, b),
                      moment_entry(first.v, h, 2, a, b) + moment_entry(second.v, h, 2, a, b),
                      1e-11);
          EXPECT_NEAR(s.attn_out_moment[h](a, b),
                      moment_entry(first.o, h, 2, a, b) + moment_entry(second.o, h, 2, a, b),
                      1e-11);
        }
      }
    }
  }
}

TEST(MomentCollector, ContinuesFromSavedSumsToTheSameBits) {
  const AttentionRecord first = random_record(1, 9, 3), second = random_record(1, 9, 4);
  MomentCollector whole(kSmallGeometry, torch::kCPU), half(kSmallGeometry, torch::kCPU),
      resumed(kSmallGeometry, torch::kCPU);
  whole.observe(first);
  whole.observe(second);
  half.observe(first);
  resumed.add(half.result());
  resumed.observe(second);
  EXPECT_EQ(resumed.result(), whole.result());
}

TEST(MomentCollector, NamesTheLayerAndMomentThatIsNotFinite) {
  AttentionRecord record = random_record(1, 3, 5);
  record.v.index_put_({0, 1, 2, 0}, std::numeric_limits<float>::quiet_NaN());
  MomentCollector collector(kSmallGeometry, torch::kCPU);
  collector.observe(record);
  try {
    collector.result();
    FAIL() << "a NaN went unnoticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.info().where, "layer 3, v_moment");
  }
}

TEST(EnergyCollector, WeighsValuesByKeyEnergyAndScalesWeightsToTheTokenCount) {
  const AttentionRecord record = random_record(1, 6, 6);
  MatrixStack<double> covariance(2, 8, 8);
  for (int h = 0; h < 2; ++h) {
    for (int i = 0; i < 8; ++i) covariance[h](i, i) = 1.0 + i + h;
    covariance[h](0, 3) = covariance[h](3, 0) = 0.5;
  }
  EnergyCollector collector(kSmallGeometry, covariance, torch::kCPU);
  collector.observe(record);
  const MatrixStack<double> moment = collector.result();
  const torch::Tensor k = record.k.to(torch::kFloat64), v = record.v.to(torch::kFloat64);
  const auto keys = k.accessor<double, 4>();
  const auto values = v.accessor<double, 4>();
  for (int h = 0; h < 2; ++h) {
    MatrixD expected = MatrixD::Zero(4, 4);
    double total = 0;
    for (int t = 0; t < 6; ++t) {
      double w = 0;
      for (int a = 0; a < 8; ++a) {
        for (int b = 0; b < 8; ++b) w += keys[0][h][t][a] * covariance[h](a, b) * keys[0][h][t][b];
      }
      total += w;
      for (int a = 0; a < 4; ++a) {
        for (int b = 0; b < 4; ++b) expected(a, b) += w * values[0][h][t][a] * values[0][h][t][b];
      }
    }
    expected *= 6.0 / total;
    EXPECT_LT((moment[h] - expected).norm(), 1e-12 * expected.norm());
  }
}

}  // namespace

// Averaging over served positions equals moments that were really collected at shifted positions.

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr std::array<int64_t, 5> kOffsets = {0, 7, 1000, 32768, 98304};

std::string config_with(const std::string& rope) {
  std::string text = kSmallConfig;
  text.insert(text.rfind('}'), R"(,"rope_parameters":)" + rope);
  return text;
}

// Statistics of one layer with every position id shifted by `offset`.
LayerStatistics collect(const Model& model, const LayerGeometry& geometry, const torch::Tensor& ids,
                        int64_t offset) {
  MomentCollector collector(geometry, torch::kCPU);
  torch::Tensor x = model.transformer->embed(ids);
  for (int i = 0; i <= geometry.layer_id; ++i) {
    x = model.transformer->forward_layer(i, *model.transformer->load_layer(i), x,
                                         i == geometry.layer_id ? &collector : nullptr, nullptr,
                                         offset);
  }
  return collector.result();
}

double relative(const MatrixD& found, const MatrixD& expected) {
  return (found - expected).norm() / expected.norm();
}

void expect_averages_equal_collected(const std::string& config_text) {
  const Model model(make_tensors(config_text), config_text);
  const ModelConfig& config = model.transformer->config();
  const MeanPhase mean_phase = mean_phase_of_offsets({kOffsets.begin(), kOffsets.end()});
  const torch::Tensor ids = torch::randint(0, 64, {3, 61}, torch::kInt64);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const LayerGeometry geometry = config.geometry(layer, 0);
    std::vector<LayerStatistics> shifted;
    for (const int64_t offset : kOffsets) shifted.push_back(collect(model, geometry, ids, offset));
    const double n = kOffsets.size();
    for (int h = 0; h < geometry.num_kv_heads; ++h) {
      MatrixD q = MatrixD::Zero(geometry.head_dim_k, geometry.head_dim_k), k = q;
      VectorD k_sum = VectorD::Zero(geometry.head_dim_k);
      for (const LayerStatistics& s : shifted) {
        q += s.q_moment[h] / n;
        k += s.k_moment[h] / n;
        k_sum += s.k_sum[h] / n;
      }
      const LayerStatistics& base = shifted.front();
      EXPECT_LT(relative(average_moment(base.q_moment[h], config.rope, mean_phase), q), 1e-6);
      EXPECT_LT(relative(average_moment(base.k_moment[h], config.rope, mean_phase), k), 1e-6);
      EXPECT_LT((average_sum(base.k_sum[h], config.rope, mean_phase) - k_sum).norm(),
                1e-6 * std::sqrt(k.trace() * static_cast<double>(base.count_kv)));
      // The shift matters: the moments at one offset alone are not the average.
      EXPECT_GT(relative(base.k_moment[h], k), 0.01);
    }
  }
}

TEST(ServedPositions, AverageEqualsMomentsCollectedAtShiftedPositionIds) {
  expect_averages_equal_collected(kSmallConfig);
}

TEST(ServedPositions, AverageEqualsCollectedMomentsUnderScaledRope) {
  expect_averages_equal_collected(
      config_with(R"({"rope_type":"llama3","rope_theta":5e5,"factor":8.0,"low_freq_factor":1.0,)"
                  R"("high_freq_factor":4.0,"original_max_position_embeddings":64})"));
  expect_averages_equal_collected(config_with(
      R"({"rope_type":"yarn","rope_theta":1e4,"factor":4.0,"original_max_position_embeddings":32})"));
}

}  // namespace
