// JSON, read strictly and in linear time, and written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {

// JSON values, and reading them with errors that name the file and the key.

// Keys keep their order, so that what is written is stable and readable.
using Json = nlohmann::ordered_json;

// Reads a whole UTF-8 file. Throws Error when it cannot be read or is over max_bytes.
std::string read_text_file(const std::filesystem::path& path, size_t max_bytes = size_t{1} << 32);

// Parses `text`; `source` names the origin in errors. Throws Error with the byte position.
Json parse_json(std::string_view text, const std::string& source);

// read_text_file and parse_json in one.
Json read_json_file(const std::filesystem::path& path);

// JSON as text: a check before it is parsed, and the parser's message as users see it.

// Levels of arrays and objects. Files of models, corpora and reports have fewer than 16.
inline constexpr int kMaxJsonDepth = 256;

// Bytes of a JSON file. In memory its values take up to 49 times as many (a list of
// one-digit numbers, measured).
inline constexpr size_t kMaxJsonBytes = size_t{1} << 28;
// Of a config.json or a chat template, which published models have of some kilobytes.
inline constexpr size_t kMaxConfigBytes = size_t{1} << 22;

// Throws Error, naming `source` and the byte, where brackets outside strings are nested deeper than
// kMaxJsonDepth: copying and writing a value takes stack for every level, so that a file of
// brackets could end the program. Looks at nothing else of the text.
void require_shallow_json(std::string_view text, const std::string& source);

// A value as text; bytes that are no UTF-8, of a file's name for example, become U+FFFD. Indented
// over several lines with `indent` >= 0.
template <typename Value>
std::string json_text(const Value& value, int indent = -1) {
  return value.dump(indent, ' ', false, Value::error_handler_t::replace);
}

// The message of `error`, which the parser threw for `text`, without its "[json.exception. ...]".
// Of a text of one line "line 1, " is left out too: it may be any line of a JSONL file.
std::string json_problem(const std::exception& error, std::string_view text);

// JSON text to a value in time and memory that grow with the text, without a key twice.

// Receives what the parser reads and builds a `Value` (a specialisation of nlohmann's). The library
// compares each key with all before it where keys keep their order; here those of an object are
// compared once, sorted, at its end.
template <typename Value>
class StrictJsonBuilder {
 public:
  StrictJsonBuilder(std::string_view text, const std::string& source)
      : text_(text), source_(source) {}

  Value take() { return std::move(root_); }

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(typename Value::binary_t&) { return false; }  // not in text
  bool start_object(size_t) { return begin(true); }
  bool start_array(size_t) { return begin(false); }
  bool key(std::string& name) {
    open_.back().members.emplace_back(std::move(name), Value());
    return true;
  }
  bool end_array() {
    typename Value::array_t elements;
    elements.reserve(open_.back().members.size());
    for (auto& member : open_.back().members) elements.push_back(std::move(member.second));
    return end(Value(std::move(elements)));
  }
  bool end_object() {
    auto& members = open_.back().members;
    refuse_repeated(members);
    typename Value::object_t object;
    if constexpr (requires { object.reserve(1); }) {  // a vector: keys keep their order
      object.reserve(members.size());
      for (auto& [name, value] : members) object.emplace_back(std::move(name), std::move(value));
    } else {
      for (auto& [name, value] : members) object.emplace(std::move(name), std::move(value));
    }
    return end(Value(std::move(object)));
  }
  template <typename Problem>
  bool parse_error(size_t, const std::string&, const Problem& problem) {
    throw Error(
        {.what = "malformed JSON", .where = source_, .found = json_problem(problem, text_)});
  }

 private:
  using Members = std::vector<std::pair<std::string, Value>>;  // names are empty in arrays
  struct Open {
    bool is_object = false;
    Members members;
  };

  bool begin(bool is_object) {
    open_.push_back({is_object, {}});
    return true;
  }
  bool end(Value value) {
    open_.pop_back();
    return add(std::move(value));
  }
  template <typename T>
  bool add(T&& value) {
    if (open_.empty()) {
      root_ = std::forward<T>(value);
    } else if (open_.back().is_object) {
      open_.back().members.back().second = std::forward<T>(value);
    } else {
      open_.back().members.emplace_back(std::string(), std::forward<T>(value));
    }
    return true;
  }
  void refuse_repeated(const Members& members) const {
    std::vector<std::string_view> names;
    names.reserve(members.size());
    for (const auto& member : members) names.push_back(member.first);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice == names.end()) return;
    throw Error({.what = "a JSON key occurs twice",
                 .where = source_,
                 .found = std::string(*twice),
                 .hint = "which of them counts would be a guess; fetch or write the file again"});
  }

  std::string_view text_;
  const std::string& source_;
  Value root_;
  std::vector<Open> open_;
};

// Throws Error, naming `source`, for text that is no JSON, has a key twice in one object, or is
// nested too deeply.
template <typename Value>
Value parse_strict_json(std::string_view text, const std::string& source) {
  require_shallow_json(text, source);
  StrictJsonBuilder<Value> builder(text, source);
  Value::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace oscar
