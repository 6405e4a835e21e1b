// Cutting text at what a pattern finds, in the five ways of the `tokenizers` library.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "oscar/data/text_pattern.h"

namespace oscar {

// What becomes of matches.
enum class SplitBehavior {
  kRemoved,
  kIsolated,            // each is a piece
  kMergedWithPrevious,  // joined to the text before it, unless that is a match
  kMergedWithNext,      // joined to the text behind it, unless that is a match
  kContiguous,          // matches side by side are one piece
};

// Throws Error naming a behaviour that does not exist.
SplitBehavior parse_split_behavior(const std::string& name, const std::string& where);

struct TextSplit {
  TextPattern pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what lies between matches counts as match, and matches as text
};

// Calls visit(begin, end) for the pieces of valid UTF-8 `text`, in order, none empty.
void for_each_piece(const TextSplit& split, std::string_view text,
                    const std::function<void(size_t begin, size_t end)>& visit);

}  // namespace oscar
