// Merging: few symbols by looking at all pairs each time, many through a queue.
#include "oscar/data/merge_table.h"

#include <array>
#include <bit>
#include <queue>

#include "oscar/data/unicode.h"

namespace oscar {
namespace {

constexpr size_t kShortWord = 24;         // up to here, scanning beats a queue
constexpr char32_t kLowCharacters = 512;  // Latin, and all that byte-level BPE writes

uint64_t pair_key(uint32_t left, uint32_t right) {
  return (static_cast<uint64_t>(left) << 32) | right;
}

uint64_t pair_key(int32_t left, int32_t right) {
  return pair_key(static_cast<uint32_t>(left), static_cast<uint32_t>(right));
}

}  // namespace

MergeTable::MergeTable(size_t num_merges)
    : places_(std::bit_ceil(2 * num_merges + 1)),
      low_joins_(size_t{kLowCharacters} * kLowCharacters) {}

MergeTable::Place& MergeTable::place_of(uint64_t pair) {
  size_t at = PairHash()(pair);
  while (true) {
    Place& place = places_[at++ & (places_.size() - 1)];
    if (place.pair == pair || place.pair == kNoPair) return place;
  }
}

void MergeTable::add(int32_t left, std::string_view left_text, int32_t right,
                     std::string_view right_text, int32_t merged) {
  const uint64_t pair = pair_key(left, right);
  place_of(pair) = {pair, {next_rank_++, merged}};
  size_t offset = previous_begin(left_text, left_text.size());
  const char32_t last = next_code_point(left_text, offset);
  offset = 0;
  const char32_t first = next_code_point(right_text, offset);
  if (last < kLowCharacters && first < kLowCharacters) {
    low_joins_[last * kLowCharacters + first] = true;
  } else {
    other_joins_.insert(pair_key(static_cast<uint32_t>(last), static_cast<uint32_t>(first)));
  }
}

bool MergeTable::joins(char32_t left, char32_t right) const {
  if (left < kLowCharacters && right < kLowCharacters) {
    return low_joins_[left * kLowCharacters + right];
  }
  return other_joins_.count(pair_key(static_cast<uint32_t>(left), static_cast<uint32_t>(right))) >
         0;
}

const MergeTable::Merge* MergeTable::merge_of(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  size_t at = PairHash()(pair);
  while (true) {
    const Place& place = places_[at++ & (places_.size() - 1)];
    if (place.pair == pair) return &place.merge;
    if (place.pair == kNoPair) return nullptr;
  }
}

void MergeTable::apply(std::vector<int32_t>& symbols) const {
  if (symbols.size() <= kShortWord) {
    apply_short(symbols);
  } else {
    apply_long(symbols);
  }
}

void MergeTable::apply_short(std::vector<int32_t>& symbols) const {
  std::array<const Merge*, kShortWord> merges{};
  for (size_t i = 0; i + 1 < symbols.size(); ++i) merges[i] = merge_of(symbols[i], symbols[i + 1]);
  while (symbols.size() > 1) {
    size_t best = symbols.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      if (merges[i] != nullptr &&
          (best == symbols.size() || merges[i]->rank < merges[best]->rank)) {
        best = i;
      }
    }
    if (best == symbols.size()) return;
    symbols[best] = merges[best]->id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    for (size_t i = best + 1; i + 1 < symbols.size(); ++i) merges[i] = merges[i + 1];
    if (best > 0) merges[best - 1] = merge_of(symbols[best - 1], symbols[best]);
    if (best + 1 < symbols.size()) merges[best] = merge_of(symbols[best], symbols[best + 1]);
  }
}

void MergeTable::apply_long(std::vector<int32_t>& symbols) const {
  struct Candidate {
    int32_t rank;
    size_t left;
    int32_t left_id, right_id;
    bool operator<(const Candidate& other) const {  // the queue gives the greatest first
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  constexpr int32_t kGone = -1;
  const size_t size = symbols.size();
  std::vector<size_t> next(size), previous(size);
  std::priority_queue<Candidate> queue;
  const auto offer = [&](size_t left, size_t right) {
    if (const Merge* merge = merge_of(symbols[left], symbols[right])) {
      queue.push({merge->rank, left, symbols[left], symbols[right]});
    }
  };
  for (size_t i = 0; i < size; ++i) {
    next[i] = i + 1;
    previous[i] = i == 0 ? size : i - 1;
    if (i + 1 < size) offer(i, i + 1);
  }
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const size_t left = top.left, right = next[left];
    // Neighbours have changed since this candidate was offered: it is no longer there.
    if (symbols[left] != top.left_id || right == size || symbols[right] != top.right_id) continue;
    symbols[left] = merge_of(top.left_id, top.right_id)->id;
    symbols[right] = kGone;
    next[left] = next[right];
    if (next[left] != size) previous[next[left]] = left;
    if (previous[left] != size) offer(previous[left], left);
    if (next[left] != size) offer(left, next[left]);
  }
  size_t kept = 0;
  for (size_t i = 0; i < size; i = next[i]) symbols[kept++] = symbols[i];
  symbols.resize(kept);
}

}  // namespace oscar
