// Which sequences run together, and how the corpus splits into waves.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/model/memory.h"

namespace oscar {

// Consecutive sequences of one length that run as one tensor. Depends on the sequences and on
// batch_tokens only, never on memory: sums are the same on every machine of a kind.
struct Batch {
  int64_t first_sequence = 0;
  int64_t num_sequences = 0;
  int64_t length = 0;  // tokens of each sequence
  int64_t tokens() const { return num_sequences * length; }
};

// A run of batches whose hidden states are kept together; weights pass once per wave.
struct Wave {
  size_t first_batch = 0, num_batches = 0;
  int64_t tokens = 0;
};

struct RunPlan {
  std::vector<Batch> batches;
  std::vector<Wave> waves;
  MemoryPlan memory;
  int64_t hidden_bytes_per_token = 0;
  MemoryPeak peak;
};

std::vector<Batch> plan_batches(const std::vector<std::vector<int32_t>>& sequences,
                                int64_t batch_tokens);

// Tokens of the largest batch.
int64_t longest_batch(const std::vector<Batch>& batches);

// Waves as `needs` fit within `limits`; of batches their tokens are counted here. While weights are
// resident a wave costs nothing, and ends after at most `wave_sequences` sequences, if that is
// above 0. Throws as plan_memory does.
RunPlan plan_run(std::vector<Batch> batches, MemoryNeeds needs, const MemoryLimits& limits,
                 const torch::Device& device, int64_t wave_sequences = 0);

// What is left of the plan's waves at `batch`, for a run that continues there. Another plan may
// have got it there: a wave of this one is cut at `batch`, and the `num_started` batches from
// there on, which were between two layers, come first as the wave that they were.
std::vector<Wave> waves_from(const RunPlan& plan, size_t batch, size_t num_started);

// Tokens of `count` batches from `first` on.
int64_t tokens_of(const RunPlan& plan, size_t first, size_t count);

}  // namespace oscar
