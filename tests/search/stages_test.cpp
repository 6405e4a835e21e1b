// What the stages of the search try, and that they end when asked to.
#include "oscar/search/stages.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/fit/presets.h"
#include "search/layer_search_case.h"

namespace {

using namespace oscar;
using namespace oscar::search_case;

TEST(Stages, FullEffortSearchesLowerRatiosToo) {
  Search search = random_search();
  search.options.clip = search.options.full = true;
  const Json record = search.run().main.search;
  // Of 32 magnitudes .94 to .96 clip at the same one as the default, and .97 and above at none.
  EXPECT_EQ(record["key"]["stages"][0]["variants"],
            Json({"before", "0.80", "0.84", "0.88", "0.92", "0.97"}));
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
