// What a layer does between its products, on the host.
#include "oscar/model/layer_steps.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

TEST(LayerSteps, TheGateIsThatOfTorch) {
  torch::manual_seed(1);
  const auto gate_up = torch::cat({torch::randn({200, 64}) * 8, torch::full({1, 64}, -300.0),
                                   torch::full({1, 64}, 300.0), torch::zeros({1, 64})});
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    const auto rows = gate_up.to(dtype);
    const auto halves = rows.to(torch::kFloat64).chunk(2, -1);
    for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
      const auto found = gated(rows, activation);
      EXPECT_EQ(found.scalar_type(), dtype);
      const auto gate =
          activation == Activation::kSilu ? torch::silu(halves[0]) : torch::gelu(halves[0], "tanh");
      const auto error = (found.to(torch::kFloat64) - gate * halves[1]).abs();
      // Two roundings to the dtype; where tanh is near -1, its own in float32.
      const double step = dtype == torch::kFloat32 ? 4e-7 : 1.0 / 128;
      const auto most = (gate * halves[1]).abs() * step + 2e-7 * halves[0].abs() * halves[1].abs();
      EXPECT_TRUE(error.le(most).all().item<bool>()) << dtype;
    }
  }
}

TEST(LayerSteps, TheNumberOfThreadsChangesNoBitOfTheGate) {
  torch::manual_seed(1);
  const int before = at::get_num_threads();
  for (const int64_t width : {1152, 1155}) {  // 1152: nothing over a vector's length in a row
    const auto gate_up = torch::randn({3, 337, 2 * width});  // rows that no number below divides
    for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
      at::set_num_threads(1);
      const auto one = gated(gate_up, activation);
      for (int threads = 2; threads <= 9; ++threads) {
        at::set_num_threads(threads);
        EXPECT_TRUE(torch::equal(one, gated(gate_up, activation)))
            << "width " << width << ", " << threads << " threads";
      }
    }
  }
  at::set_num_threads(before);
}

TEST(LayerSteps, AGateOfNoRowsIsEmpty) {
  EXPECT_EQ(gated(torch::empty({0, 8}), Activation::kSilu).sizes(), (at::IntArrayRef{0, 4}));
}

}  // namespace
}  // namespace oscar
