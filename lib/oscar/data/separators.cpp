// The names that families give to their separators.
#include "oscar/data/separators.h"

#include <algorithm>
#include <array>
#include <cassert>

#include "oscar/data/document_order.h"

namespace oscar {
namespace {

// Ends of documents, then of turns: GPT-2 and Qwen, Llama 2 and Mistral, Llama 3, Gemma; ChatML,
// Llama 3, Gemma.
constexpr std::array kNames = {"<|endoftext|>", "</s>",       "<|end_of_text|>", "<eos>",
                               "<|im_end|>",    "<|eot_id|>", "<end_of_turn>"};

}  // namespace

std::vector<int32_t> separator_tokens(const std::vector<int32_t>& eos_token_ids,
                                      const std::vector<AddedToken>& added, int32_t vocab_size) {
  std::vector<int32_t> ids;
  const auto add = [&](int32_t id) {
    if (id >= 0 && id < vocab_size && std::find(ids.begin(), ids.end(), id) == ids.end()) {
      ids.push_back(id);
    }
  };
  for (const int32_t id : eos_token_ids) add(id);
  for (const char* name : kNames) {
    for (const AddedToken& token : added) {
      if (token.content == name) add(token.id);
    }
  }
  return ids;
}

bool is_rare(const std::vector<std::vector<int32_t>>& sequences, const std::vector<int32_t>& ids) {
  int64_t tokens = 0;
  for (const auto& sequence : sequences) tokens += static_cast<int64_t>(sequence.size());
  return count_tokens(sequences, ids) * kTokensOfASeparator < tokens;
}

int64_t count_tokens(const std::vector<std::vector<int32_t>>& sequences,
                     const std::vector<int32_t>& ids) {
  int64_t count = 0;
  for (const auto& sequence : sequences) {
    count += std::count_if(sequence.begin(), sequence.end(), [&](int32_t token) {
      return std::find(ids.begin(), ids.end(), token) != ids.end();
    });
  }
  return count;
}

std::vector<std::vector<int32_t>> with_separators(std::vector<std::vector<int32_t>> sequences,
                                                  const std::vector<int32_t>& separators,
                                                  int64_t gap) {
  assert(gap > 0 && !separators.empty());
  for (auto& sequence : sequences) {
    size_t next = 0;
    for (auto i = static_cast<size_t>(gap); i < sequence.size(); i += static_cast<size_t>(gap)) {
      sequence[i] = separators[next++ % separators.size()];
    }
  }
  return sequences;
}

std::string sprinkle_separators(std::vector<std::vector<int32_t>>& sequences,
                                const std::vector<int32_t>& separators, uint64_t seed) {
  assert(!separators.empty());
  SplitMix64 random(seed);
  size_t next = 0;
  const auto gap = [&] {
    constexpr auto kGaps = static_cast<uint64_t>(kLongestGap - kShortestGap + 1);
    return static_cast<size_t>(kShortestGap) + static_cast<size_t>(random.below(kGaps));
  };
  for (size_t s = 1; s < sequences.size(); s += 2) {
    for (size_t i = gap(); i < sequences[s].size(); i += gap()) {
      sequences[s][i] = separators[next++ % separators.size()];
    }
  }
  std::string ids;
  for (const int32_t id : separators) ids += (ids.empty() ? "" : ", ") + std::to_string(id);
  return "ids " + ids + " in every second sequence, " + std::to_string(kShortestGap) + " to " +
         std::to_string(kLongestGap) + " tokens apart, " + std::to_string(next) + " in all";
}

}  // namespace oscar
