// Hashing every n-gram and keeping the smallest hashes.
#include "oscar/text/ngram_fingerprint.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "oscar/text/corpus.h"

namespace oscar {
namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15ULL;
constexpr auto kCapacity = static_cast<size_t>(kFingerprintCapacity);
constexpr int64_t kAnyHash = std::numeric_limits<int64_t>::max();

template <typename Take>
void for_each_ngram(const std::vector<std::vector<int32_t>>& sequences, Take&& take) {
  for (const auto& sequence : sequences) {
    for (size_t i = 0; i + kNgramTokens <= sequence.size(); ++i) take(ngram_hash(&sequence[i]));
  }
}

void keep_smallest(std::vector<int64_t>& hashes) {
  std::sort(hashes.begin(), hashes.end());
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
  if (hashes.size() > kCapacity) hashes.resize(kCapacity);
}

}  // namespace

int64_t ngram_hash(const int32_t* ids) {
  uint64_t number = 0;
  for (int i = 0; i < kNgramTokens; ++i) {
    number = number * kBase + static_cast<uint64_t>(static_cast<uint32_t>(ids[i])) + 1;
  }
  return static_cast<int64_t>(SplitMix64(number).next() >> 1);
}

NgramFingerprint fingerprint_of(const std::vector<std::vector<int32_t>>& sequences) {
  std::vector<int64_t> hashes;
  // Reduced whenever it holds twice what is kept; from then on larger hashes are not taken up.
  int64_t largest = kAnyHash;
  for_each_ngram(sequences, [&](int64_t hash) {
    if (hash > largest) return;
    hashes.push_back(hash);
    if (hashes.size() < 2 * kCapacity) return;
    keep_smallest(hashes);
    if (hashes.size() == kCapacity) largest = hashes.back();
  });
  keep_smallest(hashes);
  return {std::move(hashes)};
}

NgramFingerprint merged(const NgramFingerprint& a, const NgramFingerprint& b) {
  NgramFingerprint both = a;
  both.hashes.insert(both.hashes.end(), b.hashes.begin(), b.hashes.end());
  keep_smallest(both.hashes);
  return both;
}

NgramOverlap overlap_with(const NgramFingerprint& fingerprint,
                          const std::vector<std::vector<int32_t>>& sequences) {
  const std::vector<int64_t>& known = fingerprint.hashes;
  const int64_t largest = known.size() < kCapacity ? kAnyHash : known.back();
  std::set<int64_t> sampled;
  for_each_ngram(sequences, [&](int64_t hash) {
    if (hash <= largest) sampled.insert(hash);
  });
  NgramOverlap overlap{.sampled = static_cast<int64_t>(sampled.size())};
  for (const int64_t hash : sampled) {
    overlap.found += std::binary_search(known.begin(), known.end(), hash);
  }
  return overlap;
}

double shared_text(const NgramFingerprint& a, const NgramFingerprint& b) {
  // Both samples hold every n-gram whose hash is at most this.
  int64_t known = kAnyHash;
  for (const NgramFingerprint* one : {&a, &b}) {
    if (one->empty()) return 0;
    if (one->hashes.size() >= kCapacity) known = std::min(known, one->hashes.back());
  }
  const auto end_of = [known](const NgramFingerprint& one) {
    return std::ranges::upper_bound(one.hashes, known);
  };
  const auto smaller = std::min(end_of(a) - a.hashes.begin(), end_of(b) - b.hashes.begin());
  if (smaller == 0) return 0;
  std::vector<int64_t> both;
  std::set_intersection(a.hashes.begin(), end_of(a), b.hashes.begin(), end_of(b),
                        std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(smaller);
}

}  // namespace oscar
