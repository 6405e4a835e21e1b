// Checked access to tokenizer.json.
#include "oscar/data/tokenizer_json.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/base/strict_json.h"

namespace oscar {
namespace {

constexpr int64_t kMaxTokenId = int64_t{1} << 24;  // bounds tables that are indexed by id

}  // namespace

TokenizerJson parse_tokenizer_json(const std::string& text, const std::string& source) {
  return parse_strict_json<TokenizerJson>(text, source);
}

void refuse_tokenizer(const std::string& component, const std::string& where) {
  throw Error({.what = "tokenizer uses something that is not implemented: " + component,
               .where = where,
               .hint = "tokenize elsewhere, pass ids as .npy (scripts/prepare_corpus.py)"});
}

void check_keys(const TokenizerJson& object, std::initializer_list<std::string_view> known,
                const std::string& where) {
  if (!object.is_object()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where,
                 .expected = "a JSON object",
                 .found = object.type_name()});
  }
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      refuse_tokenizer("key '" + key + "'", where);
    }
  }
}

std::string type_of(const TokenizerJson& object, const std::string& where) {
  return string_member(object, "type", where);
}

bool bool_member(const TokenizerJson& object, const char* key, bool fallback,
                 const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return fallback;
  if (!found->is_boolean()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": " + key,
                 .expected = "true or false",
                 .found = found->type_name()});
  }
  return found->get<bool>();
}

std::string string_member(const TokenizerJson& object, const char* key, const std::string& where) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (found == object.end() || !found->is_string()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": " + key,
                 .expected = "a string",
                 .found = found == object.end() ? "nothing" : found->type_name()});
  }
  return found->get<std::string>();
}

const TokenizerJson& list_member(const TokenizerJson& object, const char* key,
                                 const std::string& where) {
  const auto list = object.find(key);
  if (list == object.end() || !list->is_array()) {
    throw Error(
        {.what = "malformed tokenizer file", .where = where + ": " + key, .expected = "a list"});
  }
  return *list;
}

int token_id_value(const TokenizerJson& value, const std::string& where) {
  // A document in memory may have it as either kind of integer.
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() < uint64_t{kMaxTokenId}
                        : value.is_number_integer() && value.get<int64_t>() >= 0 &&
                              value.get<int64_t>() < kMaxTokenId;
  if (!fits) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where,
                 .expected = "a token id from 0 to " + std::to_string(kMaxTokenId - 1),
                 .found = value.dump()});
  }
  return value.get<int>();
}

bool is_unset(const TokenizerJson& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ||
         (found->is_string() && found->get_ref<const std::string&>().empty());
}

}  // namespace oscar
