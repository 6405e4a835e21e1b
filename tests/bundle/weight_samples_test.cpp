// Where samples lie. That they hold the right entries of the right matrices, in numbers that
// another program reads too, is shown by tests/serving/test_weights.py.
#include "oscar/bundle/weight_samples.h"

#include <gtest/gtest.h>
#include <set>
#include <utility>

#include "bundle/sample.h"
#include "oscar/base/error.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/merge.h"

namespace {

using namespace oscar;
using sample::BundleTest;

class WeightSamples : public BundleTest {
 protected:
  void expect_refused(const char* name, const char* text) const {
    try {
      read_bundle(file(name));
      FAIL() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
};

TEST_F(WeightSamples, LieInFourRowsAndSixteenColumns) {
  std::set<int64_t> rows, columns;
  for (int i = 0; i < kWeightSamples; ++i) {
    const SamplePosition at = sample_position(i, 64, 1024);
    rows.insert(at.row);
    columns.insert(at.column);
  }
  EXPECT_EQ(rows, (std::set<int64_t>{8, 24, 40, 56}));
  EXPECT_EQ(columns.size(), 16U);
  EXPECT_EQ(*columns.begin(), 32);
  EXPECT_EQ(*columns.rbegin(), 992);
  const SamplePosition seventh = sample_position(6, 64, 1024);  // i = 1, j = 2
  EXPECT_EQ(seventh.row, 24);
  EXPECT_EQ(seventh.column, 608);  // strip 9
}

TEST_F(WeightSamples, LieInsideTheSmallestParts) {
  for (int i = 0; i < kWeightSamples; ++i) {
    const SamplePosition at = sample_position(i, 1, 3);
    EXPECT_EQ(at.row, 0);
    EXPECT_LT(at.column, 3);
  }
}

TEST_F(WeightSamples, OfAVectorLieInSixteenStrips) {
  EXPECT_EQ(sample_position(0, 64), 2);
  EXPECT_EQ(sample_position(15, 64), 62);
  for (int i = 0; i < kWeightSamples; ++i) EXPECT_LT(sample_position(i, 3), 3);
}

TEST_F(WeightSamples, StayInServingProfilesAndMergedFilesAndCountAsServed) {
  const Bundle bundle = sample::rotation_bundle(TransformKind::kBalanced);
  const Bundle serving = strip_bundle(bundle, StripProfile::kServing, "");
  EXPECT_EQ(serving.weight_samples, bundle.weight_samples);
  Bundle without = bundle;
  without.weight_samples.clear();
  EXPECT_NE(serving_sha256(without), serving_sha256(bundle));
  EXPECT_EQ(serving_sha256(serving), serving_sha256(bundle));
  // A file of an earlier version has none; the weights are the same.
  Bundle old = sample::statistics_bundle(), other = sample::statistics_bundle();
  old.weight_samples.clear();
  const Bundle merged = merge_statistics({old, other}, {"a", "b"}, true);
  EXPECT_EQ(merged.weight_samples, other.weight_samples);
}

TEST_F(WeightSamples, OfSomeLayersOnlyAreRefused) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.weight_samples[0] = {};
  write_bundle(bundle, file("some.h5"), true);
  expect_refused("some.h5", "some layers only");
}

TEST_F(WeightSamples, OfVectorsWithoutMatricesAreRefused) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.weight_samples[0].vectors = {};  // as earlier versions wrote them
  write_bundle(bundle, file("old.h5"), true);
  EXPECT_EQ(read_bundle(file("old.h5")).weight_samples, bundle.weight_samples);
  bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.weight_samples[0].matrices = {};
  write_bundle(bundle, file("vectors.h5"), true);
  expect_refused("vectors.h5", "samples of vectors without those of matrices");
}

}  // namespace
