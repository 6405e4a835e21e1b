// Byte-pair encoding of one word (Sennrich et al. 2016) with the ranks of a trained vocabulary.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "oscar/data/tokenizer_json.h"

namespace oscar {

class Bpe {
 public:
  // Reads "model" of tokenizer.json. Throws Error for settings that are not implemented, a
  // vocabulary that is missing, lacks one of the 256 byte tokens or gives an id twice, and merges
  // of unknown or empty tokens.
  Bpe(const TokenizerJson& model, const std::string& where);

  // Appends the ids of `word`, any bytes. n log n in its length. One thread at a time: words are
  // remembered.
  void encode_word(std::string_view word, std::vector<int32_t>& ids) const;

  std::optional<int32_t> token_id(std::string_view token) const;
  const std::string* token(int32_t id) const;  // null when no token has this id
  size_t num_tokens() const { return ids_.size(); }
  int32_t largest_id() const { return static_cast<int32_t>(tokens_.size()) - 1; }

 private:
  struct Merge {
    int32_t rank, id;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  struct PairHash {
    size_t operator()(uint64_t pair) const {
      pair *= 0x9E3779B97F4A7C15ULL;
      return pair ^ (pair >> 32);
    }
  };
  template <typename Value>
  using ByText = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

  void read_vocabulary(const TokenizerJson& model, const std::string& where);
  void read_merges(const TokenizerJson& model, const std::string& where);
  void add_merge(std::string_view left, std::string_view right, int32_t rank,
                 const std::string& where);
  const Merge* merge_of(int32_t left, int32_t right) const;
  void merge_short(std::vector<int32_t>& symbols) const;
  void merge_long(std::vector<int32_t>& symbols) const;

  ByText<int32_t> ids_;        // by the token's text in the file
  ByText<int32_t> whole_ids_;  // by the token's bytes; filled when ignore_merges is set
  std::vector<const std::string*> tokens_;
  std::array<int32_t, 256> byte_ids_{};
  std::unordered_map<uint64_t, Merge, PairHash> merges_;
  bool ignore_merges_ = false;
  mutable ByText<std::vector<int32_t>> known_words_;
};

}  // namespace oscar
