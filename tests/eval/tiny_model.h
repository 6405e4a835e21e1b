// The embedded model with its shipped bundle and held-out text, for tests of whole forward passes.
#pragma once

#include <gtest/gtest.h>

#include "oscar/bundle/bundle.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/session.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/text/corpus.h"

namespace oscar_test {

struct TinyModel {
  oscar::Checkpoint checkpoint = oscar::open_checkpoint("tiny-gqa", std::nullopt);
  oscar::Tokenizer tokenizer = oscar::Tokenizer::from_file(checkpoint.folder / "tokenizer.json");
  oscar::Bundle bundle = oscar::read_bundle(checkpoint.folder.parent_path().parent_path() /
                                            "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5");

  // Held-out text in sequences of `length` tokens.
  std::vector<std::vector<int32_t>> text(int64_t length, int64_t sequences) const {
    oscar::CorpusOptions options;
    options.sequence_length = static_cast<int>(length);
    options.max_tokens = length * sequences;
    options.vocab_size = checkpoint.config.vocab_size;
    options.eos_token_ids = checkpoint.config.eos_token_ids;
    return oscar::load_corpus((checkpoint.folder / "heldout.jsonl").string(), &tokenizer, options)
        .sequences;
  }

  // The same as [sequences, length] int64.
  torch::Tensor ids(int64_t length, int64_t sequences) const {
    auto out = torch::empty({sequences, length}, torch::kInt64);
    const auto rows = text(length, sequences);
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t i = 0; i < length; ++i) out[s][i] = rows.at(s).at(i);
    }
    return out;
  }

  oscar::Method method(const std::string& name, const oscar::CacheView& view,
                       torch::Device device) const {
    return oscar::make_method(name, {.config = &checkpoint.config,
                                     .bundle = &bundle,
                                     .named = {},
                                     .quantizer = bundle.quantizer,
                                     .view = view,
                                     .device = device});
  }
};

// Logits [sequences, tokens, vocab], teacher-forced: the model's own, then of one method under each
// engine.
inline std::vector<torch::Tensor> logits_of_engines(oscar::Transformer& model,
                                                    const oscar::Method& method,
                                                    const torch::Tensor& ids,
                                                    std::vector<oscar::EngineKind> kinds) {
  std::vector<std::unique_ptr<oscar::CacheEngine>> engines;
  oscar::MultiForward forward{.engines = {nullptr}};
  for (const auto kind : kinds) {
    engines.push_back(oscar::make_engine(method, model.config(), {kind, model.compute().device}));
    forward.engines.push_back(engines.back().get());
  }
  std::vector<torch::Tensor> logits;
  oscar::SilentProgress progress;
  oscar::run_multi_forward(
      model, forward, {ids},
      [&](size_t, const std::vector<torch::Tensor>& hidden,
          const std::vector<oscar::OutputError>&) {
        for (const torch::Tensor& h : hidden) {
          logits.push_back(model.logits(h).to(torch::kCPU, torch::kFloat64));
        }
      },
      progress);
  return logits;
}

// Per position, |a - b| over the spread of a: Euclidean norms over the vocabulary, [seq, tokens].
inline torch::Tensor relative_distance(const torch::Tensor& a, const torch::Tensor& b) {
  return ((a - b).square().sum(-1) / (a - a.mean(-1, true)).square().sum(-1)).sqrt();
}

// Logits of two engines of one method beside the model's own, u = 2^-8. Each of L layers rounds its
// attention's inputs and output to bf16, an error of about u of that output; L of them, all in one
// direction, add up to L u of the hidden state and so of the logits. That holds
//   at every position that reads no INT2 row,
//   behind them on average: there a rounding may also carry a value over the threshold between two
//   codes, and one position then moves by as much as quantization moves it, but not by more.
inline void expect_agreement(const torch::Tensor& exact, const torch::Tensor& a,
                             const torch::Tensor& b, int64_t first_int2, int layers,
                             const std::string& what) {
  const double bound = layers / 256.0;
  const auto distance = relative_distance(a, b), quantization = relative_distance(exact, a);
  const auto before = distance.slice(1, 0, first_int2), behind = distance.slice(1, first_int2);
  const double largest = quantization.slice(1, first_int2).max().item<double>();
  printf(
      "%s: relative distance of logits %.2e at most, then %.2e on average (bound %.2e), %.2e "
      "at most (quantization %.2e)\n",
      what.c_str(), before.max().item<double>(), behind.mean().item<double>(), bound,
      behind.max().item<double>(), largest);
  EXPECT_LE(before.max().item<double>(), bound) << what;
  EXPECT_LE(behind.mean().item<double>(), bound) << what;
  EXPECT_LE(behind.max().item<double>(), largest) << what;
  EXPECT_GT(behind.min().item<double>(), 0.0) << what << ": nothing was rounded";
}

}  // namespace oscar_test
