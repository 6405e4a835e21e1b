// Batches of one text, block by block.
#include "oscar/eval/text_task.h"

#include <fmt/format.h>

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/eval_memory.h"

namespace oscar {
namespace {

constexpr int64_t kHostBatchTokens = 4096;
constexpr int64_t kDeviceBatchTokens = 65536;

// Batches whose tokens `state` has counted. Throws Error where it ends within one.
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

// Scores of batches that are not whole are of no use.
void cut_to(size_t tokens, std::vector<TokenScores>& scores) {
  for (TokenScores& s : scores) {
    for (auto* values : {&s.nll, &s.kl, &s.agrees}) values->resize(tokens);
  }
}

}  // namespace

std::vector<torch::Tensor> make_batches(const std::vector<std::vector<int32_t>>& chunks,
                                        int64_t batch_tokens) {
  std::vector<torch::Tensor> batches;
  for (size_t i = 0; i < chunks.size();) {
    const size_t length = chunks[i].size();
    size_t end = i + 1;
    while (end < chunks.size() && chunks[end].size() == length &&
           static_cast<int64_t>((end + 1 - i) * length) <= batch_tokens) {
      ++end;
    }
    auto ids =
        torch::empty({static_cast<int64_t>(end - i), static_cast<int64_t>(length)}, torch::kInt64);
    auto* out = ids.data_ptr<int64_t>();
    for (; i < end; ++i) out = std::copy(chunks[i].begin(), chunks[i].end(), out);
    batches.push_back(ids);
  }
  return batches;
}

TextTask plan_text(const std::vector<std::vector<int32_t>>& sequences, int64_t first,
                   const torch::Device& device) {
  TextTask task{.first_position = first};
  std::vector<std::vector<int32_t>> chunks;
  for (const auto& chunk : sequences) {
    const auto length = static_cast<int64_t>(chunk.size());
    if (length <= first) continue;
    chunks.push_back(chunk);
    task.tokens += length - first;
    task.longest = std::max(task.longest, length);
  }
  require_enough_tokens(task.tokens, fmt::format("perplexity from position {} on", first));
  task.batches = make_batches(chunks, device.is_cuda() ? kDeviceBatchTokens : kHostBatchTokens);
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

void measure_text(const EvaluateOptions& options, const Session& session, Transformer& model,
                  const std::vector<Method>& methods, const TextTask& task, const char* name,
                  TextState& state, const std::function<void()>& counted, Progress& progress) {
  EvaluationSize size{.longest_sequence = task.longest, .methods = methods.size()};
  for (const auto& ids : task.batches) size.batch_tokens = std::max(size.batch_tokens, ids.numel());
  const auto engines = text_engines(options, session, model.config(), methods);
  auto whole = static_cast<size_t>(counted_tokens(state));
  state.scores.resize(methods.size());
  MultiForward forward{.engines = {},
                       .position_offset = options.position_offset,
                       .first_query = task.first_position - 1,
                       .hidden_state_room = hidden_state_room(model, size, session.memory),
                       .first_batch = batches_done(task, state),
                       .errors_before = state.errors,
                       .block_done = [&](const std::vector<OutputError>& errors) {
                         whole = state.scores[0].nll.size();
                         state.errors = errors;
                         counted();
                       }};
  for (const auto& engine : engines) forward.engines.push_back(engine.get());
  int64_t work = 0;
  for (size_t b = forward.first_batch; b < task.batches.size(); ++b) {
    work += task.batches[b].numel() * model.config().num_layers;
  }
  progress.begin(name, work, "token-layers");
  try {
    run_multi_forward(
        model, forward, task.batches,
        [&](size_t batch, const std::vector<torch::Tensor>& hidden) {
          score_batch(model, hidden, task.batches[batch], task.first_position, state.scores);
        },
        progress);
  } catch (...) {
    cut_to(whole, state.scores);
    if (whole == 0) state = {};
    throw;
  }
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
