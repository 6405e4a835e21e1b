// Models that read images and text: what of their config.json concerns text.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/model/checkpoint/families.h"

namespace oscar {

// Such a model runs as its text half does. Text passes through none of its other parts.
struct WholeModel {
  std::string_view architecture, model_type;
  std::span<const ModelFamily* const> texts;  // the first one where text_config names none
  // Keys beside text_config that say nothing of text.
  std::span<const std::string_view> keys;
  std::span<const std::string_view> other_parts;  // as of StoredNames
  bool tie_word_embeddings;                       // where neither config says it
};

// That of an architecture, or where that is empty of a model_type; null: it is none of those known.
const WholeModel* find_whole_model(std::string_view architecture, std::string_view model_type);
std::vector<std::string_view> whole_architectures();

// A config.json as that of the text half alone.
struct TextHalf {
  const ModelFamily& family;
  // text_config with what the whole says in its place: quantization, tokens that begin and end
  // text. tie_word_embeddings is true if either says so: the output matrix counts if it is stored.
  Json config;
  bool tie_is_stated;  // by one of them, and the other does not deny it
  ConfigKeys beside;   // keys of the whole that nothing above accounts for
};

// Throws Error naming `source` and the key where there is no text_config or one of a family that is
// not supported, and for two quantizations that differ.
TextHalf read_text_half(const Json& config, const WholeModel& whole, const std::string& source);

}  // namespace oscar
