#include "oscar/bundle/coverage.h"

#include <gtest/gtest.h>

#include "bundle/sample.h"
#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/bundle/edit.h"

// Fits of one text scored on another: like texts cover each other, unlike ones are warned of.

namespace {

using namespace oscar;

constexpr int kTokens = 4000, kGroup = sample::kQueryHeads / sample::kHeads;

// Statistics of a text of one kind; channels with `swap` change places, two by two.
Bundle text(unsigned seed, bool swap) {
  Bundle bundle = sample::statistics_bundle();
  bundle.position_span = 0;
  bundle.model.rope = Json{{"rope_type", "default"}, {"rope_theta", 1e4}};
  for (LayerStatistics& layer : bundle.statistics) {
    // One seed for what a kind of text is, another for which tokens of it were drawn.
    synthetic::Rows rows =
        synthetic::make_rows(sample::kHeads, sample::kDim, 2 * kTokens, kGroup, 40);
    for (auto* side : {&rows.q, &rows.k, &rows.v, &rows.out}) {
      for (MatrixD& m : *side) {
        const MatrixD drawn = seed == 0 ? m.topRows(m.rows() / 2) : m.bottomRows(m.rows() / 2);
        m = drawn;
        if (side == &rows.k && swap) m.rowwise().reverseInPlace();
      }
    }
    const LayerGeometry geometry = layer.geometry;
    layer = synthetic::collect(rows, 41);
    layer.geometry = geometry;
  }
  return bundle;
}

TEST(Coverage, OfTheSameKindOfTextIsGood) {
  const Json result = coverage({text(0, false), text(1, false)}, {"a.h5", "b.h5"});
  for (const char* side : {"key", "value"}) {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(result[side][i][i], 1.0);
      EXPECT_GT(result[side][i][1 - i], 1.0);
      // Found: 1.0016 to 1.0018; what 4,000 tokens do not fix. Other text: 1 + kPoorCoverage.
      EXPECT_LT(result[side][i][1 - i], 1.01);
      EXPECT_LT(result[side][2][i], result[side][1 - i][i]);  // joined
      EXPECT_GE(result[std::string(side) + "_worst_layer"][i][1 - i], result[side][i][1 - i]);
    }
  }
  EXPECT_TRUE(result["warnings"].empty()) << result["warnings"];
  EXPECT_EQ(result["files"][1]["tokens"], kTokens);
}

TEST(Coverage, OfAnotherKindOfTextIsWarnedOfWithTheWayOut) {
  const Json result =
      coverage({text(0, false), text(1, false), text(0, true)}, {"a.h5", "b.h5", "c.h5"});
  EXPECT_GT(result["key"][0][2], 1 + kPoorCoverage);
  EXPECT_GT(result["key"][2][1], 1 + kPoorCoverage);
  EXPECT_LT(result["key"][3][2], result["key"][0][2]);
  EXPECT_EQ(result["value"][0][2], 1.0);  // the same values
  const std::string all = result["warnings"].dump();
  EXPECT_NE(all.find("a fit on a.h5 alone raises the predicted loss on c.h5 by"),
            std::string::npos);
  EXPECT_NE(all.find("joined"), std::string::npos);
  EXPECT_EQ(all.find("on b.h5 alone raises the predicted loss on a.h5"), std::string::npos);
}

TEST(Coverage, OfATextThatIsNotEnoughSaysSo) {
  Bundle few = text(1, false);
  few.convergence = Json{{"enough", false}};
  const Json result = coverage({text(0, false), few}, {"a.h5", "few.h5"});
  EXPECT_NE(result["warnings"].dump().find("few.h5 holds too little text"), std::string::npos);
}

TEST(Coverage, IsTheSameWhateverTheOrderOfFiles) {
  const Json one = coverage({text(0, false), text(0, true)}, {"a.h5", "c.h5"});
  const Json two = coverage({text(0, true), text(0, false)}, {"c.h5", "a.h5"});
  EXPECT_EQ(one["key"][0][1], two["key"][1][0]);
  EXPECT_NEAR(one["key"][2][1].get<double>(), two["key"][2][0].get<double>(), 1e-6);
}

TEST(Coverage, RefusesAnotherModelAndFilesWithoutStatistics) {
  const auto refusal = [](const Bundle& other) {
    try {
      coverage({text(0, false), other}, {"a.h5", "b.h5"});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  Bundle model = text(1, false);
  model.model.weights_fingerprint = "another";
  EXPECT_NE(refusal(model).find("weights_fingerprint"), std::string::npos);
  Bundle empty = text(1, false);
  empty.statistics.clear();
  EXPECT_NE(refusal(empty).find("no statistics"), std::string::npos);
  Bundle renamed = text(1, false);
  renamed.model.name = "another folder";
  EXPECT_EQ(refusal(renamed), "accepted");
}

TEST(Coverage, TextOfManyFilesStaysWithinEightyColumns) {
  std::vector<Bundle> files;
  std::vector<std::string> names;
  for (int i = 0; i < 12; ++i) {
    files.push_back(text(0, i % 2 == 1));
    names.push_back("a-rather-long-name-of-a-domain-number-" + std::to_string(i) + ".h5");
  }
  const std::string page = coverage_text(coverage(files, names));
  for (size_t begin = 0; begin < page.size();) {
    const size_t end = page.find('\n', begin);
    EXPECT_LE(end - begin, 80U) << page.substr(begin, end - begin);
    begin = end + 1;
  }
  EXPECT_NE(page.find("\n12 "), std::string::npos);
  EXPECT_NE(page.find("joined"), std::string::npos);
}

}  // namespace

namespace oscar {

// Spectra and channel sizes of bundles whose content is known.

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
