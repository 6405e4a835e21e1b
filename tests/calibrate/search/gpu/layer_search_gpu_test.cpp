// The search on a GPU and on the CPU decides alike, or differs by less than it can tell.
#include <gtest/gtest.h>

#include "calibrate/search/layer_search_case.h"
#include "oscar/fit/fit.h"
#include "support/cuda_device.h"

namespace {

using namespace oscar;
using namespace oscar::search_case;

TEST(SearchOnTheGpu, DecidesAsTheCpuDoesOrWithinTheConfirmedInterval) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  Search search;
  search.fixed = find_preset("best").fit;
  search.fixed.position_span = 0;
  search.options = find_preset("best").search;
  search.statistics =
      statistics_of({planted_sequence(1), planted_sequence(2), planted_sequence(3)});
  search.held.search = {planted_sequence(10), planted_sequence(11)};
  search.held.confirm = {planted_sequence(12), planted_sequence(13)};
  const LayerDecision cpu = search.run();
  search.device = torch::kCUDA;
  const LayerDecision gpu = search.run();
  // Both decisions on the confirmation half, measured once, on the CPU.
  const LossTable losses = losses_of({&cpu.main, &gpu.main}, search.held.confirm);
  for (int head = 0; head < kHeads; ++head) {
    const LossDifference against = compare(losses, 1, 0, head);
    EXPECT_LE(std::abs(against.difference), against.standard_error) << "head " << head;
    // What each predicts of its own decision: shaped codes may differ in 1e-4 of the rows, and
    // float32 sums in their last digits.
    const double found = losses.nmse(1, head);
    EXPECT_NEAR(gpu.main.predicted_output_nmse[head], found, 2e-3 * found);
  }
}

}  // namespace
