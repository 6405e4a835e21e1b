// What a model's KV cache takes in BF16, FP8 and INT2, and what of it fits beside the weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "oscar/base/json.h"
#include "oscar/bundle/cached_model.h"

namespace oscar {

enum class CacheKind { kBf16, kFp8, kInt2 };

// Bytes of one request of `tokens`: BF16 has 2 a cached number and FP8 (one scale a tensor) 1. Over
// INT2 they are those that vLLM sets aside: whole pages of 64 tokens with scales and zeros, the
// sink's among them, and the exact windows in full, which count for a short request. Layers that
// are never quantized stay in BF16. A sliding layer holds its window at most, and one of linear
// attention its state, where that is known.
double request_bytes(const CachedModel& model, CacheKind format, int64_t tokens);

struct PlanOptions {
  int64_t gpu_bytes = 0;  // of each GPU; 0: nothing is said of what fits
  int64_t context = 0;    // tokens a request, of those that the model serves; 0: all of them
  std::optional<int64_t> weight_bytes = {};  // in place of what the model says
  int64_t users = 0;                         // requests at a time; 0: not asked
  int gpus = 1;                              // ranks of tensor parallelism
  double utilization = 0.9;  // share of a GPU that the server takes, weights included
};

// Bytes a token, bits a value, gigabytes and requests by context; the longest context of a single
// request, at most what the model serves; whether so many users fit, and what would;
// at the context, every codec that oscar-eval compares, and sweeps over windows, quantization
// groups and metadata. Bytes are those of one GPU: with several, each has its share of the weights
// and whole KV heads, at least one. Throws Error when the weights alone fill the GPU, where users
// are asked for beside weights of unknown size, no context is known, or vLLM does not share the
// heads among so many GPUs.
Json memory_plan(const CachedModel& model, const PlanOptions& options);

// The same for people, in 80 columns.
std::string memory_plan_text(const Json& plan);

}  // namespace oscar
