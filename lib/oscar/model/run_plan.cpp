// Which sequences run together, and how the corpus splits into waves.
#include "oscar/model/run_plan.h"

#include <algorithm>
#include <utility>

namespace oscar {

std::vector<Batch> plan_batches(const std::vector<std::vector<int32_t>>& sequences,
                                int64_t batch_tokens) {
  std::vector<Batch> batches;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto length = static_cast<int64_t>(sequences[i].size());
    const bool fits = !batches.empty() && batches.back().length == length &&
                      batches.back().tokens() + length <= batch_tokens;
    if (fits) {
      ++batches.back().num_sequences;
    } else {
      batches.push_back({static_cast<int64_t>(i), 1, length});
    }
  }
  return batches;
}

int64_t longest_batch(const std::vector<Batch>& batches) {
  int64_t tokens = 0;
  for (const Batch& batch : batches) tokens = std::max(tokens, batch.tokens());
  return tokens;
}

RunPlan plan_run(std::vector<Batch> batches, MemoryNeeds needs, const MemoryLimits& limits,
                 const torch::Device& device, int64_t wave_sequences) {
  RunPlan plan;
  plan.batches = std::move(batches);
  plan.hidden_bytes_per_token = needs.hidden_of_token;
  needs.batch_tokens = longest_batch(plan.batches);
  needs.all_tokens = tokens_of(plan, 0, plan.batches.size());
  plan.memory = plan_memory(needs, limits, device);
  const int64_t room = plan.memory.hidden_room;
  const bool bounded = plan.memory.weights_resident && wave_sequences > 0;
  int64_t sequences = 0, largest = 0;
  for (size_t i = 0; i < plan.batches.size(); ++i) {
    const Batch& batch = plan.batches[i];
    const bool full = plan.waves.empty() ||
                      (plan.waves.back().tokens + batch.tokens()) * needs.hidden_of_token > room ||
                      (bounded && sequences >= wave_sequences);
    if (plan.waves.empty() || (full && !needs.hidden_at_once)) {
      plan.waves.push_back({i, 0, 0});
      sequences = 0;
    }
    ++plan.waves.back().num_batches;
    plan.waves.back().tokens += batch.tokens();
    sequences += batch.num_sequences;
    largest = std::max(largest, plan.waves.back().tokens);
  }
  plan.peak = memory_peak(needs, plan.memory, largest, device);
  return plan;
}

int64_t tokens_of(const RunPlan& plan, size_t first, size_t count) {
  int64_t tokens = 0;
  for (size_t i = first; i < first + count; ++i) tokens += plan.batches[i].tokens();
  return tokens;
}

std::vector<Wave> waves_from(const RunPlan& plan, size_t batch, size_t num_started) {
  std::vector<Wave> waves;
  if (num_started > 0) waves.push_back({batch, num_started, tokens_of(plan, batch, num_started)});
  const size_t next = batch + num_started;
  for (const Wave& wave : plan.waves) {
    const size_t first = std::max(wave.first_batch, next);
    const size_t end = wave.first_batch + wave.num_batches;
    if (first < end) waves.push_back({first, end - first, tokens_of(plan, first, end - first)});
  }
  return waves;
}

}  // namespace oscar
