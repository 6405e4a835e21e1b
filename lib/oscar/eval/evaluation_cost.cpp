// Memory and time of an evaluation.
#include "oscar/eval/evaluation_cost.h"

#include <algorithm>
#include <chrono>

#include "oscar/base/process.h"
#include "oscar/eval/estimate.h"
#include "oscar/model/layer_major.h"

namespace oscar {

// The sum of what is held at once.

namespace {

// Tensors as large as a batch's keys and values of one layer in float32 while a cache is simulated:
// in the cache's basis, as numbers again, the mixed rows that attention reads, and what a codec
// works on.
constexpr int64_t kRowCopies = 5;

// The mask of a block of queries and what it is made of.
constexpr int64_t kMaskBytes = int64_t{1} << 27;

// What malloc keeps of freed tensors (base/process.cpp) beyond what forward_bytes has for it.
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

// One batch timed in parts, each scaled by what it grows with.

namespace {

template <typename Work>
double seconds_of(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Seconds that the forward passes of all methods take for `ids`, all layers. Waits for the device.
double forward_seconds(const EvaluateOptions& options, const Session& session, Transformer& model,
                       const std::vector<Method>& methods, const torch::Tensor& ids) {
  const auto hidden = model.embed(ids);
  const auto time_layer = [&](int layer, const LayerWeights& weights, AttentionEngine* engine) {
    stop_if_requested("stopped on request");
    return seconds_of([&] {
      const auto out =
          model.forward_layer(layer, weights, hidden, nullptr, engine, options.position_offset);
      out.isfinite().all().item<bool>();
    });
  };
  const auto engines = text_engines(options, session, model.config(), methods);
  // The layer at which each engine leaves the reference's states, which it shares until then.
  std::vector<int> leaves;
  for (const auto& engine : engines) {
    int layer = 0;
    while (layer < model.config().num_layers && !(engine && engine->quantizes(layer))) ++layer;
    leaves.push_back(layer);
  }
  double total = 0;
  for (const std::vector<int>& same : model.config().layers_by_spec()) {
    const auto weights = model.load_layer(same.front());
    time_layer(same.front(), *weights, nullptr);  // warms up
    const double exact = time_layer(same.front(), *weights, nullptr);
    total += exact * static_cast<double>(same.size());
    for (size_t e = 0; e < engines.size(); ++e) {
      int first = -1, quantized = 0, plain = 0;
      for (const int layer : same) {
        if (layer < leaves[e]) continue;
        const bool is_quantized = engines[e]->quantizes(layer);
        ++(is_quantized ? quantized : plain);
        if (is_quantized && first < 0) first = layer;
      }
      total += plain * exact;
      if (first < 0) continue;
      const auto own = first == same.front() ? weights : model.load_layer(first);
      total += quantized * time_layer(first, *own, engines[e].get());
    }
  }
  return total;
}

}  // namespace

EvaluationCost estimate_cost(const EvaluateOptions& options, const Session& session,
                             Transformer& model, const std::vector<Method>& methods,
                             const std::vector<const TextTask*>& texts,
                             const std::vector<NeedlePrompt>& prompts, const Ranks& ranks) {
  const c10::InferenceMode guard;
  EvaluationCost cost{.device = describe(session.compute),
                      .sequences = session.corpus.record.sequences_used,
                      .prompts = static_cast<int64_t>(prompts.size()),
                      .methods = methods.size()};
  EvaluationSize size{.methods = methods.size()};
  const auto look_at = [&](int64_t batch, int64_t longest) {
    size.batch_tokens = std::max(size.batch_tokens, batch);
    size.longest_sequence = std::max(size.longest_sequence, longest);
  };
  for (const TextTask* text : texts) {
    for (const auto& ids : text->batches) look_at(ids.numel(), ids.size(1));
  }
  int64_t prompt_tokens = 0;
  for (const NeedlePrompt& prompt : prompts) {
    look_at(0, prompt.length);
    prompt_tokens += prompt.length + static_cast<int64_t>(prompt.answer.size());
  }
  if (!prompts.empty()) look_at(largest_needle_batch(model, prompts), 0);
  size.all_weights = options.generate_needles && !prompts.empty();
  hidden_state_room(model, size, session.memory);  // throws where one batch does not fit
  // As short as blocks are: hidden states of one batch.
  const int64_t hidden = size.batch_tokens * model.config().hidden_size *
                         static_cast<int64_t>(torch::elementSize(model.compute().dtype)) *
                         static_cast<int64_t>(methods.size());
  cost.peak_bytes = evaluation_bytes(model, size) + hidden;

  torch::Tensor ids;
  if (texts.empty()) {
    const std::vector<int32_t>& tokens = prompts.front().prompt;
    ids = make_batches({tokens}, 1).front();
  } else {
    ids = texts[0]->batches[0];
  }
  const double forward = forward_seconds(options, session, model, methods, ids);
  const double of_token = forward / static_cast<double>(ids.numel());
  double of_scored = 0;
  if (!texts.empty()) {
    const TextTask& text = *texts[0];
    cost.tokens = text.tokens;
    std::vector<TokenScores> scores(methods.size());
    const std::vector<torch::Tensor> states(methods.size(), model.embed(ids));
    of_scored = seconds_of([&] { score_batch(model, states, ids, text.first_position, scores); }) /
                static_cast<double>(text.counted(0));
  }
  const auto seconds = [&](const TextTask& text) {
    double total = 0;
    for (size_t b = 0; b < text.batches.size(); ++b) {
      total += of_token * static_cast<double>(text.batches[b].numel()) +
               of_scored * static_cast<double>(text.counted(b));
    }
    return total * longest_part(ranks, session.compute.device, text.batches.size());
  };
  if (!texts.empty()) cost.text_seconds = seconds(*texts[0]);
  if (texts.size() > 1) cost.separated_seconds = seconds(*texts[1]);
  const size_t batches = num_needle_batches(model, prompts);
  double passes = longest_part(ranks, session.compute.device, batches);
  if (options.generate_needles) {
    passes += longest_part(ranks, session.compute.device, batches * methods.size());
  }
  cost.needle_seconds = passes * of_token * static_cast<double>(prompt_tokens);
  constexpr int64_t kNumbers = 3;  // of a token and method (TokenScores)
  for (const TextTask* text : texts) {
    cost.checkpoint_bytes += kNumbers * text->tokens;
  }
  cost.checkpoint_bytes = (cost.checkpoint_bytes + cost.prompts) *
                          static_cast<int64_t>(methods.size() * sizeof(double));
  return cost;
}

}  // namespace oscar
