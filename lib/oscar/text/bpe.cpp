// Byte pair encoding of a word.
#include "oscar/text/bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <queue>

#include "oscar/base/error.h"
#include "oscar/text/unicode.h"

namespace oscar {

// Both directions of the byte alphabet as small tables.

namespace {

constexpr int kCharacters = 256 + 68;  // 68 bytes have no printable character of their own

struct Alphabet {
  std::array<char32_t, 256> of_byte{};
  std::array<int, kCharacters> of_character{};  // -1: stands for no byte
};

constexpr bool is_printable(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  for (int& byte : alphabet.of_character) byte = -1;
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const char32_t character = is_printable(byte) ? static_cast<char32_t>(byte) : next++;
    alphabet.of_byte[static_cast<size_t>(byte)] = character;
    alphabet.of_character[character] = byte;
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

char32_t character_of_byte(uint8_t byte) { return kAlphabet.of_byte[byte]; }

std::string characters_of_bytes(std::string_view bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char byte : bytes)
    append_code_point(character_of_byte(static_cast<uint8_t>(byte)), text);
  return text;
}

std::optional<std::string> bytes_of_characters(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t offset = 0; offset < text.size();) {
    const char32_t character = next_code_point(text, offset);
    if (character >= kCharacters || kAlphabet.of_character[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet.of_character[character]);
  }
  return bytes;
}

// Merging: few symbols by looking at all pairs each time, many through a queue.

namespace {

constexpr size_t kShortWord = 24;         // up to here, scanning beats a queue
constexpr char32_t kLowCharacters = 512;  // Latin, and all that byte-level BPE writes

uint64_t pair_key(uint32_t left, uint32_t right) {
  return (static_cast<uint64_t>(left) << 32) | right;
}

uint64_t pair_key(int32_t left, int32_t right) {
  return pair_key(static_cast<uint32_t>(left), static_cast<uint32_t>(right));
}

}  // namespace

MergeTable::MergeTable(size_t num_merges)
    : places_(std::bit_ceil(2 * num_merges + 1)),
      low_joins_(size_t{kLowCharacters} * kLowCharacters) {}

MergeTable::Place& MergeTable::place_of(uint64_t pair) {
  size_t at = PairHash()(pair);
  while (true) {
    Place& place = places_[at++ & (places_.size() - 1)];
    if (place.pair == pair || place.pair == kNoPair) return place;
  }
}

void MergeTable::add(int32_t left, std::string_view left_text, int32_t right,
                     std::string_view right_text, int32_t merged) {
  const uint64_t pair = pair_key(left, right);
  place_of(pair) = {pair, {next_rank_++, merged}};
  size_t offset = previous_begin(left_text, left_text.size());
  const char32_t last = next_code_point(left_text, offset);
  offset = 0;
  const char32_t first = next_code_point(right_text, offset);
  if (last < kLowCharacters && first < kLowCharacters) {
    low_joins_[last * kLowCharacters + first] = true;
  } else {
    other_joins_.insert(pair_key(static_cast<uint32_t>(last), static_cast<uint32_t>(first)));
  }
}

bool MergeTable::joins(char32_t left, char32_t right) const {
  if (left < kLowCharacters && right < kLowCharacters) {
    return low_joins_[left * kLowCharacters + right];
  }
  return other_joins_.count(pair_key(static_cast<uint32_t>(left), static_cast<uint32_t>(right))) >
         0;
}

const MergeTable::Merge* MergeTable::merge_of(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  size_t at = PairHash()(pair);
  while (true) {
    const Place& place = places_[at++ & (places_.size() - 1)];
    if (place.pair == pair) return &place.merge;
    if (place.pair == kNoPair) return nullptr;
  }
}

void MergeTable::apply(std::vector<int32_t>& symbols) const {
  if (symbols.size() <= kShortWord) {
    apply_short(symbols);
  } else {
    apply_long(symbols);
  }
}

void MergeTable::apply_short(std::vector<int32_t>& symbols) const {
  std::array<const Merge*, kShortWord> merges{};
  for (size_t i = 0; i + 1 < symbols.size(); ++i) merges[i] = merge_of(symbols[i], symbols[i + 1]);
  while (symbols.size() > 1) {
    size_t best = symbols.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      if (merges[i] != nullptr &&
          (best == symbols.size() || merges[i]->rank < merges[best]->rank)) {
        best = i;
      }
    }
    if (best == symbols.size()) return;
    symbols[best] = merges[best]->id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    for (size_t i = best + 1; i + 1 < symbols.size(); ++i) merges[i] = merges[i + 1];
    if (best > 0) merges[best - 1] = merge_of(symbols[best - 1], symbols[best]);
    if (best + 1 < symbols.size()) merges[best] = merge_of(symbols[best], symbols[best + 1]);
  }
}

void MergeTable::apply_long(std::vector<int32_t>& symbols) const {
  struct Candidate {
    int32_t rank;
    size_t left;
    int32_t left_id, right_id;
    bool operator<(const Candidate& other) const {  // the queue gives the greatest first
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  constexpr int32_t kGone = -1;
  const size_t size = symbols.size();
  std::vector<size_t> next(size), previous(size);
  std::priority_queue<Candidate> queue;
  const auto offer = [&](size_t left, size_t right) {
    if (const Merge* merge = merge_of(symbols[left], symbols[right])) {
      queue.push({merge->rank, left, symbols[left], symbols[right]});
    }
  };
  for (size_t i = 0; i < size; ++i) {
    next[i] = i + 1;
    previous[i] = i == 0 ? size : i - 1;
    if (i + 1 < size) offer(i, i + 1);
  }
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const size_t left = top.left, right = next[left];
    // Neighbours have changed since this candidate was offered: it is no longer there.
    if (symbols[left] != top.left_id || right == size || symbols[right] != top.right_id) continue;
    symbols[left] = merge_of(top.left_id, top.right_id)->id;
    symbols[right] = kGone;
    next[left] = next[right];
    if (next[left] != size) previous[next[left]] = left;
    if (previous[left] != size) offer(previous[left], left);
    if (next[left] != size) offer(left, next[left]);
  }
  size_t kept = 0;
  for (size_t i = 0; i < size; i = next[i]) symbols[kept++] = symbols[i];
  symbols.resize(kept);
}

// Reading the model, and words to symbols.

namespace {

[[noreturn]] void malformed(const std::string& where, const std::string& expected,
                            const std::string& found) {
  throw Error(
      {.what = "malformed tokenizer file", .where = where, .expected = expected, .found = found});
}

std::string byte_token(int byte) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  return std::string("<0x") + kDigits[static_cast<size_t>(byte) >> 4] +
         kDigits[static_cast<size_t>(byte) & 0xF] + ">";
}

}  // namespace

Bpe::CharacterIds::CharacterIds() : pages_(0x110000 >> 8, 0), ids_(0x100, -1) {}

void Bpe::CharacterIds::set(char32_t character, int32_t id) {
  uint16_t& page = pages_[character >> 8];
  if (page == 0) {
    page = static_cast<uint16_t>(ids_.size() >> 8);
    ids_.resize(ids_.size() + 0x100, -1);
  }
  ids_[size_t{page} << 8 | (character & 0xFF)] = id;
}

Bpe::Bpe(const TokenizerJson& model, WordKind kind, const std::string& where) : kind_(kind) {
  const std::string type = model.is_object() && !model.contains("type") && model.contains("merges")
                               ? "BPE"
                               : type_of(model, where);
  if (type != "BPE") refuse_tokenizer("model '" + type + "'", where);
  check_keys(model,
             {"type", "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix",
              "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges"},
             where);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!is_unset(model, key)) refuse_tokenizer("model." + std::string(key), where);
  }
  const auto dropout = model.find("dropout");
  if (dropout != model.end() && !dropout->is_null() && *dropout != 0.0) {
    refuse_tokenizer("model.dropout", where);
  }
  ignore_merges_ = bool_member(model, "ignore_merges", false, where);
  read_vocabulary(model, where);
  read_unknown(model, where);
  read_merges(model, where);
}

void Bpe::read_vocabulary(const TokenizerJson& model, const std::string& where) {
  const auto vocabulary = model.find("vocab");
  if (vocabulary == model.end() || !vocabulary->is_object() || vocabulary->empty()) {
    malformed(where + ".vocab", "an object of tokens and ids", "none");
  }
  ids_.reserve(vocabulary->size());
  for (const auto& [token, value] : vocabulary->items()) {
    const int32_t id = token_id_value(value, where + ".vocab: " + token);
    tokens_.push_back({id, &ids_.emplace(token, id).first->first});
    size_t end = 0;
    const char32_t first = token.empty() ? 0 : next_code_point(token, end);
    if (!token.empty() && end == token.size()) character_ids_.set(first, id);
    if (!ignore_merges_) continue;
    if (kind_ != WordKind::kBytes) {
      whole_ids_.emplace(token, id);
    } else if (auto bytes = bytes_of_characters(token)) {
      whole_ids_.emplace(std::move(*bytes), id);
    }
  }
  std::ranges::stable_sort(tokens_, {}, &Token::id);
  const auto twice = std::ranges::adjacent_find(tokens_, {}, &Token::id);
  if (twice != tokens_.end()) {
    malformed(where + ".vocab", "one token for each id",
              "id " + std::to_string(twice->id) + " for '" + *twice->text + "' and '" +
                  *std::next(twice)->text + "'");
  }
}

Bpe::Stand Bpe::stand(const std::string& token) const {
  Stand stand;
  const auto id = token_id(token);
  if (!id || token.empty()) return stand;
  size_t offset = 0, last = previous_begin(token, token.size());
  stand.id = *id;
  stand.first = next_code_point(token, offset);
  stand.last = next_code_point(token, last);
  return stand;
}

void Bpe::read_unknown(const TokenizerJson& model, const std::string& where) {
  byte_fallback_ = bool_member(model, "byte_fallback", false, where);
  fuse_unknown_ = bool_member(model, "fuse_unk", false, where);
  bool has_all_bytes = true;
  for (int byte = 0; byte < 256; ++byte) {
    Stand& entry = byte_stands_[static_cast<size_t>(byte)];
    entry = stand(byte_token(byte));
    has_all_bytes = has_all_bytes && entry.id >= 0;
  }
  if (is_unset(model, "unk_token")) return;
  unknown_token_ = string_member(model, "unk_token", where);
  unknown_ = stand(*unknown_token_);
  // The library then moves an unknown token behind bytes that come later: nothing can be cut.
  cuts_words_ = !byte_fallback_ || has_all_bytes;
}

void Bpe::read_merges(const TokenizerJson& model, const std::string& where) {
  const auto merges = model.find("merges");
  if (merges == model.end() || !merges->is_array()) malformed(where + ".merges", "a list", "none");
  merges_ = MergeTable(merges->size());
  size_t index = 0;
  for (const TokenizerJson& merge : *merges) {
    const std::string place = where + ".merges[" + std::to_string(index++) + "]";
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        malformed(place, "two tokens with one space between", text);
      }
      const std::string_view view = text;
      add_merge(view.substr(0, space), view.substr(space + 1), place);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      add_merge(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>(),
                place);
    } else {
      malformed(place, "a pair of tokens", merge.dump());
    }
  }
}

void Bpe::add_merge(std::string_view left, std::string_view right, const std::string& where) {
  // An empty side would make a merge that changes nothing, for ever.
  if (left.empty() || right.empty()) malformed(where, "two tokens", "an empty one");
  const std::string whole = std::string(left) + std::string(right);
  std::array<int32_t, 3> ids{};
  const std::array<std::string_view, 3> tokens = {left, right, whole};
  for (size_t i = 0; i < 3; ++i) {
    const auto id = token_id(tokens[i]);
    if (!id) malformed(where, "tokens of the vocabulary", "'" + std::string(tokens[i]) + "'");
    ids[i] = *id;
  }
  merges_.add(ids[0], left, ids[1], right, ids[2]);
}

std::optional<int32_t> Bpe::token_id(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* Bpe::token(int32_t id) const {
  const auto token = std::ranges::lower_bound(tokens_, id, {}, &Token::id);
  return token != tokens_.end() && token->id == id ? token->text : nullptr;
}

// A word is merged in runs: it is cut where no merge joins what stands on both sides, so that a
// document without spaces, as SentencePiece's vocabularies have it, is no word of a megabyte.
class Bpe::Encoding {
 public:
  Encoding(const Bpe& bpe, std::string_view word, std::vector<int32_t>& ids)
      : bpe_(bpe), word_(word), ids_(ids) {
    // A run that could be a token by itself must not be taken for a word.
    cuts_ = bpe.cuts_words_ && !bpe.ignore_merges_ && word.size() > KnownTexts::kMaxSize;
  }

  int64_t run() {
    for (size_t offset = 0; offset < word_.size();) {
      const size_t begin = offset;
      const char32_t character = next_character(offset);
      const int32_t id = bpe_.character_ids_[character];
      if (id >= 0) {
        write_unknown();
        push({id, character, character}, begin);
      } else if (!push_bytes(character, begin)) {
        take_unknown(character, begin, offset - begin);
      }
    }
    write_unknown();
    end_run(word_.size());
    return lost_;
  }

 private:
  char32_t next_character(size_t& offset) const {
    if (bpe_.kind_ != WordKind::kBytes) return next_code_point(word_, offset);
    return character_of_byte(static_cast<uint8_t>(word_[offset++]));
  }

  void push(const Stand& symbol, size_t begin) {
    if (cuts_ && begin > begin_ && !bpe_.merges_.joins(last_, symbol.first)) end_run(begin);
    symbols_.push_back(symbol.id);
    last_ = symbol.last;
  }

  bool push_bytes(char32_t character, size_t begin) {
    if (!bpe_.byte_fallback_) return false;
    std::string bytes;
    append_code_point(character, bytes);
    const auto symbol = [this](char byte) -> const Stand& {
      return bpe_.byte_stands_[static_cast<uint8_t>(byte)];
    };
    for (const char byte : bytes) {
      if (symbol(byte).id < 0) return false;
    }
    push(symbol(bytes[0]), begin);
    for (size_t i = 1; i < bytes.size(); ++i) {  // never cut inside the character
      symbols_.push_back(symbol(bytes[i]).id);
      last_ = symbol(bytes[i]).last;
    }
    return true;
  }

  void take_unknown(char32_t character, size_t begin, size_t size) {
    if (!bpe_.unknown_token_) {
      run_lost_ += bpe_.kind_ == WordKind::kText ? static_cast<int64_t>(size) : 1;
      return;
    }
    if (bpe_.unknown_.id < 0) {
      std::string text;
      append_code_point(character, text);
      throw Error({.what = "tokenizer has no token for '" + text +
                           "', and its unk_token is not in the vocabulary",
                   .where = "unk_token '" + *bpe_.unknown_token_ + "'"});
    }
    if (has_unknown_ && bpe_.fuse_unknown_) return;
    write_unknown();
    has_unknown_ = true;
    unknown_begin_ = begin;
  }

  void write_unknown() {
    if (has_unknown_) push(bpe_.unknown_, unknown_begin_);
    has_unknown_ = false;
  }

  void end_run(size_t end) {
    const std::string_view text = word_.substr(begin_, end - begin_);
    const KnownTexts::Ids* known = cuts_ ? bpe_.known_.find(text) : nullptr;
    if (known != nullptr) {
      ids_.insert(ids_.end(), known->ids.begin(), known->ids.end());
    } else {
      bpe_.merges_.apply(symbols_);
      ids_.insert(ids_.end(), symbols_.begin(), symbols_.end());
      bpe_.known_.add(text, symbols_, run_lost_);
    }
    lost_ += run_lost_;
    run_lost_ = 0;
    symbols_.clear();
    begin_ = end;
  }

  const Bpe& bpe_;
  std::string_view word_;
  std::vector<int32_t>& ids_;
  bool cuts_ = false;
  // The run: where it begins, its symbols, the last one's last character.
  size_t begin_ = 0;
  std::vector<int32_t> symbols_;
  char32_t last_ = 0;
  int64_t run_lost_ = 0, lost_ = 0;
  // An unknown token that the next one may be fused with.
  bool has_unknown_ = false;
  size_t unknown_begin_ = 0;
};

int64_t Bpe::encode_word(std::string_view word, std::vector<int32_t>& ids) const {
  if (const KnownTexts::Ids* encoded = known_.find(word)) {
    ids.insert(ids.end(), encoded->ids.begin(), encoded->ids.end());
    return encoded->lost;
  }
  const auto whole = ignore_merges_ ? whole_ids_.find(word) : whole_ids_.end();
  if (whole != whole_ids_.end()) {
    ids.push_back(whole->second);
    known_.add(word, {whole->second}, 0);
    return 0;
  }
  return Encoding(*this, word, ids).run();
}

// Steps one inside the other. With several of them, a piece that one step has cut is mostly a word
// that was there before: what the steps behind it and BPE made of it is remembered.

namespace {

WordKind word_kind(const PreTokenizer& pre_tokenizer) {
  if (pre_tokenizer.words_are_bytes) return WordKind::kBytes;
  const auto& steps = pre_tokenizer.steps;
  return std::any_of(steps.begin(), steps.end(),
                     [](const PreTokenizerStep& step) { return step.to_byte_alphabet; })
             ? WordKind::kByteCharacters
             : WordKind::kText;
}

}  // namespace

WordEncoder::WordEncoder(const TokenizerJson& pre_tokenizer, const TokenizerJson& model,
                         const std::string& source)
    : pre_tokenizer_(read_pre_tokenizer(pre_tokenizer, source + ": pre_tokenizer")),
      bpe_(model, word_kind(pre_tokenizer_), source + ": model"),
      known_(pre_tokenizer_.steps.size()) {}

int64_t WordEncoder::encode(std::string_view text, bool begins_text,
                            std::vector<int32_t>& ids) const {
  return text.empty() ? 0 : run_step(0, text, begins_text, ids);
}

int64_t WordEncoder::steps_from(size_t index, std::string_view text, bool begins_text,
                                std::vector<int32_t>& ids) const {
  // A last step that does not cut leaves words, which BPE remembers itself.
  const size_t size = pre_tokenizer_.steps.size();
  const bool is_word = index == size || (index + 1 == size && !pre_tokenizer_.steps[index].split);
  if (is_word || begins_text) return run_step(index, text, begins_text, ids);
  if (const KnownTexts::Ids* known = known_[index].find(text)) {
    ids.insert(ids.end(), known->ids.begin(), known->ids.end());
    return known->lost;
  }
  const size_t begin = ids.size();
  const int64_t lost = run_step(index, text, begins_text, ids);
  known_[index].add(text, {ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end()}, lost);
  return lost;
}

int64_t WordEncoder::run_step(size_t index, std::string_view text, bool begins_text,
                              std::vector<int32_t>& ids) const {
  if (index == pre_tokenizer_.steps.size()) return bpe_.encode_word(text, ids);
  const PreTokenizerStep& step = pre_tokenizer_.steps[index];
  std::string changed;
  text = change_piece(step, text, begins_text, changed);
  const auto encode_piece = [&](std::string_view piece, bool begins) {
    if (!step.to_byte_alphabet) return steps_from(index + 1, piece, begins, ids);
    return steps_from(index + 1, characters_of_bytes(piece), begins, ids);
  };
  if (!step.split) return encode_piece(text, begins_text);
  int64_t lost = 0;
  for_each_piece(*step.split, text, [&](size_t begin, size_t end) {
    lost += encode_piece(text.substr(begin, end - begin), begins_text && begin == 0);
  });
  return lost;
}

}  // namespace oscar
