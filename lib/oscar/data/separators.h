// Tokens that end documents and turns, and texts with more of them inside than they came with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/data/added_tokens.h"

namespace oscar {

// The checkpoint's `eos_token_ids`, then those of the tokenizer's `added` tokens that published
// families end documents and turns with; each once. Below `vocab_size`.
std::vector<int32_t> separator_tokens(const std::vector<int32_t>& eos_token_ids,
                                      const std::vector<AddedToken>& added, int32_t vocab_size);

// Text with separators put in has one in some 576 tokens.
inline constexpr int64_t kTokensOfASeparator = 1024;

// Whether fewer than one token in kTokensOfASeparator is one of `ids`: fewer than would be put in.
bool is_rare(const std::vector<std::vector<int32_t>>& sequences, const std::vector<int32_t>& ids);

// Tokens of all sequences that are one of `ids`.
int64_t count_tokens(const std::vector<std::vector<int32_t>>& sequences,
                     const std::vector<int32_t>& ids);

// Every `gap`-th token of each sequence, from index `gap` on, replaced by `separators` in turn.
// Preconditions: gap > 0, separators not empty.
std::vector<std::vector<int32_t>> with_separators(std::vector<std::vector<int32_t>> sequences,
                                                  const std::vector<int32_t>& separators,
                                                  int64_t gap);

// As packed documents and chats have them: in every second sequence, from the second on, tokens at
// random gaps of kShortestGap to kLongestGap are replaced by `separators` in turn. Seeded. Says
// what was done, for the record.
inline constexpr int64_t kShortestGap = 64, kLongestGap = 512;
std::string sprinkle_separators(std::vector<std::vector<int32_t>>& sequences,
                                const std::vector<int32_t>& separators, uint64_t seed);

}  // namespace oscar
