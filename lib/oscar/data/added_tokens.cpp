// A byte trie of added tokens, and the rules for the white space and words around them.
#include "oscar/data/added_tokens.h"

#include <algorithm>
#include <set>

#include "oscar/base/error.h"
#include "oscar/data/unicode.h"

namespace oscar {
namespace {

// \w of Unicode (UTS 18, annex C), which PCRE2's own \w is not.
constexpr const char* kWordCharacter = R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}])";

}  // namespace

std::vector<AddedToken> read_added_tokens(const TokenizerJson& list, const std::string& where) {
  std::vector<AddedToken> tokens;
  if (list.is_null()) return tokens;
  if (!list.is_array()) {
    throw Error({.what = "malformed tokenizer file", .where = where, .expected = "a list"});
  }
  std::set<std::string> contents;
  std::set<int32_t> ids;
  for (const TokenizerJson& entry : list) {
    const std::string place = where + "[" + std::to_string(tokens.size()) + "]";
    check_keys(entry, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"},
               place);
    AddedToken token;
    token.content = string_member(entry, "content", place);
    token.id = token_id_value(entry.value("id", TokenizerJson()), place + ".id");
    token.special = bool_member(entry, "special", false, place);
    token.normalized = bool_member(entry, "normalized", !token.special, place);
    token.lstrip = bool_member(entry, "lstrip", false, place);
    token.rstrip = bool_member(entry, "rstrip", false, place);
    token.single_word = bool_member(entry, "single_word", false, place);
    if (token.content.empty() || !contents.insert(token.content).second ||
        !ids.insert(token.id).second) {
      throw Error({.what = "malformed tokenizer file",
                   .where = place,
                   .expected = "a content and an id of its own",
                   .found = "'" + token.content + "', id " + std::to_string(token.id)});
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

AddedTokenMatcher::AddedTokenMatcher() : nodes_(1), word_(kWordCharacter, "added tokens") {}

void AddedTokenMatcher::add(std::string_view pattern, const AddedToken& token) {
  size_t node = 0;
  for (const char byte : pattern) {
    const auto [place, is_new] = nodes_[node].children.try_emplace(byte, nodes_.size());
    const size_t child = place->second;
    if (is_new) nodes_.emplace_back();  // moves nodes_: `place` is not used below
    node = child;
  }
  if (node == 0 || nodes_[node].token >= 0) return;
  begins_token_[static_cast<uint8_t>(pattern.front())] = true;
  nodes_[node].token = static_cast<int>(tokens_.size());
  tokens_.push_back(token);
}

int AddedTokenMatcher::longest_at(std::string_view text, size_t offset, size_t& end) const {
  int token = -1;
  const Node* node = nodes_.data();
  while (offset < text.size()) {
    const auto child = node->children.find(text[offset]);
    if (child == node->children.end()) break;
    node = &nodes_[child->second];
    ++offset;
    if (node->token >= 0) {
      token = node->token;
      end = offset;
    }
  }
  return token;
}

bool AddedTokenMatcher::stands_alone(std::string_view text, size_t begin, size_t end) const {
  const auto is_word_at = [&](size_t offset) {
    size_t next = offset;
    next_code_point(text, next);
    return word_.find(text.substr(offset, next - offset), 0).has_value();
  };
  return (begin == 0 || !is_word_at(previous_begin(text, begin))) &&
         (end == text.size() || !is_word_at(end));
}

void AddedTokenMatcher::split(std::string_view text,
                              const std::function<void(std::string_view, int32_t)>& visit) const {
  if (tokens_.empty()) {
    if (!text.empty()) visit(text, -1);
    return;
  }
  size_t done = 0;
  for (size_t offset = 0; offset < text.size();) {
    size_t begin = offset, end = 0;
    const int index =
        begins_token_[static_cast<uint8_t>(text[offset])] ? longest_at(text, offset, end) : -1;
    if (index < 0) {
      ++offset;
      continue;
    }
    // The search goes on behind the content, even when the token is discarded or takes more.
    offset = end;
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    if (token.single_word && !stands_alone(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(white_space_begin(text, begin), done);
    if (token.rstrip) end = white_space_end(text, end);
    if (done < begin) visit(text.substr(done, begin - done), -1);
    visit(text.substr(begin, end - begin), token.id);
    done = end;
  }
  if (done < text.size()) visit(text.substr(done), -1);
}

}  // namespace oscar
