// The merges of a byte-pair encoding: pairs of symbols, what each becomes, and which comes first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace oscar {

class MergeTable {
 public:
  explicit MergeTable(size_t num_merges = 0);

  // The next merge, at most `num_merges` in all, of the tokens with these ids and texts (valid
  // UTF-8, not empty). Of equal pairs the last counts.
  void add(int32_t left, std::string_view left_text, int32_t right, std::string_view right_text,
           int32_t merged);

  // Merges neighbours until no merge is left: the earliest added first, the leftmost among equals.
  // n log n.
  void apply(std::vector<int32_t>& symbols) const;

  // Whether a merge joins a token that ends with character `left` to one that begins with `right`.
  // Where none does, text can be cut in two: what is merged on one side never depends on the other.
  bool joins(char32_t left, char32_t right) const;

 private:
  struct Merge {
    int32_t rank, id;
  };
  struct PairHash {
    size_t operator()(uint64_t pair) const {
      pair *= 0x9E3779B97F4A7C15ULL;
      return static_cast<size_t>(pair ^ (pair >> 32));
    }
  };

  // Open addressing over a power of two of places, at most half of them taken.
  struct Place {
    uint64_t pair = kNoPair;
    Merge merge;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};

  Place& place_of(uint64_t pair);
  const Merge* merge_of(int32_t left, int32_t right) const;
  void apply_short(std::vector<int32_t>& symbols) const;
  void apply_long(std::vector<int32_t>& symbols) const;

  std::vector<Place> places_;
  int32_t next_rank_ = 0;
  std::vector<bool> low_joins_;  // by pairs of the first characters of Unicode
  std::unordered_set<uint64_t, PairHash> other_joins_;
};

}  // namespace oscar
