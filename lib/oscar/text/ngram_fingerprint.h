// A small sample of a text's token n-grams, kept as hashes: enough to notice that an evaluation
// reads the text a bundle was made from, without keeping the text.
#pragma once

#include <cstdint>
#include <vector>

namespace oscar {

// Length of the n-grams, and the number of hashes at which the sample stops growing (64 KiB).
// 13 is what the check of GPT-3's test sets for training text used (Brown et al. 2020,
// arXiv 2005.14165, appendix C); there it counts words, here tokens, which are shorter.
inline constexpr int kNgramTokens = 13;
inline constexpr int64_t kFingerprintCapacity = 8192;

// The kFingerprintCapacity smallest hashes of all n-grams (bottom-k sample: Broder 1997, "On the
// resemblance and containment of documents"). Hashes act as random numbers, so it is a uniform
// sample of the distinct n-grams, and it knows every n-gram of the text whose hash is at most its
// last one; every one at all while it is not full.
struct NgramFingerprint {
  std::vector<int64_t> hashes;  // ascending, distinct, not negative

  bool empty() const { return hashes.empty(); }
  bool operator==(const NgramFingerprint&) const = default;
};

// Hash of the kNgramTokens ids from `ids` on, 0 to 2^63 - 1: the ids plus 1 are the digits, first
// one first, of a number in base 0x9E3779B97F4A7C15 modulo 2^64, which goes through SplitMix64's
// finaliser and loses its lowest bit.
int64_t ngram_hash(const int32_t* ids);

// Over the n-grams within each sequence, none across two; shorter sequences have none.
NgramFingerprint fingerprint_of(const std::vector<std::vector<int32_t>>& sequences);

// That of both texts together: the smallest hashes of either.
NgramFingerprint merged(const NgramFingerprint& a, const NgramFingerprint& b);

// How many of a text's distinct n-grams are in the fingerprinted one: found / sampled estimates the
// share, with the error of `sampled` independent draws.
struct NgramOverlap {
  int64_t sampled = 0;  // of the text, with a hash that the fingerprint would know
  int64_t found = 0;    // of these, in the fingerprint
};

NgramOverlap overlap_with(const NgramFingerprint& fingerprint,
                          const std::vector<std::vector<int32_t>>& sequences);

// The share of the distinct n-grams of the smaller of two texts that is in the other, too; 0 where
// one has no fingerprint.
double shared_text(const NgramFingerprint& a, const NgramFingerprint& b);

// Shares above this are cautioned of. Text that the fit or the search has seen is quantized better
// than other text; a hundredth of such text changes KL by at most a hundredth of that advantage,
// which no evaluation resolves, and set phrases that unrelated texts share stay below it.
inline constexpr double kNotableOverlap = 0.01;

}  // namespace oscar
