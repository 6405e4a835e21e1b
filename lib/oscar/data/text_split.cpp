// Matches and what lies between them, joined as the behaviour says.
#include "oscar/data/text_split.h"

#include <algorithm>
#include <array>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kBehaviors = {{
    {"Removed", SplitBehavior::kRemoved},
    {"Isolated", SplitBehavior::kIsolated},
    {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
    {"MergedWithNext", SplitBehavior::kMergedWithNext},
    {"Contiguous", SplitBehavior::kContiguous},
}};

// Calls take(begin, end, is_match) along the text.
template <typename Take>
void for_each_stretch(const TextSplit& split, std::string_view text, Take&& take) {
  for (size_t offset = 0; offset < text.size();) {
    const auto match = find_pattern(split.pattern, text, offset);
    const size_t begin = match ? match->begin : text.size();
    if (begin > offset) take(offset, begin, split.invert);
    if (!match) return;
    take(begin, match->end, !split.invert);
    offset = match->end;
  }
}

// A piece that what comes next may still be joined to.
class Joiner {
 public:
  Joiner(SplitBehavior behavior, const std::function<void(size_t, size_t)>& visit)
      : behavior_(behavior), visit_(visit) {}

  void take(size_t begin, size_t end, bool is_match) {
    if (has_piece_ && joins(is_match)) {
      end_ = end;
    } else {
      finish();
      begin_ = begin;
      end_ = end;
      has_piece_ = true;
    }
    is_match_ = is_match;
  }

  void finish() {
    if (has_piece_) visit_(begin_, end_);
    has_piece_ = false;
  }

 private:
  bool joins(bool is_match) const {
    if (behavior_ == SplitBehavior::kContiguous) return is_match == is_match_;
    if (behavior_ == SplitBehavior::kMergedWithPrevious) return is_match && !is_match_;
    return !is_match && is_match_;
  }

  SplitBehavior behavior_;
  const std::function<void(size_t, size_t)>& visit_;
  size_t begin_ = 0, end_ = 0;
  bool has_piece_ = false, is_match_ = false;  // is_match_: the last stretch of the piece
};

}  // namespace

SplitBehavior parse_split_behavior(const std::string& name, const std::string& where) {
  const auto* const found = std::find_if(kBehaviors.begin(), kBehaviors.end(),
                                         [&](const auto& entry) { return entry.first == name; });
  if (found == kBehaviors.end()) refuse_tokenizer("behavior '" + name + "'", where);
  return found->second;
}

void for_each_piece(const TextSplit& split, std::string_view text,
                    const std::function<void(size_t, size_t)>& visit) {
  if (split.behavior == SplitBehavior::kIsolated || split.behavior == SplitBehavior::kRemoved) {
    const bool keep = split.behavior == SplitBehavior::kIsolated;
    for_each_stretch(split, text, [&](size_t begin, size_t end, bool is_match) {
      if (keep || !is_match) visit(begin, end);
    });
    return;
  }
  Joiner joiner(split.behavior, visit);
  for_each_stretch(split, text, [&](size_t begin, size_t end, bool is_match) {
    joiner.take(begin, end, is_match);
  });
  joiner.finish();
}

}  // namespace oscar
