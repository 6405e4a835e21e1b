// A tokenizer in a GGUF file, as tokenizer.json would say it.
#include "oscar/model/checkpoint/gguf_tokenizer.h"

#include <fmt/format.h>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <unordered_map>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"

namespace oscar {

// Tables of the metadata to the parts of tokenizer.json.

namespace {

// Sorted keys: an object that keeps their order is searched linearly.
using TokenizerJson = nlohmann::json;

std::string ggml_key(const std::string& name) { return "tokenizer.ggml." + name; }

[[noreturn]] void refuse(const GgufFile& file, const std::string& key, const std::string& what,
                         const std::string& expected = "", const std::string& found = "") {
  throw Error(
      {.what = what,
       .where = fmt::format("{}: {}", file.path().string(), ggml_key(key)),
       .expected = expected,
       .found = found,
       .hint = "tokenize elsewhere, pass ids as .npy (python -m oscar_int2 prepare-corpus)"});
}

// tokenizer.ggml.token_type.
enum TokenType {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct Tokens {
  std::vector<std::string_view> texts;
  std::vector<int64_t> types;  // as many
  std::unordered_map<std::string_view, int64_t> ids;
};

Tokens read_tokens(const GgufFile& file) {
  constexpr size_t kMaxTokens = size_t{1} << 24;
  Tokens tokens;
  tokens.texts = *file.texts(ggml_key("tokens"));
  if (tokens.texts.empty() || tokens.texts.size() > kMaxTokens) {
    refuse(file, "tokens", "the number of tokens is impossible", fmt::format("1 to {}", kMaxTokens),
           std::to_string(tokens.texts.size()));
  }
  tokens.types = file.integers(ggml_key("token_type"))
                     .value_or(std::vector<int64_t>(tokens.texts.size(), kNormal));
  if (tokens.types.size() != tokens.texts.size()) {
    refuse(file, "token_type", "not one type for each token", std::to_string(tokens.texts.size()),
           std::to_string(tokens.types.size()));
  }
  for (size_t i = 0; i < tokens.texts.size(); ++i) {
    if (tokens.types[i] < kNormal || tokens.types[i] > kByte) {
      refuse(file, "token_type", "unknown type of a token", "1 to 6",
             fmt::format("{} for token {}", tokens.types[i], i));
    }
    if (tokens.types[i] == kUnused) continue;
    const auto [place, is_new] = tokens.ids.emplace(tokens.texts[i], static_cast<int64_t>(i));
    if (!is_new || tokens.texts[i].empty()) {
      refuse(file, "tokens", "a token is empty or there twice", "",
             fmt::format("tokens {} and {}", place->second, i));
    }
  }
  return tokens;
}

TokenizerJson vocabulary(const Tokens& tokens) {
  TokenizerJson vocabulary = TokenizerJson::object();
  for (const auto& [text, id] : tokens.ids) vocabulary[std::string(text)] = id;
  return vocabulary;
}

// Tokens that are looked for in the text before anything else.
TokenizerJson added_tokens(const Tokens& tokens) {
  TokenizerJson list = TokenizerJson::array();
  for (size_t i = 0; i < tokens.texts.size(); ++i) {
    const bool special = tokens.types[i] == kControl || tokens.types[i] == kUnknown;
    if (!special && tokens.types[i] != kUserDefined) continue;
    list.push_back({{"id", i},
                    {"content", std::string(tokens.texts[i])},
                    {"single_word", false},
                    {"lstrip", false},
                    {"rstrip", false},
                    {"normalized", false},
                    {"special", special}});
  }
  return list;
}

std::string token_named_by(const GgufFile& file, const Tokens& tokens, const char* key,
                           std::optional<int64_t> fallback = std::nullopt) {
  const auto id = file.integer(ggml_key(key));
  const int64_t value = id.value_or(fallback.value_or(-1));
  if (value < 0 || static_cast<size_t>(value) >= tokens.texts.size()) {
    refuse(file, key, "no token has this id", fmt::format("0 to {}", tokens.texts.size() - 1),
           id ? std::to_string(value) : "nothing");
  }
  return std::string(tokens.texts[static_cast<size_t>(value)]);
}

// BOS in front and EOS behind, as the file asks for.
TokenizerJson post_processor(const GgufFile& file, const Tokens& tokens, bool bos_by_default) {
  const bool bos = file.flag(ggml_key("add_bos_token")).value_or(bos_by_default);
  const bool eos = file.flag(ggml_key("add_eos_token")).value_or(false);
  if (!bos && !eos) return nullptr;
  TokenizerJson single = TokenizerJson::array(), pair = TokenizerJson::array();
  TokenizerJson specials = TokenizerJson::object();
  const auto add_special = [&](const char* key) {
    const std::string text = token_named_by(file, tokens, key);
    const TokenizerJson part = {{"SpecialToken", {{"id", text}, {"type_id", 0}}}};
    single.push_back(part);
    pair.push_back(part);
    specials[text] = {{"id", text}, {"ids", {*file.integer(ggml_key(key))}}, {"tokens", {text}}};
  };
  if (bos) add_special("bos_token_id");
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  pair.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
  if (eos) add_special("eos_token_id");
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", pair},
          {"special_tokens", specials}};
}

// How a name in tokenizer.ggml.pre cuts text before BPE, and what else it stands for.
struct PreTokenizer {
  std::span<const std::string_view> names;
  std::span<const std::string_view> patterns;  // one Split after another; empty: ByteLevel's own
  bool single_digits;                          // before anything else
  bool nfc, ignore_merges, bos;
};

// In front of a quote, Llama 3 and Qwen2 differ in how many digits make a word.
#define OSCAR_WORD_PATTERN(DIGITS)                                   \
  R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)" DIGITS \
  R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"
constexpr std::string_view kLlama3Patterns[] = {OSCAR_WORD_PATTERN(R"(\p{N}{1,3})")};
constexpr std::string_view kQwen2Patterns[] = {OSCAR_WORD_PATTERN(R"(\p{N})")};
#undef OSCAR_WORD_PATTERN
constexpr std::string_view kTekkenPatterns[] = {
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
    R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};
constexpr std::string_view kDefaultPatterns[] = {
    R"([\p{P}\$\+<=>\^~\|]+)",
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))", R"(\p{N}+)",
    "[0-9][0-9][0-9]"};

constexpr std::string_view kLlama3Names[] = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe"};
constexpr std::string_view kQwen2Names[] = {"qwen2", "deepseek-r1-qwen"};
constexpr std::string_view kTekkenNames[] = {"tekken"};
constexpr std::string_view kSmolNames[] = {"smollm", "starcoder", "refact"};
constexpr std::string_view kGpt2Names[] = {"gpt-2"};
constexpr std::string_view kDefaultNames[] = {"default"};

constexpr PreTokenizer kPreTokenizers[] = {
    {kLlama3Names, kLlama3Patterns, false, false, true, true},
    {kQwen2Names, kQwen2Patterns, false, true, false, false},
    {kTekkenNames, kTekkenPatterns, false, false, true, true},
    {kSmolNames, {}, true, false, false, false},
    {kGpt2Names, {}, false, false, false, false},
    {kDefaultNames, kDefaultPatterns, false, false, false, false},
};

const PreTokenizer& find_pre_tokenizer(const GgufFile& file) {
  const std::string_view name = file.text(ggml_key("pre")).value_or("");
  std::string known;
  for (const PreTokenizer& row : kPreTokenizers) {
    if (std::find(row.names.begin(), row.names.end(), name) != row.names.end()) return row;
    for (const std::string_view other : row.names) {
      known += (known.empty() ? "" : ", ") + std::string(other);
    }
  }
  refuse(file, "pre", "this pre-tokenizer is not implemented", known,
         name.empty() ? "nothing" : std::string(name));
}

TokenizerJson pre_tokenizer_json(const PreTokenizer& row) {
  TokenizerJson steps = TokenizerJson::array();
  if (row.single_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  for (const std::string_view pattern : row.patterns) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", std::string(pattern)}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back({{"type", "ByteLevel"},
                   {"add_prefix_space", false},
                   {"trim_offsets", false},
                   {"use_regex", row.patterns.empty()}});
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

TokenizerJson model_json(const Tokens& tokens, TokenizerJson merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", vocabulary(tokens)},
          {"merges", std::move(merges)}};
}

TokenizerJson byte_level_json(const GgufFile& file, const Tokens& tokens) {
  const PreTokenizer& row = find_pre_tokenizer(file);
  const auto merges = file.texts(ggml_key("merges"));
  if (!merges) refuse(file, "merges", "a table of the tokenizer is missing", "an array of strings");
  TokenizerJson list = TokenizerJson::array();
  for (const std::string_view merge : *merges) list.push_back(std::string(merge));
  TokenizerJson json;
  json["model"] = model_json(tokens, std::move(list));
  json["model"]["ignore_merges"] = row.ignore_merges;
  json["normalizer"] = row.nfc ? TokenizerJson{{"type", "NFC"}} : TokenizerJson();
  json["pre_tokenizer"] = pre_tokenizer_json(row);
  json["post_processor"] = post_processor(file, tokens, row.bos);
  json["decoder"] = {{"type", "ByteLevel"},
                     {"add_prefix_space", true},
                     {"trim_offsets", true},
                     {"use_regex", true}};
  return json;
}

// Every way to make a token of two others, the highest score first; of one token, its longest left
// part first.
TokenizerJson merges_by_score(const GgufFile& file, const Tokens& tokens) {
  constexpr size_t kMaxTokenBytes = 256;  // trying all parts takes the square of it
  constexpr size_t kMaxMerges = size_t{1} << 22;
  const auto scores = file.floats(ggml_key("scores"));
  if (!scores || scores->size() != tokens.texts.size()) {
    refuse(file, "scores", "not one score for each token", std::to_string(tokens.texts.size()),
           scores ? std::to_string(scores->size()) : "nothing");
  }
  const auto is_normal = [&](std::string_view text) {
    const auto found = tokens.ids.find(text);
    return found != tokens.ids.end() && tokens.types[static_cast<size_t>(found->second)] == kNormal;
  };
  std::vector<size_t> order;
  for (size_t i = 0; i < tokens.texts.size(); ++i) {
    if (tokens.types[i] != kNormal) continue;
    if (!((*scores)[i] == (*scores)[i])) refuse(file, "scores", "a score is not a number");
    if (tokens.texts[i].size() > kMaxTokenBytes) {
      refuse(file, "tokens", "a token is longer than this program accepts",
             fmt::format("{} bytes", kMaxTokenBytes), fmt::format("token {}", i));
    }
    order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return (*scores)[a] > (*scores)[b]; });
  TokenizerJson merges = TokenizerJson::array();
  for (const size_t i : order) {
    const std::string_view text = tokens.texts[i];
    for (size_t cut = text.size(); cut-- > 1;) {
      const std::string_view left = text.substr(0, cut), right = text.substr(cut);
      if (is_normal(left) && is_normal(right)) {
        merges.push_back({std::string(left), std::string(right)});
        if (merges.size() > kMaxMerges) refuse(file, "tokens", "too many tokens spell each other");
      }
    }
  }
  return merges;
}

TokenizerJson replace_json(const char* from, const char* to) {
  return {{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
}

TokenizerJson score_json(const GgufFile& file, const Tokens& tokens) {
  const char* const space = "\u2581";
  if (file.flag(ggml_key("remove_extra_whitespaces")).value_or(false)) {
    refuse(file, "remove_extra_whitespaces", "joining spaces is not implemented");
  }
  if (file.has(ggml_key("precompiled_charsmap"))) {
    refuse(file, "precompiled_charsmap", "a table of characters to replace is not implemented");
  }
  TokenizerJson steps = TokenizerJson::array();
  if (file.flag(ggml_key("add_space_prefix")).value_or(true)) {
    steps.push_back({{"type", "Prepend"}, {"prepend", space}});
  }
  steps.push_back(replace_json(" ", space));
  TokenizerJson json;
  json["model"] = model_json(tokens, merges_by_score(file, tokens));
  json["model"]["unk_token"] = token_named_by(file, tokens, "unknown_token_id", 0);
  json["model"]["fuse_unk"] = json["model"]["byte_fallback"] = true;
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
  json["pre_tokenizer"] = nullptr;
  json["post_processor"] = post_processor(file, tokens, true);
  json["decoder"] = {{"type", "Sequence"},
                     {"decoders",
                      {replace_json(space, " "),
                       {{"type", "ByteFallback"}},
                       {{"type", "Fuse"}},
                       {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  return json;
}

}  // namespace

std::optional<std::string> gguf_tokenizer_json(const GgufFile& file) {
  if (const auto whole = file.text("tokenizer.huggingface.json")) return std::string(*whole);
  if (!file.has(ggml_key("tokens"))) return std::nullopt;
  const std::string_view model = file.text(ggml_key("model")).value_or("");
  if (model != "gpt2" && model != "llama") {
    refuse(file, "model", "this tokenizer is not implemented", "gpt2 or llama",
           model.empty() ? "nothing" : std::string(model));
  }
  const Tokens tokens = read_tokens(file);
  TokenizerJson json = model == "gpt2" ? byte_level_json(file, tokens) : score_json(file, tokens);
  json["version"] = "1.0";
  json["truncation"] = json["padding"] = nullptr;
  json["added_tokens"] = added_tokens(tokens);
  try {
    return json.dump();
  } catch (const nlohmann::json::exception& error) {
    refuse(file, "tokens", "a token is not valid UTF-8", "", error.what());
  }
}

std::string gguf_tokenizer_sha256(const GgufFile& file) {
  if (!file.has(ggml_key("tokens"))) return "";
  Sha256 digest;
  for (const std::string& key : file.keys()) {
    if (!key.starts_with("tokenizer.") || key.starts_with(kGgufChatTemplate)) continue;
    const std::string_view value = file.raw(key);
    digest.update(fmt::format("{}\n{}\n", key, value.size()));
    digest.update(value);
  }
  return digest.finish();
}

}  // namespace oscar
