// The sum of what is held at once.
#include "oscar/eval/eval_memory.h"

#include <algorithm>

#include "oscar/eval/token_scores.h"

namespace oscar {
namespace {

// Tensors as large as a batch's keys and values of one layer in float32 while a cache is simulated:
// in the cache's basis, as numbers again, the mixed rows that attention reads, and what a codec
// works on.
constexpr int64_t kRowCopies = 5;

// The mask of a block of queries and what it is made of.
constexpr int64_t kMaskBytes = int64_t{1} << 27;

// What malloc keeps of freed tensors (base/freed_memory.cpp) beyond what forward_bytes has for it.
constexpr int64_t kHeapBytes = int64_t{16} << 20;

int64_t element_bytes(const Transformer& model) {
  return static_cast<int64_t>(torch::elementSize(model.compute().dtype));
}

int64_t cache_bytes(const ModelConfig& config, const EvaluationSize& size) {
  const int64_t kv = int64_t{2} * config.num_kv_heads * config.head_dim;
  const int64_t q = int64_t{config.num_qo_heads} * config.head_dim;
  // Rows of the cache; the attention output beside the reference's, and their difference.
  const int64_t of_token = (kRowCopies * kv + 4 * q) * static_cast<int64_t>(sizeof(float));
  constexpr int64_t kBlockQueries = 256;
  return size.batch_tokens * of_token +
         std::min(kMaskBytes, 8 * kBlockQueries * size.longest_sequence);
}

int64_t output_bytes(const Transformer& model) {
  const ModelConfig& config = model.config();
  const int64_t weights =
      config.tie_word_embeddings
          ? 0
          : int64_t{config.vocab_size} * config.hidden_size * element_bytes(model);
  return weights + score_bytes(config.vocab_size);
}

}  // namespace

int64_t evaluation_bytes(const Transformer& model, const EvaluationSize& size) {
  const int64_t weights =
      size.all_weights ? all_layer_bytes(model) : 2 * largest_layer_bytes(model);
  return forward_bytes(model, size.batch_tokens) + weights + output_bytes(model) +
         cache_bytes(model.config(), size) + (model.compute().device.is_cuda() ? 0 : kHeapBytes);
}

int64_t hidden_state_room(const Transformer& model, const EvaluationSize& size,
                          const MemoryLimits& limits) {
  const torch::Device device = model.compute().device;
  const int64_t limit = limits.of_compute(device);
  const int64_t fixed = evaluation_bytes(model, size);
  const int64_t one_batch = size.batch_tokens * model.config().hidden_size * element_bytes(model) *
                            static_cast<int64_t>(size.methods);
  if (fixed + one_batch > limit) {
    refuse_memory(size.all_weights ? "all layers and one batch" : "one layer and one batch",
                  MemoryLimits::option_of_compute(device), fixed + one_batch, limit,
                  size.all_weights ? "raise the limit, or leave out --needle-generate"
                                   : "raise the limit, compare fewer methods at once (--compare), "
                                     "or shorten --chunk-len");
  }
  return std::max(one_batch, (limit - fixed) / 2);
}

}  // namespace oscar
