// What the search half preferred and the confirmation half denies is not believed.
#include "oscar/search/confirm.h"

#include <gtest/gtest.h>

#include "search/layer_search_case.h"

namespace {

using namespace oscar;
using namespace oscar::search_case;

// In the search half nobody looks at the four channels with the outliers, so clipping them pays; in
// the confirmation half nobody looks at anything else.
TEST(Confirmation, RejectsAnOverfitChoice) {
  Search search = random_search();
  search.fixed = {.kind = TransformKind::kIdentity, .clip_k = 0, .clip_v = 0};
  search.options = {.clip = true, .full = true};
  const auto with_outliers = [](uint64_t seed, bool seen) {
    HeldChunk chunk = random_chunk(seed);
    chunk.k.narrow(2, 0, 4).mul_(8.0f);
    (seen ? chunk.q.narrow(2, 4, kDim - 4) : chunk.q.narrow(2, 0, 4)).zero_();
    return chunk;
  };
  search.held.search = {with_outliers(10, false), with_outliers(11, false)};
  search.held.confirm = {with_outliers(12, false), with_outliers(13, false)};
  const LayerDecision agreed = search.run();
  for (const float ratio : agreed.main.key.recipe.clip_ratio) {
    EXPECT_TRUE(ratio > 0 && ratio < 0.9f) << "the planted gain was not found: " << ratio;
  }
  search.held.confirm = {with_outliers(12, true), with_outliers(13, true)};
  const LayerDecision denied = search.run();
  for (const float ratio : denied.main.key.recipe.clip_ratio) EXPECT_EQ(ratio, 0.0f);
  EXPECT_FALSE(denied.main.search["key"]["heads"][0]["confirmed"][0]["accepted"].get<bool>());
}

}  // namespace
