// What a layer does between its products, on the host.
#include "oscar/model/layer_steps.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

TEST(LayerSteps, TheGateIsThatOfTorchWhateverTheNumberOfThreads) {
  torch::manual_seed(1);
  const int before = at::get_num_threads();
  struct Case {
    int64_t rows, width;
  };
  // Rows that no number of threads below divides; with and without something over a vector's
  // length; more than a piece in one row.
  for (const auto& [rows, width] : {Case{337, 1152}, {337, 1155}, {5, 40000}}) {
    for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
      const auto gate_up = torch::randn({3, rows, 2 * width}).to(dtype);
      const auto halves = gate_up.chunk(2, -1);
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
        at::set_num_threads(1);
        const auto gate = activation == Activation::kSilu ? torch::silu(halves[0])
                                                          : torch::gelu(halves[0], "tanh");
        const auto expected = gate * halves[1];
        for (int threads = 1; threads <= 9; ++threads) {
          at::set_num_threads(threads);
          EXPECT_TRUE(torch::equal(expected, gated(gate_up, activation)))
              << dtype << ", width " << width << ", " << threads << " threads";
        }
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
