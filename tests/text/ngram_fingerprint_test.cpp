// The sample of n-grams: which ones it keeps, and what it says about another text.
#include "oscar/text/ngram_fingerprint.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <set>

#include "oscar/text/corpus.h"

namespace {

using namespace oscar;

using Chunks = std::vector<std::vector<int32_t>>;

Chunks random_chunks(size_t count, size_t length, uint64_t seed) {
  SplitMix64 random(seed);
  Chunks chunks(count, std::vector<int32_t>(length));
  for (auto& chunk : chunks) {
    for (int32_t& id : chunk) id = static_cast<int32_t>(random.below(8192));
  }
  return chunks;
}

std::set<int64_t> all_hashes(const Chunks& chunks) {
  std::set<int64_t> hashes;
  for (const auto& chunk : chunks) {
    for (size_t i = 0; i + kNgramTokens <= chunk.size(); ++i) hashes.insert(ngram_hash(&chunk[i]));
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
  const Chunks chunks = random_chunks(20, 5000, 1);
  const auto all = all_hashes(chunks);
  const auto kept = fingerprint_of(chunks).hashes;
  ASSERT_EQ(kept.size(), static_cast<size_t>(kFingerprintCapacity));
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), all.begin()));
}

TEST(NgramFingerprint, KeepsEveryHashOfAShortTextAndNoneAcrossChunks) {
  Chunks chunks = random_chunks(3, 40, 2);
  chunks.push_back({1, 2, 3});  // too short for an n-gram
  const auto kept = fingerprint_of(chunks).hashes;
  EXPECT_EQ(kept.size(), 3U * (40 - kNgramTokens + 1));
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
  EXPECT_TRUE(fingerprint_of({{1, 2, 3}}).empty());
}

TEST(NgramFingerprint, RepeatedTextCountsOnce) {
  Chunks chunks = random_chunks(1, 500, 3);
  const auto once = fingerprint_of(chunks);
  for (int i = 0; i < 50; ++i) chunks.push_back(chunks[0]);
  EXPECT_EQ(fingerprint_of(chunks), once);
}

TEST(NgramFingerprint, OfTwoTextsIsTheMergedOne) {
  const Chunks a = random_chunks(5, 3000, 4), b = random_chunks(7, 3000, 5);
  Chunks both = a;
  both.insert(both.end(), b.begin(), b.end());
  EXPECT_EQ(merged(fingerprint_of(a), fingerprint_of(b)), fingerprint_of(both));
  const Chunks small = random_chunks(1, 300, 6), other = random_chunks(1, 300, 7);
  EXPECT_EQ(merged(fingerprint_of(small), fingerprint_of(other)),
            fingerprint_of({small[0], other[0]}));
}

TEST(NgramOverlap, IsAllOfTheSameTextAndNothingOfAnother) {
  const Chunks text = random_chunks(20, 5000, 8), other = random_chunks(20, 5000, 9);
  const auto same = overlap_with(fingerprint_of(text), text);
  EXPECT_EQ(same.sampled, kFingerprintCapacity);
  EXPECT_EQ(same.found, same.sampled);
  const auto none = overlap_with(fingerprint_of(text), other);
  EXPECT_GT(none.sampled, kFingerprintCapacity / 2);
  EXPECT_EQ(none.found, 0);
}

TEST(NgramOverlap, EstimatesTheShareThatIsShared) {
  const Chunks text = random_chunks(40, 5000, 10);
  Chunks evaluated = random_chunks(9, 5000, 11);
  for (size_t i = 0; i < 3; ++i) evaluated.push_back(text[i]);  // a quarter
  const auto overlap = overlap_with(fingerprint_of(text), evaluated);
  const auto sampled = static_cast<double>(overlap.sampled);
  // Some 2,400 draws: four standard errors are 0.035.
  EXPECT_GT(sampled, 2000);
  EXPECT_NEAR(static_cast<double>(overlap.found) / sampled, 0.25,
              4 * std::sqrt(0.25 * 0.75 / sampled));
}

TEST(NgramOverlap, OfAShortTextIsExact) {
  const Chunks text = random_chunks(2, 100, 12);
  Chunks evaluated = random_chunks(1, 100, 13);
  evaluated.push_back(text[1]);
  const auto overlap = overlap_with(fingerprint_of(text), evaluated);
  EXPECT_EQ(overlap.sampled, 2 * (100 - kNgramTokens + 1));
  EXPECT_EQ(overlap.found, 100 - kNgramTokens + 1);
}

}  // namespace
