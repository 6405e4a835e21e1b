// The sample of n-grams: which ones it keeps, and what it says about another text.
#include "oscar/text/ngram_fingerprint.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <set>

#include "oscar/text/corpus.h"

namespace {

using namespace oscar;

using Sequences = std::vector<std::vector<int32_t>>;

Sequences random_sequences(size_t count, size_t length, uint64_t seed) {
  SplitMix64 random(seed);
  Sequences sequences(count, std::vector<int32_t>(length));
  for (auto& sequence : sequences) {
    for (int32_t& id : sequence) id = static_cast<int32_t>(random.below(8192));
  }
  return sequences;
}

std::set<int64_t> all_hashes(const Sequences& sequences) {
  std::set<int64_t> hashes;
  for (const auto& sequence : sequences) {
    for (size_t i = 0; i + kNgramTokens <= sequence.size(); ++i)
      hashes.insert(ngram_hash(&sequence[i]));
  }
  return hashes;
}

TEST(NgramFingerprint, HashesAreThoseOfTheWrittenRule) {
  std::vector<int32_t> ids(kNgramTokens);
  for (int i = 0; i < kNgramTokens; ++i) ids[i] = i;
  EXPECT_EQ(ngram_hash(ids.data()),
            7438678305273411068);  // computed apart from bundle/SCHEMA.md's text
  ids.assign(kNgramTokens, 8191);
  EXPECT_EQ(ngram_hash(ids.data()), 8872423469563703425);
  ids.assign(kNgramTokens, 0);
  EXPECT_EQ(ngram_hash(ids.data()), 3010792084047725210);
}

TEST(NgramFingerprint, KeepsTheSmallestHashesOfALongText) {
  const Sequences sequences = random_sequences(20, 5000, 1);
  const auto all = all_hashes(sequences);
  const auto kept = fingerprint_of(sequences).hashes;
  ASSERT_EQ(kept.size(), static_cast<size_t>(kFingerprintCapacity));
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), all.begin()));
}

TEST(NgramFingerprint, KeepsEveryHashOfAShortTextAndNoneAcrossSequences) {
  Sequences sequences = random_sequences(3, 40, 2);
  sequences.push_back({1, 2, 3});  // too short for an n-gram
  const auto kept = fingerprint_of(sequences).hashes;
  EXPECT_EQ(kept.size(), 3U * (40 - kNgramTokens + 1));
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
  EXPECT_TRUE(fingerprint_of({{1, 2, 3}}).empty());
}

TEST(NgramFingerprint, RepeatedTextCountsOnce) {
  Sequences sequences = random_sequences(1, 500, 3);
  const auto once = fingerprint_of(sequences);
  for (int i = 0; i < 50; ++i) sequences.push_back(sequences[0]);
  EXPECT_EQ(fingerprint_of(sequences), once);
}

TEST(NgramFingerprint, OfTwoTextsIsTheMergedOne) {
  const Sequences a = random_sequences(5, 3000, 4), b = random_sequences(7, 3000, 5);
  Sequences both = a;
  both.insert(both.end(), b.begin(), b.end());
  EXPECT_EQ(merged(fingerprint_of(a), fingerprint_of(b)), fingerprint_of(both));
  const Sequences small = random_sequences(1, 300, 6), other = random_sequences(1, 300, 7);
  EXPECT_EQ(merged(fingerprint_of(small), fingerprint_of(other)),
            fingerprint_of({small[0], other[0]}));
}

TEST(NgramOverlap, IsAllOfTheSameTextAndNothingOfAnother) {
  const Sequences text = random_sequences(20, 5000, 8), other = random_sequences(20, 5000, 9);
  const auto same = overlap_with(fingerprint_of(text), text);
  EXPECT_EQ(same.sampled, kFingerprintCapacity);
  EXPECT_EQ(same.found, same.sampled);
  const auto none = overlap_with(fingerprint_of(text), other);
  EXPECT_GT(none.sampled, kFingerprintCapacity / 2);
  EXPECT_EQ(none.found, 0);
}

TEST(NgramOverlap, EstimatesTheShareThatIsShared) {
  const Sequences text = random_sequences(40, 5000, 10);
  Sequences evaluated = random_sequences(9, 5000, 11);
  for (size_t i = 0; i < 3; ++i) evaluated.push_back(text[i]);  // a quarter
  const auto overlap = overlap_with(fingerprint_of(text), evaluated);
  const auto sampled = static_cast<double>(overlap.sampled);
  // Some 2,400 draws: four standard errors are 0.035.
  EXPECT_GT(sampled, 2000);
  EXPECT_NEAR(static_cast<double>(overlap.found) / sampled, 0.25,
              4 * std::sqrt(0.25 * 0.75 / sampled));
}

TEST(NgramOverlap, OfAShortTextIsExact) {
  const Sequences text = random_sequences(2, 100, 12);
  Sequences evaluated = random_sequences(1, 100, 13);
  evaluated.push_back(text[1]);
  const auto overlap = overlap_with(fingerprint_of(text), evaluated);
  EXPECT_EQ(overlap.sampled, 2 * (100 - kNgramTokens + 1));
  EXPECT_EQ(overlap.found, 100 - kNgramTokens + 1);
}

}  // namespace
