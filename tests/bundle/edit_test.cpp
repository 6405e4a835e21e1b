#include "oscar/bundle/edit.h"

#include <gtest/gtest.h>

#include "bundle/sample.h"
#include "oscar/base/error.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"

namespace {

using namespace oscar;

// "" where the two are added.
std::string merge_refusal(const Bundle& a, const Bundle& b) {
  try {
    merge_statistics({a, b}, {"a.h5", "b.h5"}, true);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(Merge, TheSameSumsAreRefusedThoughNothingNamesTheirText) {
  Bundle a = sample::statistics_bundle();
  a.corpus.tokens_sha256.clear();
  for (CorpusSource& source : a.corpus.sources) source.sha256.clear();
  EXPECT_FALSE(names_its_text(a));
  Bundle b = a;
  const auto refusal = [&] {
    try {
      merge_statistics({a, b}, {"a.h5", "b.h5"}, false);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* word : {"counted twice", "b.h5", "in a.h5", "--allow-repeats"}) {
    EXPECT_NE(refusal().find(word), std::string::npos) << refusal();
  }
  b.statistics[0].k_moment[0](0, 0) += 1;
  EXPECT_EQ(refusal(), "");
}

TEST(Merge, SumsOfOtherWeightsAreRefused) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.weight_samples[1].matrices[1](2, 3) += 1;
  const auto refusal = [&] { return merge_refusal(a, b); };
  for (const char* word : {"different weights", "b.h5: weight_samples", "those of a.h5",
                           "W_V of layer 1 differs, and 0 more of 18 tensors"}) {
    EXPECT_NE(refusal().find(word), std::string::npos) << refusal();
  }
  a.weight_samples.clear();  // not known
  EXPECT_EQ(refusal(), "");
  EXPECT_TRUE(have_comparable_weights(a, b));
  b.model.weights_fingerprint.clear();
  EXPECT_FALSE(have_comparable_weights(a, b));
}

TEST(Merge, SumsOfAnotherConfigAreRefusedWhereBothAreKnown) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.tokens_sha256 = "other";
  b.corpus.sources[0].sha256 = "other";
  const auto refusal = [&] { return merge_refusal(a, b); };
  a.model.numerics = {{"rms_norm_eps", 1e-6}};
  b.model.numerics = nullptr;  // of an earlier version
  EXPECT_EQ(refusal(), "");
  b.model.numerics = {{"rms_norm_eps", 1e-5}};
  EXPECT_NE(refusal().find("attribute numerics"), std::string::npos) << refusal();
}

// With a gate, M_O is a mean over the text.

TEST(Merge, AMetricThatDependsOnTheTextIsWeighedByTokens) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.tokens_sha256 = "other";
  b.corpus.sources[0].sha256 = "other";
  const auto tokens = a.statistics[0].count_kv;
  b.statistics[0].count_kv = 3 * tokens;
  for (double& entry : b.statistics[0].o_proj_metric.data) entry *= 5;
  const Bundle both = merge_statistics({a, b}, {"a.h5", "b.h5"}, true);
  for (size_t i = 0; i < both.statistics[0].o_proj_metric.data.size(); ++i) {
    EXPECT_DOUBLE_EQ(both.statistics[0].o_proj_metric.data[i],
                     4 * a.statistics[0].o_proj_metric.data[i]);
  }
  EXPECT_EQ(both.statistics[1].o_proj_metric, a.statistics[1].o_proj_metric);
}

TEST(Merge, WhatWasDoneToTheTextIsSaidOfEveryPart) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.separators = "ids 2";
  EXPECT_EQ(merge_statistics({a, a}, {"a.h5", "a.h5"}, true).corpus.recall, "");
  b.corpus.recall = "repeated";
  const CorpusRecord both = merge_statistics({a, b}, {"a.h5", "b.h5"}, true).corpus;
  EXPECT_EQ(both.recall, "none; repeated");
  EXPECT_EQ(both.separators, a.corpus.separators + "; ids 2");
  EXPECT_EQ(merge_statistics({b, b}, {"b.h5", "b.h5"}, true).corpus.recall, "repeated");
}

TEST(Merge, PositionsAreThoseThatAllInputsWereFittedFor) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.tokens_sha256 = "other";
  b.corpus.sources[0].sha256 = "other";
  a.position_span = b.position_span = 4096;
  EXPECT_EQ(merge_statistics({a, b}, {"a.h5", "b.h5"}, true).position_span, 4096);
  b.position_span = 131072;
  EXPECT_EQ(merge_statistics({a, b}, {"a.h5", "b.h5"}, true).position_span, 0);
  EXPECT_EQ(merge_statistics({b, a}, {"b.h5", "a.h5"}, true).position_span, 0);
}

// The fingerprint of a bundle's text: kept, dropped, merged, and refused when it can't be ours.

namespace {

using namespace oscar;
using sample::BundleTest;

class Fingerprint : public BundleTest {
 protected:
  // Writes the sample with `hashes` changed by `change` in the file alone, and reads it back.
  std::string reading_of(const std::function<void(EncodedFile&)>& change) {
    Bundle bundle = sample::statistics_bundle();
    bundle.fingerprint.hashes = {3, 5, 8};
    EncodedFile encoded = encode_bundle(bundle, nullptr);
    change(encoded);
    AtomicFile out(file("changed.h5"));
    write_encoded(std::move(encoded), out);
    out.commit();
    try {
      const Bundle back = read_bundle(file("changed.h5"));
      return back.fingerprint.empty() ? "unknown" : "read";
    } catch (const Error& error) {
      return error.what();
    }
  }

  static hdf5::DatasetView& dataset(EncodedFile& file) {
    for (auto& d : file.datasets) {
      if (d.path == schema::kFingerprint) return d;
    }
    throw std::logic_error("no fingerprint");
  }
};

TEST_F(Fingerprint, ComesBackExactlyWithTheRecordOfConvergence) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.fingerprint.hashes = {0, 7, INT64_MAX};
  bundle.convergence = Json{{"tokens", 100}, {"problem", "one batch"}};
  write_bundle(bundle, file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  EXPECT_EQ(back.fingerprint, bundle.fingerprint);
  EXPECT_EQ(back.convergence, bundle.convergence);
}

TEST_F(Fingerprint, AbsentIsUnknown) {
  write_bundle(sample::statistics_bundle(), file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  EXPECT_TRUE(back.fingerprint.empty());
  EXPECT_TRUE(back.convergence.is_null());
}

TEST_F(Fingerprint, OfAnotherRuleIsUnknown) {
  for (const char* name : {"rule", "ngram", "capacity"}) {
    EXPECT_EQ(reading_of([name](EncodedFile& file) {
                for (auto& attribute : file.attributes) {
                  if (attribute.object == schema::kFingerprint && attribute.name == name) {
                    attribute.value = std::string("another");
                  }
                }
              }),
              "unknown")
        << name;
  }
}

TEST_F(Fingerprint, ThatThisRuleCannotHaveMadeIsRefused) {
  static const std::vector<int64_t> kNegative = {-1, 2}, kRepeated = {2, 2}, kDescending = {3, 2};
  static const std::vector<int64_t> kMany(static_cast<size_t>(kFingerprintCapacity) + 1, 1);
  static const std::vector<double> kFloats = {1, 2};
  const auto with = [this](const std::vector<int64_t>& hashes, hdf5::Shape shape) {
    return reading_of([&](EncodedFile& file) {
      dataset(file).data = hashes.data();
      dataset(file).shape = std::move(shape);
    });
  };
  EXPECT_EQ(with({2, 4, 6}, {3}), "read");
  for (const auto* hashes : {&kNegative, &kRepeated, &kDescending}) {
    EXPECT_NE(with(*hashes, {2}).find("ascending order"), std::string::npos);
  }
  EXPECT_NE(with(kMany, {kMany.size()}).find("at most [8192]"), std::string::npos);
  EXPECT_NE(with({2, 4}, {2, 1}).find("wrong shape"), std::string::npos);
  const std::string floats = reading_of([](EncodedFile& file) {
    dataset(file) = {schema::kFingerprint, hdf5::Dtype::kF64, {2}, kFloats.data(), false};
  });
  EXPECT_NE(floats.find("wrong dtype"), std::string::npos) << floats;
}

TEST_F(Fingerprint, IsDroppedWithTheStatistics) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.fingerprint.hashes = {1};
  EXPECT_TRUE(strip_bundle(std::move(bundle), StripProfile::kPublish, "a.h5").fingerprint.empty());
}

TEST_F(Fingerprint, OfMergedFilesIsThatOfBothOrUnknown) {
  Bundle a = sample::statistics_bundle(), b = sample::statistics_bundle();
  a.convergence = Json{{"tokens", 100}};
  a.fingerprint.hashes = {1, 4};
  b.fingerprint.hashes = {2, 4};
  const Bundle both = merge_statistics({a, b}, {"a.h5", "b.h5"}, true);
  EXPECT_EQ(both.fingerprint.hashes, (std::vector<int64_t>{1, 2, 4}));
  EXPECT_TRUE(both.convergence.is_null());
  b.fingerprint = {};
  EXPECT_TRUE(merge_statistics({a, b}, {"a.h5", "b.h5"}, true).fingerprint.empty());
  EXPECT_TRUE(merge_statistics({b, a, a}, {"b.h5", "a.h5", "c.h5"}, true).fingerprint.empty());
}

TEST_F(Fingerprint, ARecordOfManyLayersLosesItsTableButNotItsVerdict) {
  Bundle bundle = sample::statistics_bundle();
  bundle.convergence = Json{{"cost", 0.25}, {"layers", std::vector<double>(20000, 0.125)}};
  write_bundle(bundle, file("a.h5"), false);
  EXPECT_EQ(read_bundle(file("a.h5")).convergence, (Json{{"cost", 0.25}}));
}

}  // namespace
