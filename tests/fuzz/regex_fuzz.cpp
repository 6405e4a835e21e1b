// Patterns of tokenizer.json: a pattern, then a NUL and text to be cut.
#include "fuzz_case.h"
#include "oscar/text/pre_tokenizer.h"
#include "oscar/text/regex.h"
#include "oscar/text/unicode.h"

namespace oscar::fuzz {

// The engine's own memory for matching is bounded, and larger than any input here.
const MemoryBound kMemoryBound{.fixed = size_t{64} << 20, .per_byte = 1024};

void read_untrusted(std::string_view bytes) {
  const auto [pattern, behind] = cut_at_nul(bytes);
  require_valid_utf8(pattern, "input");
  const std::string translated = pattern_for_pcre2(pattern, "input");
  const std::string text = replace_invalid_utf8(behind.substr(0, 512));
  const auto begins_character = [&text](size_t at) {
    return at == text.size() || (static_cast<uint8_t>(text[at]) & 0xC0) != 0x80;
  };
  for (const auto behavior :
       {SplitBehavior::kRemoved, SplitBehavior::kIsolated, SplitBehavior::kMergedWithPrevious,
        SplitBehavior::kMergedWithNext, SplitBehavior::kContiguous}) {
    const TextSplit split{.pattern = Regex(translated, "input"), .behavior = behavior};
    size_t end = 0;
    for_each_piece(split, text, [&](size_t begin, size_t piece_end) {
      require(begin >= end && piece_end > begin && piece_end <= text.size(),
              "pieces overlap or are empty");
      require(begin == end || behavior == SplitBehavior::kRemoved, "text between pieces is lost");
      require(begins_character(begin) && begins_character(piece_end), "a piece cuts a character");
      end = piece_end;
    });
    require(end == text.size() || behavior == SplitBehavior::kRemoved, "the text's end is lost");
  }
}

}  // namespace oscar::fuzz
