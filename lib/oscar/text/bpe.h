// Byte pair encoding of a word.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "oscar/text/corpus.h"
#include "oscar/text/pre_tokenizer.h"

namespace oscar {

// The printable character that byte-level BPE writes for each byte (Radford et al., GPT-2).

// The character of `byte`: itself when printable in Latin-1, otherwise the next free one from
// U+0100 on, in byte order.
char32_t character_of_byte(uint8_t byte);

// Every byte of `bytes` as its character.
std::string characters_of_bytes(std::string_view bytes);

// Bytes that valid UTF-8 `text` stands for, or nothing when a character stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view text);

// The merges of a byte-pair encoding: pairs of symbols, what each becomes, and which comes first.

class MergeTable {
 public:
  explicit MergeTable(size_t num_merges = 0);

  // The next merge, at most `num_merges` in all, of the tokens with these ids and texts (valid
  // UTF-8, not empty). Of equal pairs the last counts.
  void add(int32_t left, std::string_view left_text, int32_t right, std::string_view right_text,
           int32_t merged);

  // Merges neighbours until no merge is left: the earliest added first, the leftmost among equals.
  // n log n.
  void apply(std::vector<int32_t>& symbols) const;

  // Whether a merge joins a token that ends with character `left` to one that begins with `right`.
  // Where none does, text can be cut in two: what is merged on one side never depends on the other.
  bool joins(char32_t left, char32_t right) const;

 private:
  struct Merge {
    int32_t rank, id;
  };
  struct PairHash {
    size_t operator()(uint64_t pair) const {
      pair *= 0x9E3779B97F4A7C15ULL;
      return static_cast<size_t>(pair ^ (pair >> 32));
    }
  };

  // Open addressing over a power of two of places, at most half of them taken.
  struct Place {
    uint64_t pair = kNoPair;
    Merge merge;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};

  Place& place_of(uint64_t pair);
  const Merge* merge_of(int32_t left, int32_t right) const;
  void apply_short(std::vector<int32_t>& symbols) const;
  void apply_long(std::vector<int32_t>& symbols) const;

  std::vector<Place> places_;
  int32_t next_rank_ = 0;
  std::vector<bool> low_joins_;  // by pairs of the first characters of Unicode
  std::unordered_set<uint64_t, PairHash> other_joins_;
};

// Byte-pair encoding of one word (Sennrich et al. 2016) with the ranks of a trained vocabulary.

// What words are made of.
enum class WordKind {
  kText,            // characters of the vocabulary
  kBytes,           // any bytes; the vocabulary has them in the characters of byte_alphabet.h
  kByteCharacters,  // those characters
};

class Bpe {
 public:
  // Reads "model" of tokenizer.json. Throws Error for settings that are not implemented, a
  // vocabulary that is missing or gives an id twice, and merges of unknown or empty tokens.
  Bpe(const TokenizerJson& model, WordKind kind, const std::string& where);

  // Appends the ids of `word`, which is valid UTF-8 unless words are bytes. A character without a
  // token becomes the tokens of its bytes (byte_fallback), else unk_token, else nothing: returns
  // the number of bytes that nothing stands for. n log n in the word's length. One thread at a
  // time: words are remembered.
  int64_t encode_word(std::string_view word, std::vector<int32_t>& ids) const;

  std::optional<int32_t> token_id(std::string_view token) const;
  const std::string* token(int32_t id) const;  // null when no token has this id
  size_t num_tokens() const { return ids_.size(); }
  int32_t largest_id() const { return tokens_.back().id; }

 private:
  // Ids of characters, in pages that exist only where there are some.
  class CharacterIds {
   public:
    CharacterIds();
    void set(char32_t character, int32_t id);
    int32_t operator[](char32_t character) const {  // -1: no token
      return ids_[size_t{pages_[character >> 8]} << 8 | (character & 0xFF)];
    }

   private:
    std::vector<uint16_t> pages_;  // page 0 is that of characters without an id
    std::vector<int32_t> ids_;
  };
  // What characters without a token of their own become, and its first and last character.
  struct Stand {
    int32_t id = -1;
    char32_t first = 0, last = 0;
  };
  struct Token {
    int32_t id = 0;
    const std::string* text = nullptr;  // in ids_
  };
  class Encoding;  // of one word

  void read_vocabulary(const TokenizerJson& model, const std::string& where);
  void read_unknown(const TokenizerJson& model, const std::string& where);
  void read_merges(const TokenizerJson& model, const std::string& where);
  void add_merge(std::string_view left, std::string_view right, const std::string& where);
  Stand stand(const std::string& token) const;

  WordKind kind_;
  ByText<int32_t> ids_;        // by the token's text in the file
  ByText<int32_t> whole_ids_;  // by what a word would be; filled when ignore_merges is set
  std::vector<Token> tokens_;  // by id: ids may be far apart
  CharacterIds character_ids_;
  MergeTable merges_;
  bool ignore_merges_ = false, byte_fallback_ = false, fuse_unknown_ = false;
  bool cuts_words_ = true;
  std::array<Stand, 256> byte_stands_{};
  std::optional<std::string> unknown_token_;
  Stand unknown_;
  mutable KnownTexts known_;
};

// Text to words, and words to ids: pre-tokenizer and BPE together.

// One thread at a time: what pieces became is remembered.
class WordEncoder {
 public:
  // Reads "pre_tokenizer" and "model" of tokenizer.json. Throws Error as their readers do.
  WordEncoder(const TokenizerJson& pre_tokenizer, const TokenizerJson& model,
              const std::string& source);

  // Appends the ids of normalised `text`, valid UTF-8; `begins_text`: nothing is in front of it.
  // Returns the bytes that no token stands for.
  int64_t encode(std::string_view text, bool begins_text, std::vector<int32_t>& ids) const;

  const Bpe& bpe() const { return bpe_; }
  const PreTokenizer& pre_tokenizer() const { return pre_tokenizer_; }

 private:
  int64_t steps_from(size_t index, std::string_view text, bool begins_text,
                     std::vector<int32_t>& ids) const;
  int64_t run_step(size_t index, std::string_view text, bool begins_text,
                   std::vector<int32_t>& ids) const;

  PreTokenizer pre_tokenizer_;
  Bpe bpe_;
  mutable std::vector<KnownTexts> known_;  // by the step that would come next
};

}  // namespace oscar
