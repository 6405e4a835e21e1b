// Averaging over served positions equals moments that were really collected at shifted positions.
#include <gtest/gtest.h>

#include <array>

#include "model/small_model.h"
#include "oscar/calibrate/collector.h"
#include "oscar/fit/position_average.h"
#include "support/listed_offsets.h"

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
