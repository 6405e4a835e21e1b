// Collected sums equal plain double loops over the observer's own tensors.
#include "oscar/calibrate/collector.h"

#include <gtest/gtest.h>

#include "calibrate/random_record.h"
#include "oscar/base/error.h"

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
