// Added tokens: contents that are cut out of the text before anything else looks at it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/data/regex.h"
#include "oscar/data/tokenizer_json.h"

namespace oscar {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;                 // left out when decoding without special tokens
  bool normalized = false;              // looked for after normalisation, else before
  bool lstrip = false, rstrip = false;  // takes the white space on that side with it
  bool single_word = false;             // only between characters that are no word characters
};

// Throws Error for malformed entries, empty contents and contents or ids given twice.
std::vector<AddedToken> read_added_tokens(const TokenizerJson& list, const std::string& where);

// Finds tokens in text: leftmost first, the longest at one place, never overlapping.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher();
  // `pattern` is what to look for: the content, normalised for normalized tokens. Of equal
  // patterns the first counts.
  void add(std::string_view pattern, const AddedToken& token);

  // Calls visit(piece, id) along the text: id >= 0 for a token (white space it took included),
  // -1 for text between tokens, never empty.
  void split(std::string_view text,
             const std::function<void(std::string_view piece, int32_t id)>& visit) const;

 private:
  struct Node {
    std::map<char, size_t> children;
    int token = -1;  // index of the token that ends here
  };
  // Index of the longest token that begins at `offset`, and its end; -1 if none.
  int longest_at(std::string_view text, size_t offset, size_t& end) const;
  bool stands_alone(std::string_view text, size_t begin, size_t end) const;

  std::array<bool, 256> begins_token_{};  // by the first byte
  std::vector<Node> nodes_;
  std::vector<AddedToken> tokens_;
  Regex word_;
};

}  // namespace oscar
