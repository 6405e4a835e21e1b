// The pipeline of tokenizer.json: added tokens, normaliser, pre-tokenizer, BPE, post-processor.
#include "oscar/data/tokenizer.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/json_text.h"
#include "oscar/data/added_tokens.h"
#include "oscar/data/bpe.h"
#include "oscar/data/byte_alphabet.h"
#include "oscar/data/pre_tokenizer.h"
#include "oscar/data/tokenizer_json.h"
#include "oscar/data/unicode.h"

namespace oscar {
namespace {

// What the post-processor puts around the ids.
struct Frame {
  std::vector<int32_t> prefix, suffix;
};

const TokenizerJson& list_member(const TokenizerJson& object, const char* key,
                                 const std::string& where) {
  const auto list = object.find(key);
  if (list == object.end() || !list->is_array()) {
    throw Error(
        {.what = "malformed tokenizer file", .where = where + ": " + key, .expected = "a list"});
  }
  return *list;
}

// Whether the text is brought to NFC.
bool read_normalizer(const TokenizerJson& object, const std::string& where) {
  if (object.is_null()) return false;
  const std::string type = type_of(object, where);
  if (type == "NFC") {
    check_keys(object, {"type"}, where);
    return true;
  }
  if (type != "Sequence") refuse_tokenizer("normalizer '" + type + "'", where);
  check_keys(object, {"type", "normalizers"}, where);
  bool nfc = false;
  for (const TokenizerJson& part : list_member(object, "normalizers", where)) {
    nfc = read_normalizer(part, where) || nfc;
  }
  return nfc;
}

void check_decoder(const TokenizerJson& object, const std::string& where) {
  if (object.is_null()) refuse_tokenizer("a missing decoder", where);
  const std::string type = type_of(object, where);
  if (type == "ByteLevel") {
    check_keys(object, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where);
    return;
  }
  if (type != "Sequence") refuse_tokenizer("decoder '" + type + "'", where);
  check_keys(object, {"type", "decoders"}, where);
  const TokenizerJson& parts = list_member(object, "decoders", where);
  if (parts.size() != 1) refuse_tokenizer("a decoder sequence of several parts", where);
  check_decoder(parts[0], where);
}

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

Frame read_template(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "single", "pair", "special_tokens"}, where);
  const TokenizerJson tokens = object.value("special_tokens", TokenizerJson::object());
  Frame frame;
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
void read_post_processor(const TokenizerJson& object, const std::string& where, Frame& frame) {
  if (object.is_null()) return;
  const std::string type = type_of(object, where);
  if (type == "ByteLevel") {  // it moves offsets only
    check_keys(object, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where);
  } else if (type == "TemplateProcessing") {
    const Frame outer = read_template(object, where);
    frame.prefix.insert(frame.prefix.begin(), outer.prefix.begin(), outer.prefix.end());
    frame.suffix.insert(frame.suffix.end(), outer.suffix.begin(), outer.suffix.end());
  } else if (type == "Sequence") {
    check_keys(object, {"type", "processors"}, where);
    for (const TokenizerJson& part : list_member(object, "processors", where)) {
      read_post_processor(part, where, frame);
    }
  } else {
    refuse_tokenizer("post-processor '" + type + "'", where);
  }
}

TokenizerJson parse_tokenizer(const std::string& text, const std::string& source) {
  require_shallow_json(text, source);
  try {
    return TokenizerJson::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw Error({.what = "malformed JSON", .where = source, .found = json_problem(error, text)});
  }
}

}  // namespace

struct Tokenizer::Implementation {
  Implementation(const TokenizerJson& file, const std::string& source)
      : bpe(file.value("model", TokenizerJson()), source + ": model"),
        pre_tokenizer(read_pre_tokenizer(file.value("pre_tokenizer", TokenizerJson()),
                                         source + ": pre_tokenizer")),
        nfc(read_normalizer(file.value("normalizer", TokenizerJson()), source + ": normalizer")) {
    check_decoder(file.value("decoder", TokenizerJson()), source + ": decoder");
    read_post_processor(file.value("post_processor", TokenizerJson()), source + ": post_processor",
                        frame);
    add_tokens(
        read_added_tokens(file.value("added_tokens", TokenizerJson()), source + ": added_tokens"),
        source + ": added_tokens");
    vocab_size = bpe.largest_id() + 1;
    for (const auto& [content, id] : added_ids) vocab_size = std::max(vocab_size, id + 1);
    for (const auto* ids : {&frame.prefix, &frame.suffix}) {
      for (const int32_t id : *ids) {
        if (token(id) == nullptr) {
          throw Error({.what = "malformed tokenizer file",
                       .where = source + ": post_processor",
                       .expected = "ids of known tokens",
                       .found = std::to_string(id)});
        }
      }
    }
  }

  void add_tokens(const std::vector<AddedToken>& tokens, const std::string& where) {
    int32_t next_id = static_cast<int32_t>(bpe.num_tokens());
    for (const AddedToken& added : tokens) {
      // The library takes the vocabulary's id, or else the next free one, whatever the file says.
      const int32_t expected = bpe.token_id(added.content).value_or(next_id);
      if (added.id != expected) {
        throw Error({.what = "an added token has another id than the tokenizers library gives it",
                     .where = where + ": '" + added.content + "'",
                     .expected = std::to_string(expected),
                     .found = std::to_string(added.id)});
      }
      next_id = std::max(next_id, added.id + 1);
      added_ids.emplace(added.content, added.id);
      if (added.special) special_ids.insert(added.id);
      // Normalized tokens are found in normalised text, and decode to what was found.
      const std::string pattern =
          added.normalized && nfc ? normalize_nfc(added.content) : added.content;
      added_contents.emplace(added.id, pattern);
      (added.normalized ? normal_matcher : raw_matcher).add(pattern, added);
    }
  }

  const std::string* token(int32_t id) const {
    const auto found = added_contents.find(id);
    return found != added_contents.end() ? &found->second : bpe.token(id);
  }

  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
    const std::string normal = nfc ? normalize_nfc(piece) : std::string();
    if (nfc) piece = normal;
    normal_matcher.split(piece, [&](std::string_view text, int32_t id) {
      if (id >= 0) return ids.push_back(id);
      for_each_word(pre_tokenizer, text,
                    [&](std::string_view word) { bpe.encode_word(word, ids); });
    });
  }

  Bpe bpe;
  PreTokenizer pre_tokenizer;
  bool nfc;
  Frame frame;
  AddedTokenMatcher raw_matcher, normal_matcher;
  std::unordered_map<std::string, int32_t> added_ids;
  std::unordered_map<int32_t, std::string> added_contents;
  std::unordered_set<int32_t> special_ids;
  int32_t vocab_size = 0;
};

Tokenizer::Tokenizer(std::unique_ptr<Implementation> implementation)
    : implementation_(std::move(implementation)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::from_file(const std::filesystem::path& tokenizer_json) {
  return from_text(read_text_file(tokenizer_json), tokenizer_json.string());
}

Tokenizer Tokenizer::from_text(const std::string& tokenizer_json, const std::string& source) {
  const TokenizerJson file = parse_tokenizer(tokenizer_json, source);
  check_keys(file,
             {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
              "post_processor", "decoder", "model"},
             source);
  for (const char* key : {"truncation", "padding"}) {
    if (!is_unset(file, key)) refuse_tokenizer(key, source);
  }
  return Tokenizer(std::make_unique<Implementation>(file, source));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  require_valid_utf8(text, "text to tokenize");
  const Implementation& self = *implementation_;
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  if (add_special_tokens) ids = self.frame.prefix;
  self.raw_matcher.split(text, [&](std::string_view piece, int32_t id) {
    if (id >= 0) return ids.push_back(id);
    self.encode_piece(piece, ids);
  });
  if (add_special_tokens) {
    ids.insert(ids.end(), self.frame.suffix.begin(), self.frame.suffix.end());
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const {
  const Implementation& self = *implementation_;
  std::string bytes;
  for (const int32_t id : ids) {
    const std::string* token = self.token(id);
    if (token == nullptr || (skip_special_tokens && self.special_ids.count(id) > 0)) continue;
    bytes += bytes_of_characters(*token).value_or(*token);
  }
  return replace_invalid_utf8(bytes);
}

std::optional<int32_t> Tokenizer::token_id(std::string_view token) const {
  const auto found = implementation_->added_ids.find(std::string(token));
  if (found != implementation_->added_ids.end()) return found->second;
  return implementation_->bpe.token_id(token);
}

int32_t Tokenizer::vocab_size() const { return implementation_->vocab_size; }

}  // namespace oscar
