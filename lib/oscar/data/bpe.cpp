// Byte-pair encoding: lowest rank first, leftmost first among equals.
#include "oscar/data/bpe.h"

#include <queue>

#include "oscar/base/error.h"
#include "oscar/data/byte_alphabet.h"
#include "oscar/data/unicode.h"

namespace oscar {
namespace {

constexpr size_t kShortWord = 24;          // below this, scanning beats a queue
constexpr size_t kMaxKnownWord = 128;      // bytes of a word worth remembering
constexpr size_t kMaxKnownWords = 200000;  // bounds the memory of the cache

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

[[noreturn]] void malformed(const std::string& where, const std::string& expected,
                            const std::string& found) {
  throw Error(
      {.what = "malformed tokenizer file", .where = where, .expected = expected, .found = found});
}

}  // namespace

Bpe::Bpe(const TokenizerJson& model, const std::string& where) {
  const std::string type = model.is_object() && !model.contains("type") && model.contains("merges")
                               ? "BPE"
                               : type_of(model, where);
  if (type != "BPE") refuse_tokenizer("model '" + type + "'", where);
  check_keys(model,
             {"type", "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix",
              "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges"},
             where);
  for (const char* key : {"unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!is_unset(model, key)) refuse_tokenizer("model." + std::string(key), where);
  }
  const auto dropout = model.find("dropout");
  if (dropout != model.end() && !dropout->is_null() && *dropout != 0.0) {
    refuse_tokenizer("model.dropout", where);
  }
  if (bool_member(model, "byte_fallback", false, where)) {
    refuse_tokenizer("model.byte_fallback", where);
  }
  ignore_merges_ = bool_member(model, "ignore_merges", false, where);
  read_vocabulary(model, where);
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
    if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
    const auto place = ids_.emplace(token, id).first;
    const std::string*& holder = tokens_[static_cast<size_t>(id)];
    if (holder != nullptr) {
      malformed(where + ".vocab", "one token for each id",
                "id " + std::to_string(id) + " for '" + *holder + "' and '" + token + "'");
    }
    holder = &place->first;
    if (ignore_merges_) {
      if (auto bytes = bytes_of_characters(token)) whole_ids_.emplace(std::move(*bytes), id);
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    append_code_point(character_of_byte(static_cast<uint8_t>(byte)), character);
    const auto found = ids_.find(character);
    if (found == ids_.end()) {
      malformed(where + ".vocab", "a token for each of the 256 bytes",
                "none for byte " + std::to_string(byte) + " ('" + character + "')");
    }
    byte_ids_[static_cast<size_t>(byte)] = found->second;
  }
}

void Bpe::read_merges(const TokenizerJson& model, const std::string& where) {
  const auto merges = model.find("merges");
  if (merges == model.end() || !merges->is_array()) malformed(where + ".merges", "a list", "none");
  merges_.reserve(merges->size());
  int32_t rank = 0;
  for (const TokenizerJson& merge : *merges) {
    const std::string place = where + ".merges[" + std::to_string(rank) + "]";
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        malformed(place, "two tokens with one space between", text);
      }
      const std::string_view view = text;
      add_merge(view.substr(0, space), view.substr(space + 1), rank, place);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      add_merge(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>(),
                rank, place);
    } else {
      malformed(place, "a pair of tokens", merge.dump());
    }
    ++rank;
  }
}

void Bpe::add_merge(std::string_view left, std::string_view right, int32_t rank,
                    const std::string& where) {
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
  merges_.insert_or_assign(pair_key(ids[0], ids[1]), Merge{rank, ids[2]});
}

std::optional<int32_t> Bpe::token_id(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* Bpe::token(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) return nullptr;
  return tokens_[static_cast<size_t>(id)];
}

const Bpe::Merge* Bpe::merge_of(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::encode_word(std::string_view word, std::vector<int32_t>& ids) const {
  const auto known = known_words_.find(word);
  if (known != known_words_.end()) {
    ids.insert(ids.end(), known->second.begin(), known->second.end());
    return;
  }
  std::vector<int32_t> symbols;
  const auto whole = ignore_merges_ ? whole_ids_.find(word) : whole_ids_.end();
  if (whole != whole_ids_.end()) {
    symbols.push_back(whole->second);
  } else {
    symbols.reserve(word.size());
    for (const char byte : word) symbols.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
    if (symbols.size() <= kShortWord) {
      merge_short(symbols);
    } else {
      merge_long(symbols);
    }
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (word.size() <= kMaxKnownWord) {
    if (known_words_.size() >= kMaxKnownWords) known_words_.clear();
    known_words_.emplace(word, std::move(symbols));
  }
}

void Bpe::merge_short(std::vector<int32_t>& symbols) const {
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

void Bpe::merge_long(std::vector<int32_t>& symbols) const {
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

}  // namespace oscar
