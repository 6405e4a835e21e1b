// Memory and time of an evaluation.
#include "oscar/eval/evaluation_cost.h"

#include <algorithm>
#include <chrono>
#include <iterator>

#include "oscar/base/process.h"
#include "oscar/eval/estimate.h"
#include "oscar/model/layer_major.h"

namespace oscar {

// What is held at once.

namespace {

// Tensors as large as a batch's keys and values of one layer in float32 while a cache is simulated:
// in the cache's basis, as numbers again, the mixed rows that attention reads, and what a codec
// works on.
constexpr int64_t kRowCopies = 5;

// The mask of a block of queries and what it is made of.
constexpr int64_t kMaskBytes = int64_t{1} << 27;

// What malloc keeps of freed tensors (base/process.cpp) beyond what model_needs has for it.
constexpr int64_t kHeapBytes = int64_t{16} << 20;

// The mask of a block of queries, at most.
int64_t mask_bytes(const EvaluationSize& size) {
  constexpr int64_t kBlockQueries = 256;
  return std::min(kMaskBytes, 8 * kBlockQueries * size.longest_sequence);
}

int64_t row_bytes(const ModelConfig& config, const EvaluationSize& size) {
  const int64_t kv = int64_t{2} * config.num_kv_heads * config.head_dim;
  const int64_t q = int64_t{config.num_qo_heads} * config.head_dim;
  // Rows of the cache; the attention output beside the reference's, and their difference.
  return size.batch_tokens * (kRowCopies * kv + 4 * q) * static_cast<int64_t>(sizeof(float));
}

// None where the embedding is the output projection too.
int64_t output_projection_bytes(const Transformer& model) {
  const ModelConfig& config = model.config();
  if (config.tie_word_embeddings) return 0;
  return int64_t{config.vocab_size} * config.hidden_size *
         static_cast<int64_t>(torch::elementSize(model.compute().dtype));
}

// States of linear layers, once as they are and once as they go on.
int64_t state_bytes(const Transformer& model, int64_t sequences) {
  const auto element = static_cast<int64_t>(torch::elementSize(model.compute().dtype));
  int64_t bytes = 0;
  for (const LayerSpec& layer : model.config().layers) {
    if (layer.delta_net) bytes += delta_state_bytes(*layer.delta_net, element);
  }
  return 2 * bytes * sequences;
}

}  // namespace

MemoryNeeds evaluation_needs(const Transformer& model, const EvaluationSize& size) {
  const ModelConfig& config = model.config();
  MemoryNeeds needs = model_needs(model, size.batch_tokens);
  const MemoryNeed more[] = {
      {.name = "the output projection", .compute_bytes = output_projection_bytes(model)},
      {.name = "logits", .compute_bytes = score_bytes(config.vocab_size)},
      {.name = "rows of the simulated cache",
       .moment = Moment::kPassing,
       .compute_bytes = row_bytes(config, size) + mask_bytes(size)}};
  needs.held.insert(needs.held.end(), std::begin(more), std::end(more));
  if (const int64_t states = state_bytes(model, size.sequences); states > 0) {
    needs.held.push_back({.name = "states of linear layers", .compute_bytes = states});
  }
  if (!model.compute().device.is_cuda()) {
    needs.held.push_back({.name = "freed tensors that malloc keeps", .host_bytes = kHeapBytes});
  }
  needs.streamed_layers = size.all_weights ? needs.all_layers : 2 * largest_layer_bytes(model);
  needs.hidden_of_token *= static_cast<int64_t>(size.methods);
  needs.least = size.all_weights ? "all layers and one batch" : "one layer and one batch";
  needs.hint = size.all_weights ? "raise the limit, or leave out --needle-generate"
                                : "raise the limit, compare fewer methods at once (--compare), or "
                                  "shorten --sequence-length";
  return needs;
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

// Of the largest batch and the longest sequence of all parts.
EvaluationSize size_of(const EvaluateOptions& options, const Transformer& model, size_t methods,
                       const std::vector<const TextTask*>& texts,
                       const std::vector<NeedlePrompt>& prompts) {
  EvaluationSize size{.methods = methods,
                      .all_weights = options.generate_needles && !prompts.empty()};
  const auto look_at = [&](int64_t batch, int64_t longest) {
    size.batch_tokens = std::max(size.batch_tokens, batch);
    size.longest_sequence = std::max(size.longest_sequence, longest);
  };
  for (const TextTask* text : texts) {
    for (const auto& ids : text->batches) look_at(ids.numel(), ids.size(1));
  }
  for (const NeedlePrompt& prompt : prompts) look_at(0, prompt.length);
  if (!prompts.empty()) look_at(largest_needle_batch(model, prompts), 0);
  if (size.all_weights) size.sequences = most_needles_together(model, prompts);
  return size;
}

// Seconds a token of a batch, passing all layers, and of one that is scored.
struct Pace {
  double of_token = 0, of_scored = 0;
};

Pace measured_pace(const EvaluateOptions& options, const Session& session, Transformer& model,
                   const std::vector<Method>& methods, const std::vector<const TextTask*>& texts,
                   const std::vector<NeedlePrompt>& prompts) {
  const torch::Tensor ids = texts.empty() ? make_batches({prompts.front().prompt}, 1).front()
                                          : texts.front()->batches.front();
  Pace pace{.of_token = forward_seconds(options, session, model, methods, ids) /
                        static_cast<double>(ids.numel())};
  if (texts.empty()) return pace;
  const TextTask& text = *texts.front();
  std::vector<TokenScores> scores(methods.size());
  const std::vector<torch::Tensor> states(methods.size(), model.embed(ids));
  pace.of_scored =
      seconds_of([&] { score_batch(model, states, ids, text.first_position, scores); }) /
      static_cast<double>(text.counted(0));
  return pace;
}

double text_seconds(const TextTask& text, const Pace& pace, const Ranks& ranks,
                    torch::Device device) {
  double total = 0;
  for (size_t b = 0; b < text.batches.size(); ++b) {
    total += pace.of_token * static_cast<double>(text.batches[b].numel()) +
             pace.of_scored * static_cast<double>(text.counted(b));
  }
  return total * longest_part(ranks, device, text.batches.size());
}

double needle_seconds(const Transformer& model, const std::vector<NeedlePrompt>& prompts,
                      size_t methods, bool generated, const Pace& pace, const Ranks& ranks) {
  const torch::Device device = model.compute().device;
  int64_t tokens = 0;
  for (const NeedlePrompt& prompt : prompts) {
    tokens += prompt.length + static_cast<int64_t>(prompt.answer.size());
  }
  const size_t batches = num_needle_batches(model, prompts);
  double passes = longest_part(ranks, device, batches);
  if (generated) passes += longest_part(ranks, device, batches * methods);
  return passes * pace.of_token * static_cast<double>(tokens);
}

// Numbers of each counted token and method (TokenScores), and of each prompt.
int64_t checkpoint_bytes(const std::vector<const TextTask*>& texts, int64_t prompts,
                         size_t methods) {
  constexpr int64_t kNumbers = 3;
  int64_t numbers = prompts;
  for (const TextTask* text : texts) numbers += kNumbers * text->tokens;
  return numbers * static_cast<int64_t>(methods * sizeof(double));
}

}  // namespace

EvaluationCost estimate_cost(const EvaluateOptions& options, const Session& session,
                             Transformer& model, const std::vector<Method>& methods,
                             const std::vector<const TextTask*>& texts,
                             const std::vector<NeedlePrompt>& prompts, const Ranks& ranks) {
  const c10::InferenceMode guard;
  const torch::Device device = session.compute.device;
  EvaluationCost cost{.device = describe(session.compute),
                      .sequences = session.corpus.record.sequences_used,
                      .prompts = static_cast<int64_t>(prompts.size()),
                      .methods = methods.size()};
  const EvaluationSize size = size_of(options, model, methods.size(), texts, prompts);
  const MemoryNeeds needs = evaluation_needs(model, size);
  plan_hidden_room(needs, session.memory, device);  // throws where one batch does not fit
  // As short as blocks are: hidden states of one batch.
  cost.peak = memory_peak(needs, {}, size.batch_tokens, device);
  cost.checkpoint_bytes = checkpoint_bytes(texts, cost.prompts, methods.size());

  const Pace pace = measured_pace(options, session, model, methods, texts, prompts);
  if (!texts.empty()) {
    cost.tokens = texts[0]->tokens;
    cost.text_seconds = text_seconds(*texts[0], pace, ranks, device);
  }
  if (texts.size() > 1) cost.separated_seconds = text_seconds(*texts[1], pace, ranks, device);
  cost.needle_seconds =
      needle_seconds(model, prompts, methods.size(), options.generate_needles, pace, ranks);
  return cost;
}

}  // namespace oscar
