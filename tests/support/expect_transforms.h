// That transforms are equal to the bit, part by part.
#pragma once

#include <gtest/gtest.h>

#include "oscar/bundle/bundle.h"

namespace oscar {

inline void expect_equal(const SideTransform& a, const SideTransform& b) {
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.fallback, b.fallback);
  EXPECT_EQ(a.forward, b.forward);
  EXPECT_EQ(a.partner, b.partner);
  EXPECT_EQ(a.mean, b.mean);
  EXPECT_EQ(a.centers, b.centers);
  EXPECT_EQ(a.eigenvalues, b.eigenvalues);
  EXPECT_EQ(a.recipe, b.recipe);
  EXPECT_EQ(a.metric, b.metric);
  EXPECT_EQ(a.feedback, b.feedback);
  EXPECT_EQ(a.condition_number, b.condition_number);
  EXPECT_EQ(a.clip_losses, b.clip_losses);
}

inline void expect_equal(const LayerTransforms& a, const LayerTransforms& b) {
  EXPECT_EQ(a.geometry, b.geometry);
  expect_equal(a.key, b.key);
  expect_equal(a.value, b.value);
  EXPECT_EQ(a.predicted_output_nmse, b.predicted_output_nmse);
  EXPECT_EQ(a.warnings, b.warnings);
  EXPECT_EQ(a.search, b.search);
  EXPECT_EQ(a.search.dump(), b.search.dump());
}

}  // namespace oscar
