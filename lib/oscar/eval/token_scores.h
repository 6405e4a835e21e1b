// What one method predicts for each token, beside the reference's prediction (math 11.2).
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/model/transformer.h"

namespace oscar {

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

}  // namespace oscar
