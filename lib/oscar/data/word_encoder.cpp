// Steps one inside the other. With several of them, a piece that one step has cut is mostly a word
// that was there before: what the steps behind it and BPE made of it is remembered.
#include "oscar/data/word_encoder.h"

#include <algorithm>

#include "oscar/data/byte_alphabet.h"

namespace oscar {
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
