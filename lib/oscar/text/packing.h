// Documents to sequences of equal length, with separators and repeated stretches where wanted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/text/corpus.h"
#include "oscar/text/pre_tokenizer.h"

namespace oscar {

// Tokens that end documents and turns, and texts with more of them inside than they came with.

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

// A warning where more than kPaddingShare of all tokens lie in runs of kPaddingRun or more of one
// id, as rows that were filled up to one length have them; "" elsewhere, and for a corpus without
// ids.
inline constexpr size_t kPaddingRun = 32;
inline constexpr double kPaddingShare = 0.05;
std::string padding_warning(const TokenSequences& corpus);

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

// Text whose queries look far back: the second half of every second sequence, from the second on,
// becomes stretches of kShortestStretch to kLongestStretch tokens from anywhere in its first half.
// A model that reads them again attends to where they stood (induction heads, Olsson et al.,
// arXiv 2209.11895), as it does to find a fact; other text hardly ever asks for one. Sequences
// shorter than 4 kLongestStretch stay as they are. Seeded. Says what was done, for the record;
// "" where there was nothing to do. (`--recall` of oscar-calibrate.)
inline constexpr int64_t kShortestStretch = 6, kLongestStretch = 24;
// By default sequences have at least so many times the tokens of the exact windows: then most of
// what is repeated stood in the 2-bit history.
inline constexpr int64_t kRecallWindows = 4;
std::string repeat_stretches(std::vector<std::vector<int32_t>>& sequences, uint64_t seed);

// Streams of tokens to sequences, and several packed parts to one calibration order.

// Where a document's first token went.
struct DocumentStart {
  size_t sequence, offset;
};

// One part of the corpus, cut into sequences.
struct PackedPart {
  CorpusSource source;
  std::vector<std::vector<int32_t>> sequences;
  std::vector<DocumentStart> starts;
  int64_t tail_tokens_dropped = 0;
  bool has_weight = false;
};

// Appends one stream of documents, cut every sequence_length tokens, attention running across
// documents. Counts tokens_read. A last sequence of fewer than 2 tokens is dropped: it predicts
// nothing.
void pack_stream(const std::vector<std::vector<int32_t>>& documents, int sequence_length,
                 PackedPart& part);

// Takes each part's share (corpus.h states the rule), alternates their sequences, and fills the
// record but for bos_eos_policy and chat_template. Throws Error when a part or the result is empty.
TokenSequences join_parts(std::vector<PackedPart> parts, const CorpusOptions& options);

}  // namespace oscar
