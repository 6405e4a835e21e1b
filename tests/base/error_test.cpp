// Errors carry their parts into the text, and only those that are known.
#include "oscar/base/error.h"

#include <gtest/gtest.h>

namespace {

TEST(Error, NamesEveryKnownPartInOrder) {
  const oscar::Error error({.what = "tensor has the wrong shape",
                            .where = "model.safetensors: lm_head.weight",
                            .expected = "[8, 4]",
                            .found = "[4, 8]",
                            .hint = "re-export the checkpoint"});
  EXPECT_STREQ(error.what(),
               "tensor has the wrong shape\n"
               "  where:    model.safetensors: lm_head.weight\n"
               "  expected: [8, 4]\n"
               "  found:    [4, 8]\n"
               "  hint:     re-export the checkpoint");
}

TEST(Error, LeavesOutEmptyParts) {
  EXPECT_STREQ(oscar::Error({.what = "corpus is empty"}).what(), "corpus is empty");
}

}  // namespace
