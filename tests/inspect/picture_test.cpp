// Spectra and channel sizes of bundles whose content is known.
#include "oscar/inspect/picture.h"

#include <gtest/gtest.h>

#include "bundle/sample.h"

namespace oscar {
namespace {

TEST(BundlePicture, SharesAreOfTheTraceInDescendingOrder) {
  const Bundle b = sample::rotation_bundle(TransformKind::kBalanced);
  const Json picture = spectra_picture(b);
  ASSERT_EQ(picture["layers"].size(), static_cast<size_t>(sample::kLayers));
  EXPECT_EQ(picture["ranks"].front(), 1);
  EXPECT_EQ(picture["ranks"].back(), sample::kDim);
  // Eigenvalues of head h: 1/3 + 10 h + i.
  double largest = 0, smallest = 0;
  for (int h = 0; h < sample::kHeads; ++h) {
    const double first = 1.0 / 3 + 10 * h;
    const double trace = sample::kDim * first + sample::kDim * (sample::kDim - 1) / 2.0;
    largest += (first + sample::kDim - 1) / trace / sample::kHeads;
    smallest += first / trace / sample::kHeads;
  }
  const Json& share = picture["layers"][1]["key"]["share"];
  EXPECT_NEAR(share.front().get<double>(), largest, 1e-3 * largest);
  EXPECT_NEAR(share.back().get<double>(), smallest, 1e-3 * smallest);
  EXPECT_GT(picture["layers"][0]["value"]["effective_rank"].get<double>(), 5);
}

TEST(BundlePicture, ARotationOfOneLoudChannelSpreadsItsEnergy) {
  Bundle b = sample::rotation_bundle(TransformKind::kOscar);
  for (LayerStatistics& s : b.statistics) {
    for (int h = 0; h < sample::kHeads; ++h) {
      s.k_moment[h].setIdentity();
      s.k_moment[h](2, 2) = 100;  // channel 2 of ten times the root mean square of the others
      s.k_moment[h] *= static_cast<double>(s.count_kv);
      s.k_sum[h].setZero();
    }
  }
  for (LayerTransforms& layer : b.layers) {
    layer.key.mean.data.assign(layer.key.mean.data.size(), 0);
    for (int h = 0; h < sample::kHeads; ++h) {
      auto rotation = layer.key.forward[h];
      for (int i = 0; i < sample::kDim; ++i) {
        for (int j = 0; j < sample::kDim; ++j) {  // Sylvester Hadamard
          rotation(i, j) = (__builtin_popcount(i & j) % 2 == 0 ? 1.0F : -1.0F) / std::sqrt(8.0F);
        }
      }
    }
  }
  const Json picture = channels_picture(b);
  for (const Json& layer : picture["layers"]) {
    for (int h = 0; h < sample::kHeads; ++h) {
      EXPECT_NEAR(layer["key"]["peak_before"][h].get<double>(), 10, 1e-2);
      EXPECT_NEAR(layer["key"]["peak_after"][h].get<double>(), 1, 1e-3);
    }
  }
  EXPECT_NEAR(picture["profile"]["before"][2].get<double>(), 10, 1e-2);
  EXPECT_EQ(picture["profile"]["after"].size(), static_cast<size_t>(sample::kDim));
}

TEST(BundlePicture, CenteringTakesTheMeanOut) {
  Bundle b = sample::rotation_bundle(TransformKind::kOscar);
  LayerStatistics& s = b.statistics[0];
  s.k_sum[0].setConstant(3.0 * static_cast<double>(s.count_kv));
  s.k_moment[0].setConstant(9.0 * static_cast<double>(s.count_kv));
  s.k_moment[0].diagonal().array() += static_cast<double>(s.count_kv);  // mean 3, variance 1
  b.layers[0].key.forward[0].setIdentity();
  b.layers[0].key.mean[0].setConstant(3);
  s.k_moment[0](5, 5) += 63.0 * static_cast<double>(s.count_kv);  // variance 64
  EXPECT_NEAR(channels_picture(b)["layers"][0]["key"]["peak_after"][0].get<double>(), 8, 1e-2);
}

TEST(BundlePicture, WhatABundleDoesNotHoldIsNull) {
  EXPECT_TRUE(spectra_picture(sample::statistics_bundle()).is_null());
  EXPECT_TRUE(channels_picture(sample::statistics_bundle()).is_null());
  Bundle stripped = sample::rotation_bundle(TransformKind::kOscar);
  stripped.statistics.clear();
  EXPECT_TRUE(channels_picture(stripped).is_null());
  EXPECT_FALSE(spectra_picture(stripped).is_null());
}

TEST(BundlePicture, StaysBoundedForWideHeads) {
  Bundle b = sample::rotation_bundle(TransformKind::kOscar);
  for (LayerTransforms& layer : b.layers) {
    layer.geometry.head_dim_k = layer.geometry.head_dim_v = 256;
    for (SideTransform* side : {&layer.key, &layer.value}) {
      side->eigenvalues = VectorStack<double>(1, 256);
      for (int i = 0; i < 256; ++i) side->eigenvalues[0](i) = i;
    }
  }
  const Json picture = spectra_picture(b);
  EXPECT_LE(picture["ranks"].size(), 32u);
  EXPECT_EQ(picture["ranks"].back(), 256);
}

}  // namespace
}  // namespace oscar
