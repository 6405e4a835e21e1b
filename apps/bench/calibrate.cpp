// Timing of collection; the peer, transformers' own forward, is benchmarks/bench_transformers.py.
#include "bench/calibrate.h"

#include <algorithm>

#include "oscar/calibrate/corpus.h"
#include "oscar/calibrate/cost_estimate.h"

namespace oscar {
namespace {

Json spread(std::vector<double> seconds, int64_t tokens) {
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  return {{"seconds_median", median},
          {"seconds_min", seconds.front()},
          {"seconds_max", seconds.back()},
          {"tokens_per_second", static_cast<double>(tokens) / median}};
}

}  // namespace

Json bench_calibrate(const CalibrateBenchOptions& options) {
  const Checkpoint checkpoint = open_checkpoint(options.model);
  const ComputeOptions compute = choose_compute(options.device, options.dtype);
  Transformer model(checkpoint, compute);
  CalibrateOptions corpus_options;
  corpus_options.model = options.model;
  corpus_options.corpus = options.corpus;
  SilentProgress progress;
  const TokenSequences corpus = make_sequences(corpus_options, options.sequence_length, checkpoint,
                                               model, free_memory(compute.device), progress);
  const CollectionTiming timing =
      time_collection(model, corpus, options.batch_tokens, options.repeats);
  Json record = {{"model", checkpoint.name},
                 {"device", describe(compute)},
                 {"tokens", timing.tokens},
                 {"batch_tokens", options.batch_tokens},
                 {"forward", spread(timing.forward_seconds, timing.tokens)},
                 {"collect", spread(timing.collect_seconds, timing.tokens)}};
  record["collecting_adds"] = record["collect"]["seconds_median"].get<double>() /
                                  record["forward"]["seconds_median"].get<double>() -
                              1.0;
  return record;
}

}  // namespace oscar
