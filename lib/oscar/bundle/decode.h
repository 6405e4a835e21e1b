// A bundle's file to structs, with every check.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"

namespace oscar {

// Attributes of one group or dataset of a file as fields of our structs, each checked.

// Positions are ints where rows are turned.
inline constexpr int64_t kMostPositions = INT32_MAX;

// Throws Error about `object`, a path within the file.
[[noreturn]] void refuse_object(const RawFile& raw, const std::string& object,
                                const std::string& what, const std::string& expected = "",
                                const std::string& found = "", const std::string& hint = "");

// A visitor of schema.h. Throws Error, naming the attribute, where it is missing, or has a wrong
// type or an impossible value.
struct AttributeReader {
  const RawFile& raw;
  std::string object;
  bool layer = false;  // of a layer: some attributes may be absent

  std::string label(const char* name) const { return object + " attribute " + name; }

  // Null for an attribute that may be absent and is: its field then keeps its value.
  template <typename T>
  const T* find(const char* name, const char* type) const {
    const auto group = raw.attributes.find(object);
    if (group != raw.attributes.end()) {
      if (const auto stored = group->second.find(name); stored != group->second.end()) {
        const T* value = std::get_if<T>(&stored->second);
        if (value == nullptr) refuse_object(raw, label(name), "attribute has a wrong type", type);
        return value;
      }
    }
    const bool optional =
        std::find(schema::kOptionalAttributes.begin(), schema::kOptionalAttributes.end(),
                  std::string_view(name)) != schema::kOptionalAttributes.end() ||
        (layer && std::any_of(schema::kOptionalLayerAttributes.begin(),
                              schema::kOptionalLayerAttributes.end(),
                              [name](const char* other) { return std::string(other) == name; }));
    if (!optional) refuse_object(raw, label(name), "required attribute is missing", type);
    return nullptr;
  }

  // The JSON in a text, null where that may be absent and is. Throws Error when it is none.
  Json json(const char* name) const;

  void operator()(const char* name, std::string& value) const;
  void operator()(const char* name, Json& value) const { value = json(name); }
  void operator()(const char* name, AttentionKind& value) const;
  // A choice of the codec, by its word.
  template <typename Choice>
  requires requires(const std::string& word, Choice& choice) { parse_codec_word(word, choice); }
  void operator()(const char* name, Choice& value) const {
    std::string word = codec_word(value);
    (*this)(name, word);
    if (!parse_codec_word(word, value)) {
      refuse_object(raw, label(name), "quantizer setting is not supported", "a word of this codec",
                    word);
    }
  }
  void operator()(const char* name, std::vector<CorpusSource>& sources) const;
  template <typename Integer>
  requires std::is_integral_v<Integer>
  void operator()(const char* name, Integer& value) const {
    const int64_t* stored = find<int64_t>(name, "a 64-bit integer");
    if (stored == nullptr) return;
    const bool fits = std::is_same_v<Integer, uint64_t> ||
                      (*stored >= static_cast<int64_t>(std::numeric_limits<Integer>::min()) &&
                       *stored <= static_cast<int64_t>(std::numeric_limits<Integer>::max()));
    if (!fits) {
      refuse_object(raw, label(name), "attribute is out of range", "", std::to_string(*stored));
    }
    value = static_cast<Integer>(*stored);
  }
};

// A JSON list of texts; empty when `object` has no such attribute.
std::vector<std::string> text_list(const RawFile& raw, const std::string& object, const char* name);

// Every check of a bundle as a list of findings, for reports that should not stop at the first.

struct Finding {
  bool ok = true;
  std::string check;   // what was looked at
  std::string detail;  // figures when ok, the error's text when not
};

// Reads `path` (bundle, statistics file or checkpoint) and checks, in this order: the file itself
// (hostile content, checksums), format and features, content_sha256, names, shapes, dtypes and
// finiteness, then each layer's numbers. A check that needs an earlier one is left out when that
// failed. Throws nothing for a bad file.
std::vector<Finding> verify_bundle(const std::filesystem::path& path);

}  // namespace oscar
