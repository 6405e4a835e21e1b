// Batches of one text, and what each process counts of them.
#include "oscar/eval/text_task.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/evaluation_cost.h"
#include "oscar/model/layer_major.h"

namespace oscar {
namespace {

constexpr int64_t kHostBatchTokens = 4096;
// More run no faster, and a short text has something for several GPUs.
constexpr int64_t kDeviceBatchTokens = 16384;

// Adds the figures of the next batch, entry by entry: sums are those of one batch after another.
void add_batch(const TextState& batch, TextState& state) {
  if (state.scores.empty()) {
    state = batch;
    return;
  }
  const auto append = [](std::vector<double>& all, const std::vector<double>& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  const auto add = [](auto& sums, const auto& more) {
    for (size_t layer = 0; layer < sums.size(); ++layer) {
      for (size_t head = 0; head < sums[layer].size(); ++head) {
        sums[layer][head] += more[layer][head];
      }
    }
  };
  for (size_t m = 0; m < state.scores.size(); ++m) {
    append(state.scores[m].nll, batch.scores[m].nll);
    append(state.scores[m].kl, batch.scores[m].kl);
    append(state.scores[m].agrees, batch.scores[m].agrees);
    add(state.errors[m].error, batch.errors[m].error);
    add(state.errors[m].energy, batch.errors[m].energy);
  }
}

}  // namespace

std::vector<torch::Tensor> make_batches(const std::vector<std::vector<int32_t>>& sequences,
                                        int64_t batch_tokens) {
  std::vector<torch::Tensor> batches;
  for (size_t i = 0; i < sequences.size();) {
    const size_t length = sequences[i].size();
    size_t end = i + 1;
    while (end < sequences.size() && sequences[end].size() == length &&
           static_cast<int64_t>((end + 1 - i) * length) <= batch_tokens) {
      ++end;
    }
    auto ids =
        torch::empty({static_cast<int64_t>(end - i), static_cast<int64_t>(length)}, torch::kInt64);
    auto* out = ids.data_ptr<int64_t>();
    for (; i < end; ++i) out = std::copy(sequences[i].begin(), sequences[i].end(), out);
    batches.push_back(ids);
  }
  return batches;
}

TextTask plan_text(const std::vector<std::vector<int32_t>>& sequences, int64_t first,
                   const torch::Device& device) {
  TextTask task{.first_position = first};
  std::vector<std::vector<int32_t>> long_enough;
  for (const auto& sequence : sequences) {
    const auto length = static_cast<int64_t>(sequence.size());
    if (length <= first) continue;
    long_enough.push_back(sequence);
    task.tokens += length - first;
    task.longest = std::max(task.longest, length);
  }
  require_enough_tokens(task.tokens, fmt::format("perplexity from position {} on", first));
  task.batches =
      make_batches(long_enough, device.is_cuda() ? kDeviceBatchTokens : kHostBatchTokens);
  return task;
}

std::vector<std::unique_ptr<CacheEngine>> text_engines(const EvaluateOptions& options,
                                                       const Session& session,
                                                       const ModelConfig& config,
                                                       const std::vector<Method>& methods) {
  std::vector<std::unique_ptr<CacheEngine>> engines;
  for (const Method& method : methods) {
    engines.push_back(make_engine(method, config, session.engine));
    if (engines.back()) engines.back()->set_first_position(options.position_offset);
  }
  return engines;
}

size_t batches_done(const TextTask& task, const TextState& state) {
  int64_t left = counted_tokens(state);
  size_t done = 0;
  while (left > 0 && done < task.batches.size()) left -= task.counted(done++);
  if (left != 0) {
    refuse_damaged_checkpoint("scores of the text", "those of whole batches",
                              fmt::format("{} tokens", counted_tokens(state)));
  }
  return done;
}

void measure_text(const EvaluateOptions& options, const Session& session, Transformer& model,
                  const std::vector<Method>& methods, const TextTask& task, const char* name,
                  Ranks& ranks, size_t done, TextState& state, const std::function<void()>& counted,
                  Progress& progress) {
  const ModelConfig& config = model.config();
  EvaluationSize size{.longest_sequence = task.longest, .methods = methods.size()};
  for (const auto& ids : task.batches) size.batch_tokens = std::max(size.batch_tokens, ids.numel());
  const auto engines = text_engines(options, session, config, methods);
  MultiForward forward{.engines = {},
                       .position_offset = options.position_offset,
                       .first_query = task.first_position - 1,
                       .hidden_state_room = plan_hidden_room(
                           evaluation_needs(model, size), session.memory, session.compute.device),
                       .short_blocks = true};
  hold_device_memory(session.memory, session.compute.device);
  for (const auto& engine : engines) forward.engines.push_back(engine.get());
  const EvaluationShape shape{.methods = methods.size(),
                              .layers = static_cast<size_t>(config.num_layers),
                              .heads = static_cast<size_t>(config.num_kv_heads)};
  const auto work_of = [&](size_t batch) {
    return task.batches[batch].numel() * config.num_layers;
  };
  int64_t work = 0;
  for (size_t b = done; b < task.batches.size(); ++b) work += work_of(b);
  progress.begin(name, work, "token-layers");
  const auto pass = [&](const std::vector<size_t>& own, const PieceDone& passed) {
    std::vector<torch::Tensor> batches;
    for (const size_t batch : own) batches.push_back(task.batches[batch]);
    const auto score = [&](size_t index, const std::vector<torch::Tensor>& hidden,
                           std::vector<OutputError> errors) {
      TextState batch{.scores = std::vector<TokenScores>(methods.size()),
                      .errors = std::move(errors)};
      score_batch(model, hidden, batches[index], task.first_position, batch.scores);
      passed(own[index], text_bytes(batch));
    };
    run_multi_forward(model, forward, batches, score, progress);
  };
  const auto take = [&](size_t batch, const std::vector<uint8_t>& figures, bool own) {
    add_batch(text_from_bytes(figures, shape), state);
    counted();
    if (!own) progress.advance(work_of(batch));
  };
  work_in_turn(ranks, done, task.batches.size(), pass, take);
  progress.end();
}

int64_t counted_tokens(const TextState& state) {
  return state.scores.empty() ? 0 : static_cast<int64_t>(state.scores[0].nll.size());
}

TextResults text_results(const TextTask& task, const TextState& state) {
  TextResults results{
      .first_position = task.first_position, .scores = state.scores, .output_errors = state.errors};
  const size_t done = batches_done(task, state);
  for (size_t b = 0; b < done; ++b) {
    const torch::Tensor& ids = task.batches[b];
    results.longest = std::max(results.longest, ids.size(1));
    results.measured.insert(results.measured.end(), static_cast<size_t>(ids.size(0)),
                            ids.size(1) - task.first_position);
  }
  return results;
}

}  // namespace oscar
