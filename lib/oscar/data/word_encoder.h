// Text to words, and words to ids: pre-tokenizer and BPE together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "oscar/data/bpe.h"
#include "oscar/data/pre_tokenizer.h"

namespace oscar {

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
