// Counts and spans that only a damaged or hostile file has are refused before anything is computed.
#include <functional>
#include <limits>

#include "bundle/sample.h"
#include "oscar/base/error.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/refit.h"

namespace {

using namespace oscar;
using sample::BundleTest;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

class LargeCounts : public BundleTest {
 protected:
  template <typename Work>
  static std::string refusal(const Work& work) {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(LargeCounts, SumsThatAreMoreThanANumberHoldsAreRefused) {
  const auto merged = [&](const std::function<void(Bundle&)>& change) {
    std::vector<Bundle> files(2, sample::statistics_bundle());
    change(files[0]);
    return refusal([&] { merge_statistics(std::move(files), {"a.h5", "b.h5"}, true); });
  };
  EXPECT_EQ(merged([](Bundle&) {}), "accepted");
  for (const auto& [word, change] :
       std::vector<std::pair<const char*, std::function<void(Bundle&)>>>{
           {"count_kv", [](Bundle& b) { b.statistics[0].count_kv = kMost; }},
           {"count_q", [](Bundle& b) { b.statistics[0].count_q = kMost; }},
           {"tokens", [](Bundle& b) { b.corpus.tokens = kMost; }},
           {"sequences_used", [](Bundle& b) { b.corpus.sequences_used = kMost; }}}) {
    const std::string text = merged(change);
    EXPECT_NE(text.find("too large to be added"), std::string::npos) << text;
    EXPECT_NE(text.find(word), std::string::npos) << text;
  }
}

TEST_F(LargeCounts, APositionSpanBeyondAnIntIsRefused) {
  const int64_t over = int64_t{1} << 31;
  const auto refit = [](int64_t span) {
    return refusal([&] {
      refit_bundle(sample::statistics_bundle(), {.fit = {.position_span = span}, .quantizer = {}},
                   "a.h5");
    });
  };
  for (const int64_t span : {over, kMost}) {
    EXPECT_NE(refit(span).find("--position-span"), std::string::npos) << refit(span);
    Bundle bundle = sample::statistics_bundle();
    bundle.position_span = span;
    const auto path = file("span.h5");
    write_bundle(bundle, path, true);
    const std::string text = refusal([&] { read_bundle(path); });
    EXPECT_NE(text.find("position_span"), std::string::npos) << text;
  }
}

}  // namespace
