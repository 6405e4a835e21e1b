// Scores from logits, block by block.
#include "oscar/eval/token_scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int64_t kLogitElements = int64_t{1} << 24;  // of one block and method

int64_t block_positions(int64_t vocab) {
  return std::clamp<int64_t>(kLogitElements / vocab, 16, 1024);
}

struct Softmax {
  torch::Tensor log_sum;  // [rows] float64
  torch::Tensor weights;  // exp(logits - max) [rows, vocab] float32
  torch::Tensor sum;      // [rows] float64
  torch::Tensor top;      // [rows] int64
};

Softmax softmax_parts(const torch::Tensor& logits) {
  auto [highest, top] = logits.max(-1, true);
  Softmax out;
  out.weights = logits.sub(highest).exp_();
  out.sum = out.weights.sum(-1, false, torch::kFloat64);
  out.log_sum = out.sum.log().add(highest.squeeze(-1).to(torch::kFloat64));
  out.top = top.squeeze(-1);
  return out;
}

void append(std::vector<double>& values, const torch::Tensor& more, const std::string& where) {
  const auto host = more.to(torch::kCPU, torch::kFloat64).contiguous();
  const double* const begin = host.data_ptr<double>();
  const double* const end = begin + host.numel();
  const double* const wrong = std::find_if(begin, end, [](double x) { return !std::isfinite(x); });
  if (wrong != end) {
    throw Error({.what = "a prediction is not finite",
                 .where = fmt::format("{}, prediction {}", where, wrong - begin),
                 .hint = "run with --dtype fp32, or check the weights of the output projection"});
  }
  values.insert(values.end(), begin, end);
}

void score_against(const torch::Tensor& reference, const Softmax& expected,
                   const torch::Tensor& logits, const torch::Tensor& targets,
                   const std::string& where, TokenScores& scores) {
  const Softmax got = softmax_parts(logits);
  const auto chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).to(torch::kFloat64);
  append(scores.nll, got.log_sum - chosen, where);
  const auto gap = expected.weights.mul(reference.sub(logits)).sum(-1, false, torch::kFloat64);
  append(scores.kl, gap.div(expected.sum) - (expected.log_sum - got.log_sum), where);
  append(scores.agrees, got.top.eq(expected.top), where);
}

}  // namespace

void score_logits(const torch::Tensor& reference, const torch::Tensor& logits,
                  const torch::Tensor& targets, TokenScores& scores) {
  score_against(reference, softmax_parts(reference), logits, targets, "the logits", scores);
}

int64_t score_bytes(int64_t vocab_size) {
  // Logits and softmax weights of the reference and of a method, their difference, its product.
  constexpr int64_t kTensors = 6;
  return kTensors * block_positions(vocab_size) * vocab_size * static_cast<int64_t>(sizeof(float));
}

void score_batch(Transformer& model, const std::vector<torch::Tensor>& hidden,
                 const torch::Tensor& ids, int64_t first, std::vector<TokenScores>& scores) {
  const c10::InferenceMode guard;
  const int64_t tokens = ids.size(1), vocab = model.config().vocab_size;
  const int64_t block = block_positions(vocab);
  const auto targets = ids.to(model.compute().device);
  for (int64_t sequence = 0; sequence < ids.size(0); ++sequence) {
    for (int64_t begin = first; begin < tokens; begin += block) {
      const int64_t end = std::min(tokens, begin + block);
      // Position t is predicted by the hidden state of t - 1.
      const auto logits_of = [&](const torch::Tensor& h) {
        return model.logits(h[sequence].slice(0, begin - 1, end - 1).to(model.compute().device));
      };
      const auto wanted = targets[sequence].slice(0, begin, end);
      const auto reference = logits_of(hidden[0]);
      const Softmax expected = softmax_parts(reference);
      for (size_t m = 0; m < hidden.size(); ++m) {
        score_against(reference, expected, m == 0 ? reference : logits_of(hidden[m]), wanted,
                      fmt::format("sequence {} of its batch, from position {} on, method {}",
                                  sequence, begin, m),
                      scores[m]);
      }
    }
  }
}

}  // namespace oscar
