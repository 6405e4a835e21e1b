// Rows weighted by the attention they receive, against loops in double over single queries.
#include "oscar/calibrate/attended_collector.h"

#include <gtest/gtest.h>

#include <cmath>

#include "calibrate/random_record.h"
#include "oscar/model/attention.h"

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
