// The pipeline of tokenizer.json: added tokens, normaliser, pre-tokenizer, BPE, post-processor.
#include "oscar/text/tokenizer.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/text/bpe.h"
#include "oscar/text/pre_tokenizer.h"
#include "oscar/text/unicode.h"

namespace oscar {
namespace {

// Whether the decoder is ByteLevel, alone or as a Sequence of one.
bool decodes_bytes(const TokenizerJson& object) {
  if (!object.is_object()) return false;
  const std::string type = object.value("type", TokenizerJson()).dump();
  if (type == "\"ByteLevel\"") return true;
  const TokenizerJson parts = object.value("decoders", TokenizerJson());
  return type == "\"Sequence\"" && parts.is_array() && parts.size() == 1 && decodes_bytes(parts[0]);
}

}  // namespace

struct Tokenizer::Implementation {
  Implementation(const TokenizerJson& file, const std::string& source)
      : normalizer(read_normalizer(member(file, "normalizer"), source + ": normalizer")),
        words(member(file, "pre_tokenizer"), member(file, "model"), source),
        post_processor(
            read_post_processor(member(file, "post_processor"), source + ": post_processor")),
        can_decode(decodes_bytes(member(file, "decoder"))) {
    if (words.pre_tokenizer().looks_for_text_begin && !normalizer.steps.empty()) {
      // What begins the text is then told by where it was before.
      refuse_tokenizer("prepend_scheme 'first' behind a normalizer", source + ": pre_tokenizer");
    }
    add_tokens(read_added_tokens(member(file, "added_tokens"), source + ": added_tokens"),
               source + ": added_tokens");
    vocab_size = words.bpe().largest_id() + 1;
    for (const auto& [content, id] : added_ids) vocab_size = std::max(vocab_size, id + 1);
    for (const auto* ids : {&post_processor.prefix, &post_processor.suffix}) {
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

  static const TokenizerJson& member(const TokenizerJson& file, const char* key) {
    static const TokenizerJson kNull;
    const auto found = file.find(key);
    return found == file.end() ? kNull : *found;
  }

  void add_tokens(const std::vector<AddedToken>& tokens, const std::string& where) {
    int32_t next_id = static_cast<int32_t>(words.bpe().num_tokens());
    for (const AddedToken& added : tokens) {
      // The library takes the vocabulary's id, or else the next free one, whatever the file says.
      const int32_t expected = words.bpe().token_id(added.content).value_or(next_id);
      if (added.id != expected) {
        throw Error({.what = "an added token has another id than the tokenizers library gives it",
                     .where = where + ": '" + added.content + "'",
                     .expected = std::to_string(expected),
                     .found = std::to_string(added.id)});
      }
      next_id = std::max(next_id, added.id + 1);
      added_ids.emplace(added.content, added.id);
      if (added.special) special_ids.insert(added.id);
    }
    // Of tokens that normalisation makes equal, the library finds special ones first.
    for (const bool special : {true, false}) {
      for (const AddedToken& added : tokens) {
        if (added.special != special) continue;
        // Normalized tokens are found in normalised text, and decode to what was found.
        const std::string pattern =
            added.normalized ? normalize(normalizer, added.content) : added.content;
        added_contents.emplace(added.id, pattern);
        (added.normalized ? normal_matcher : raw_matcher).add(pattern, added);
      }
    }
  }

  const std::string* token(int32_t id) const {
    const auto found = added_contents.find(id);
    return found != added_contents.end() ? &found->second : words.bpe().token(id);
  }

  // Returns the bytes that no token stands for.
  int64_t encode_piece(std::string_view piece, bool begins_text, std::vector<int32_t>& ids) const {
    std::string normal;
    if (!normalizer.steps.empty()) piece = normal = normalize(normalizer, piece);
    int64_t lost = 0;
    normal_matcher.split(piece, [&](std::string_view text, int32_t id) {
      if (id >= 0) return ids.push_back(id);
      lost += words.encode(text, begins_text && text.data() == piece.data(), ids);
    });
    return lost;
  }

  Normalizer normalizer;
  WordEncoder words;
  PostProcessor post_processor;
  bool can_decode;
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
  const std::string source = tokenizer_json.string();
  return from_json(parse_tokenizer_json(read_text_file(tokenizer_json, kMaxJsonBytes), source),
                   source);
}

Tokenizer Tokenizer::from_json(const TokenizerJson& document, const std::string& source) {
  check_keys(document,
             {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
              "post_processor", "decoder", "model"},
             source);
  // Truncation and padding are left alone: those who call a tokenizer ask for them, as in
  // transformers.
  return Tokenizer(std::make_unique<Implementation>(document, source));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens,
                                       int64_t* lost_bytes) const {
  require_valid_utf8(text, "text to tokenize");
  const Implementation& self = *implementation_;
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  if (add_special_tokens) ids = self.post_processor.prefix;
  int64_t lost = 0;
  self.raw_matcher.split(text, [&](std::string_view piece, int32_t id) {
    if (id >= 0) return ids.push_back(id);
    lost += self.encode_piece(piece, piece.data() == text.data(), ids);
  });
  if (lost_bytes != nullptr) *lost_bytes += lost;
  if (add_special_tokens) {
    const auto& suffix = self.post_processor.suffix;
    ids.insert(ids.end(), suffix.begin(), suffix.end());
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const {
  const Implementation& self = *implementation_;
  if (!self.can_decode) refuse_tokenizer("a decoder that is not ByteLevel", "decoder");
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
  return implementation_->words.bpe().token_id(token);
}

int32_t Tokenizer::vocab_size() const { return implementation_->vocab_size; }

}  // namespace oscar
