// Reading templates.
#include "oscar/data/post_processor.h"

#include "oscar/base/error.h"

namespace oscar {
namespace {

void append_special(const TokenizerJson& tokens, const TokenizerJson& part,
                    const std::string& where, std::vector<int32_t>& ids) {
  const std::string name = string_member(part, "id", where);
  const auto token = tokens.find(name);
  if (token == tokens.end() || !token->is_object()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": special_tokens",
                 .expected = "an entry for '" + name + "'"});
  }
  for (const TokenizerJson& id : list_member(*token, "ids", where)) {
    ids.push_back(token_id_value(id, where + ": special_tokens " + name));
  }
}

PostProcessor read_template(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "single", "pair", "special_tokens"}, where);
  const TokenizerJson tokens = object.value("special_tokens", TokenizerJson::object());
  PostProcessor frame;
  int sequences = 0;
  for (const TokenizerJson& part : list_member(object, "single", where)) {
    check_keys(part, {"SpecialToken", "Sequence"}, where);
    if (part.contains("Sequence")) {
      ++sequences;
    } else {
      append_special(tokens, part.value("SpecialToken", TokenizerJson()), where,
                     sequences == 0 ? frame.prefix : frame.suffix);
    }
  }
  if (sequences != 1) refuse_tokenizer("a template without exactly one sequence", where);
  return frame;
}

// Adds the ids of one processor around those of the ones before it.
void read_processor(const TokenizerJson& object, const std::string& where, PostProcessor& frame) {
  const std::string type = type_of(object, where);
  if (type == "ByteLevel") {  // it moves offsets only
    check_keys(object, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where);
  } else if (type == "TemplateProcessing") {
    const PostProcessor outer = read_template(object, where);
    frame.prefix.insert(frame.prefix.begin(), outer.prefix.begin(), outer.prefix.end());
    frame.suffix.insert(frame.suffix.end(), outer.suffix.begin(), outer.suffix.end());
  } else if (type == "Sequence") {
    check_keys(object, {"type", "processors"}, where);
    for (const TokenizerJson& part : list_member(object, "processors", where)) {
      read_processor(part, where, frame);
    }
  } else {
    refuse_tokenizer("post-processor '" + type + "'", where);
  }
}

}  // namespace

PostProcessor read_post_processor(const TokenizerJson& object, const std::string& where) {
  PostProcessor processor;
  if (!object.is_null()) read_processor(object, where, processor);
  return processor;
}

}  // namespace oscar
