// Means with their errors, over scores of tokens.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/eval/report/report_data.h"
#include "oscar/model/transformer.h"
#include "oscar/text/corpus.h"
#include "oscar/text/ngram_fingerprint.h"

namespace oscar {

// From per-token numbers to a mean with its uncertainty, and tests that compare two methods
// (math 11.5, 11.6).

inline constexpr int64_t kFewestTokens = 100;  // figures on fewer are refused

// Units that are drawn as a whole when uncertainty is estimated, because the tokens of one text
// depend on each other (kFewestUnits, kUnitTokens). Returns the unit of each measured token.
std::vector<int32_t> make_units(const std::vector<int64_t>& tokens_of_sequence);

// Mean over tokens and its standard error from the spread between units (ratio estimator; NaN with
// one unit).
struct Estimate {
  double mean = 0, se = 0;
};
Estimate estimate(const std::vector<double>& values, const std::vector<int32_t>& units);

// Mean of a - b over tokens and the 95% interval of a bootstrap that draws units with replacement
// (NaN with fewer than kFewestUnits units).
struct PairedDifference {
  double mean = 0, low = 0, high = 0;
};
PairedDifference paired_bootstrap(const std::vector<double>& a, const std::vector<double>& b,
                                  const std::vector<int32_t>& units, uint64_t seed,
                                  int replicates = 2000);

// Quantiles (0..1), linear between order statistics. `values` must not be empty.
std::vector<double> quantiles(std::vector<double> values, const std::vector<double>& levels);

// 95% Wilson interval of a pass rate; trials > 0.
std::pair<double, double> wilson_interval(int64_t passes, int64_t trials);

// Two-sided exact McNemar test: probability of a split at least as uneven as (only_a, only_b) of
// the cases on which two methods disagree. 1 when they never do.
double mcnemar_exact(int64_t only_a, int64_t only_b);

// Throws Error when fewer than kFewestTokens are measured; `what` names the figure.
void require_enough_tokens(int64_t tokens, const std::string& what);

// What one method predicts for each token, beside the reference's prediction (math 11.2).

// Per predicted token. `agrees`: 1 when both put the same token first.
struct TokenScores {
  std::vector<double> nll, kl, agrees;
};

// Appends the scores of `rows` predictions: logits and reference [rows, vocab] float32, targets
// [rows] int64. nll in nats; kl = KL(reference || method) in nats. Sums over the vocabulary run in
// float64 over differences of logits, so that equal logits give a KL of 0 to about 1e-8. Throws
// Error when a score is not finite.
void score_logits(const torch::Tensor& reference, const torch::Tensor& logits,
                  const torch::Tensor& targets, TokenScores& scores);

// Scores positions [first, tokens) of one batch: hidden[m] [batch, tokens, hidden] of each method,
// hidden[0] the reference; ids [batch, tokens]. Logits exist for a block of positions only.
// Appends sequence by sequence, positions ascending, to scores[m]. Throws Error, naming sequence,
// position and method, when a score is not finite.
void score_batch(Transformer& model, const std::vector<torch::Tensor>& hidden,
                 const torch::Tensor& ids, int64_t first, std::vector<TokenScores>& scores);

// Bytes of logits and what is computed from them that score_batch holds at most.
int64_t score_bytes(int64_t vocab_size);

// Overlapping windows over one stream, so that every scored token has a long context.

// `pieces` is one stream cut every `stride` tokens (load_corpus with sequence_length = stride).
// Window w holds `window` tokens and begins at piece w; its last `stride` tokens are scored, so
// that none is scored twice and each has at least window - stride tokens before it. A last piece
// that is shorter is left out. Throws Error when stride does not divide window, when the corpus has
// several sources or rows kept apart, or when it is shorter than one window.
std::vector<std::vector<int32_t>> strided_windows(const TokenSequences& pieces, int64_t window,
                                                  int64_t stride);

// Those of the sequences of which tokens count, from `first_position` on.
std::vector<std::vector<int32_t>> counted_sequences(
    const std::vector<std::vector<int32_t>>& sequences, int64_t first_position);

// Leakage guard: how much of an evaluation's text a bundle was made from.

// Entry `overlap` of a bundle in the report (SCHEMA.md). Of `sequences` those with more than
// `first_position` tokens were evaluated: with needle tasks, whose haystack is all text, any.
Json overlap_json(const NgramFingerprint& fingerprint,
                  const std::vector<std::vector<int32_t>>& sequences, int64_t first_position);

// The same for a bundle without a fingerprint, from the files that text came from: tokens of a file
// that was calibrated on count as seen, whatever part of it was read.
Json same_files_json(const CorpusRecord& calibrated, const CorpusRecord& evaluated);

}  // namespace oscar
