// Byte-pair encoding of one word (Sennrich et al. 2016) with the ranks of a trained vocabulary.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/data/known_texts.h"
#include "oscar/data/merge_table.h"
#include "oscar/data/tokenizer_json.h"

namespace oscar {

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

}  // namespace oscar
