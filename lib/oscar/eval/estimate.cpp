// Means with their errors, over scores of tokens.
#include "oscar/eval/estimate.h"

#include <fmt/format.h>
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <random>

#include "oscar/base/error.h"

namespace oscar {

// Standard errors over units, the bootstrap, and tests on counts.

namespace {

struct UnitSums {
  std::vector<double> sum;
  std::vector<double> count;
};

template <typename Value>
UnitSums sums_by_unit(size_t tokens, const std::vector<int32_t>& units, Value value) {
  assert(units.size() == tokens);
  const int32_t last = tokens == 0 ? -1 : *std::max_element(units.begin(), units.end());
  UnitSums out{std::vector<double>(last + 1, 0.0), std::vector<double>(last + 1, 0.0)};
  for (size_t i = 0; i < tokens; ++i) {
    out.sum[units[i]] += value(i);
    out.count[units[i]] += 1;
  }
  return out;
}

}  // namespace

std::vector<int32_t> make_units(const std::vector<int64_t>& tokens_of_sequence) {
  const bool whole = static_cast<int64_t>(tokens_of_sequence.size()) >= kFewestUnits;
  std::vector<int32_t> units;
  int32_t unit = -1;
  for (const int64_t tokens : tokens_of_sequence) {
    for (int64_t i = 0; i < tokens; ++i) {
      if (i == 0 || (!whole && i % kUnitTokens == 0)) ++unit;
      units.push_back(unit);
    }
  }
  return units;
}

Estimate estimate(const std::vector<double>& values, const std::vector<int32_t>& units) {
  const UnitSums sums = sums_by_unit(values.size(), units, [&](size_t i) { return values[i]; });
  const auto tokens = static_cast<double>(values.size());
  const auto count = static_cast<double>(sums.sum.size());
  Estimate out;
  for (const double sum : sums.sum) out.mean += sum;
  out.mean /= tokens;
  double squares = 0;
  for (size_t u = 0; u < sums.sum.size(); ++u) {
    const double residual = sums.sum[u] - sums.count[u] * out.mean;
    squares += residual * residual;
  }
  out.se = count > 1 ? std::sqrt(count / (count - 1) * squares) / tokens
                     : std::numeric_limits<double>::quiet_NaN();
  return out;
}

PairedDifference paired_bootstrap(const std::vector<double>& a, const std::vector<double>& b,
                                  const std::vector<int32_t>& units, uint64_t seed,
                                  int replicates) {
  assert(a.size() == b.size());
  const UnitSums sums = sums_by_unit(a.size(), units, [&](size_t i) { return a[i] - b[i]; });
  const size_t count = sums.sum.size();
  double total = 0;
  for (const double sum : sums.sum) total += sum;
  const double mean = total / static_cast<double>(a.size());
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  if (std::ssize(sums.sum) < kFewestUnits) return {mean, kUnknown, kUnknown};
  std::mt19937_64 random(seed);
  std::vector<double> means;
  for (int r = 0; r < replicates; ++r) {
    double sum = 0, tokens = 0;
    for (size_t draw = 0; draw < count; ++draw) {
      const size_t u = random() % count;
      sum += sums.sum[u];
      tokens += sums.count[u];
    }
    means.push_back(sum / tokens);
  }
  const auto interval = quantiles(means, {0.025, 0.975});
  return {mean, interval[0], interval[1]};
}

std::vector<double> quantiles(std::vector<double> values, const std::vector<double>& levels) {
  assert(!values.empty());
  std::sort(values.begin(), values.end());
  std::vector<double> out;
  for (const double level : levels) {
    const double place = level * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    const double part = place - static_cast<double>(below);
    out.push_back(values[below] + part * (values[above] - values[below]));
  }
  return out;
}

std::pair<double, double> wilson_interval(int64_t passes, int64_t trials) {
  constexpr double z = 1.959963984540054;
  const auto n = static_cast<double>(trials);
  const double p = static_cast<double>(passes) / n;
  const double center = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double half = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {std::max(0.0, center - half), std::min(1.0, center + half)};
}

double mcnemar_exact(int64_t only_a, int64_t only_b) {
  const int64_t n = only_a + only_b, k = std::min(only_a, only_b);
  double tail = 0;
  for (int64_t i = 0; i <= k; ++i) {
    tail += std::exp(std::lgamma(n + 1.0) - std::lgamma(i + 1.0) - std::lgamma(n - i + 1.0) -
                     static_cast<double>(n) * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

void require_enough_tokens(int64_t tokens, const std::string& what) {
  if (tokens >= kFewestTokens) return;
  throw Error({.what = "too few tokens for " + what,
               .expected = "at least " + std::to_string(kFewestTokens) +
                           " predicted tokens behind the first position",
               .found = std::to_string(tokens),
               .hint = "give a longer corpus or longer sequences (--sequence-length), or lower "
                       "--first-position"});
}

// Scores from logits, block by block.

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

// Windows joined from the pieces of one stream.

std::vector<std::vector<int32_t>> strided_windows(const TokenSequences& pieces, int64_t window,
                                                  int64_t stride) {
  if (window % stride != 0) {
    throw Error({.what = "the stride does not divide the window",
                 .where = "--stride",
                 .expected = fmt::format("a divisor of {}", window),
                 .found = std::to_string(stride)});
  }
  const auto& sources = pieces.record.sources;
  if (sources.size() != 1 || sources.front().kind == "ids_2d") {
    throw Error({.what = "overlapping windows need one stream of tokens",
                 .where = "--stride",
                 .expected = "one corpus of text, or of token ids in one dimension",
                 .found = sources.size() == 1 ? "rows that are kept apart"
                                              : fmt::format("{} sources", sources.size())});
  }
  const auto per_window = static_cast<size_t>(window / stride);
  size_t whole = pieces.sequences.size();
  if (whole > 0 && static_cast<int64_t>(pieces.sequences.back().size()) < stride) --whole;
  if (whole < per_window) {
    throw Error({.what = "the corpus is shorter than one window",
                 .where = "--sequence-length, --stride",
                 .expected = fmt::format("{} tokens", window),
                 .found = std::to_string(pieces.record.tokens)});
  }
  std::vector<std::vector<int32_t>> windows;
  for (size_t first = 0; first + per_window <= whole; ++first) {
    std::vector<int32_t>& tokens = windows.emplace_back();
    for (size_t i = first; i < first + per_window; ++i) {
      tokens.insert(tokens.end(), pieces.sequences[i].begin(), pieces.sequences[i].end());
    }
  }
  return windows;
}

// Shares of n-grams, with their intervals.

std::vector<std::vector<int32_t>> counted_sequences(
    const std::vector<std::vector<int32_t>>& sequences, int64_t first_position) {
  std::vector<std::vector<int32_t>> counted;
  for (const auto& sequence : sequences) {
    if (std::ssize(sequence) > first_position) counted.push_back(sequence);
  }
  return counted;
}

Json overlap_json(const NgramFingerprint& fingerprint,
                  const std::vector<std::vector<int32_t>>& sequences, int64_t first_position) {
  Json json = {{"known", false}};
  if (fingerprint.empty()) return json;
  const NgramOverlap overlap =
      overlap_with(fingerprint, counted_sequences(sequences, first_position));
  json["ngram"] = kNgramTokens;
  json["sampled"] = overlap.sampled;
  if (overlap.sampled == 0) return json;
  const auto [low, high] = wilson_interval(overlap.found, overlap.sampled);
  json["known"] = true;
  json["found"] = overlap.found;
  json["share"] = static_cast<double>(overlap.found) / static_cast<double>(overlap.sampled);
  json["low"] = low;
  json["high"] = high;
  return json;
}

Json same_files_json(const CorpusRecord& calibrated, const CorpusRecord& evaluated) {
  int64_t all = 0, same = 0;
  for (const CorpusSource& source : evaluated.sources) {
    all += source.tokens_used;
    const auto is_it = [&](const CorpusSource& other) {
      return !other.sha256.empty() && other.sha256 == source.sha256;
    };
    if (std::any_of(calibrated.sources.begin(), calibrated.sources.end(), is_it)) {
      same += source.tokens_used;
    }
  }
  if (same == 0) return {{"known", false}};
  const double share = static_cast<double>(same) / static_cast<double>(all);
  return {{"known", true}, {"by_files", true}, {"share", share}, {"low", share}, {"high", share}};
}

}  // namespace oscar
