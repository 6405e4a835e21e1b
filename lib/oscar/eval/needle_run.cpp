// Batches of needle prompts of one length.
#include "oscar/eval/needle_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/eval/multi_forward.h"
#include "oscar/executor/in_turn.h"

namespace oscar {
namespace {

constexpr int64_t kHostPromptTokens = 8192;
constexpr int64_t kDevicePromptTokens = 131072;

struct PromptBatch {
  size_t first = 0, count = 0;
  int64_t length = 0, answer = 0;  // tokens of each prompt, of the longest answer
};

std::vector<PromptBatch> batch_prompts(const Transformer& model,
                                       const std::vector<NeedlePrompt>& prompts) {
  const int64_t limit = model.compute().device.is_cuda() ? kDevicePromptTokens : kHostPromptTokens;
  std::vector<PromptBatch> batches;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t length = prompts[i].length;
    if (batches.empty() || batches.back().length != length ||
        static_cast<int64_t>(batches.back().count + 1) * length > limit) {
      batches.push_back({i, 0, length, 0});
    }
    ++batches.back().count;
    batches.back().answer =
        std::max(batches.back().answer, static_cast<int64_t>(prompts[i].answer.size()));
  }
  return batches;
}

// [count, length + answer] int64: prompts with their answers, zeros behind shorter ones.
torch::Tensor batch_ids(const std::vector<NeedlePrompt>& prompts, const PromptBatch& batch) {
  auto ids =
      torch::zeros({static_cast<int64_t>(batch.count), batch.length + batch.answer}, torch::kInt64);
  for (size_t row = 0; row < batch.count; ++row) {
    const NeedlePrompt& prompt = prompts[batch.first + row];
    auto* out = ids.data_ptr<int64_t>() + static_cast<int64_t>(row) * ids.size(1);
    out = std::copy(prompt.prompt.begin(), prompt.prompt.end(), out);
    std::copy(prompt.answer.begin(), prompt.answer.end(), out);
  }
  return ids;
}

// Of what a process says of a batch.
void require_size(const std::vector<uint8_t>& bytes, size_t size) {
  if (bytes.size() == size) return;
  throw Error({.what = "outcomes of another number of prompts than the batch's",
               .expected = fmt::format("{} bytes", size),
               .found = std::to_string(bytes.size())});
}

// The reference too needs an engine that keeps a cache.
std::unique_ptr<CacheEngine> generating_engine(const Method& method, const ModelConfig& config,
                                               const EngineChoice& choice) {
  std::unique_ptr<CacheEngine> engine = make_engine(method, config, choice);
  if (engine) return engine;
  Method exact = method;
  exact.reference = false;
  return make_engine(exact, config, {});
}

// Margins of each answer token, [count, answer] float64 on the CPU.
torch::Tensor answer_margins(Transformer& model, const torch::Tensor& hidden,
                             const torch::Tensor& ids, const PromptBatch& batch) {
  const auto device = model.compute().device;
  const auto logits =
      model.logits(hidden.slice(1, batch.length - 1, batch.length + batch.answer - 1).to(device));
  const auto wanted = ids.slice(1, batch.length).to(device).unsqueeze(-1);
  const auto right = logits.gather(-1, wanted).squeeze(-1);
  const auto others = logits.scatter(-1, wanted, -INFINITY).amax(-1);
  return right.sub(others).to(torch::kCPU, torch::kFloat64).contiguous();
}

}  // namespace

size_t num_needle_batches(const Transformer& model, const std::vector<NeedlePrompt>& prompts) {
  return batch_prompts(model, prompts).size();
}

int64_t largest_needle_batch(const Transformer& model, const std::vector<NeedlePrompt>& prompts) {
  int64_t tokens = 0;
  for (const PromptBatch& batch : batch_prompts(model, prompts)) {
    tokens = std::max(tokens, static_cast<int64_t>(batch.count) * (batch.length + batch.answer));
  }
  return tokens;
}

torch::Tensor generate_greedily(Transformer& model,
                                const std::vector<std::shared_ptr<const LayerWeights>>& weights,
                                CacheEngine& engine, const torch::Tensor& ids, int64_t tokens) {
  const c10::InferenceMode guard;
  engine.set_prompt(ids.size(1));
  engine.keep_cache(ids.size(1) + tokens);
  auto answers = torch::empty({ids.size(0), tokens}, torch::kInt64);
  auto next = ids;
  int64_t position = 0;
  for (int64_t step = 0; step < tokens; ++step) {
    auto hidden = model.embed(next);
    for (size_t layer = 0; layer < weights.size(); ++layer) {
      hidden = model.forward_layer(static_cast<int>(layer), *weights[layer], hidden, nullptr,
                                   &engine, position);
    }
    position += next.size(1);
    next = model.logits(hidden.slice(1, hidden.size(1) - 1)).argmax(-1).to(torch::kCPU);
    answers.slice(1, step, step + 1).copy_(next);
  }
  return answers;
}

namespace {

// The smallest margin of each prompt's answer, [count].
std::vector<double> smallest_margins(Transformer& model, const torch::Tensor& hidden,
                                     const torch::Tensor& ids, const PromptBatch& batch,
                                     const std::vector<NeedlePrompt>& prompts,
                                     const std::string& method) {
  const auto margins = answer_margins(model, hidden, ids, batch);
  if (!margins.isfinite().all().item<bool>()) {
    throw Error({.what = "a prediction is not finite",
                 .where = fmt::format("needle prompts {} to {}, method {}", batch.first,
                                      batch.first + batch.count - 1, method),
                 .hint = "run with --dtype fp32"});
  }
  std::vector<double> smallest;
  for (size_t row = 0; row < batch.count; ++row) {
    const auto* values = margins.data_ptr<double>() + static_cast<int64_t>(row) * batch.answer;
    smallest.push_back(
        *std::min_element(values, values + prompts[batch.first + row].answer.size()));
  }
  return smallest;
}

}  // namespace

void run_needles_forced(Transformer& model, const std::vector<Method>& methods,
                        const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                        Ranks& ranks, size_t done,
                        std::vector<std::vector<NeedleOutcome>>& outcomes,
                        const std::function<void()>& counted, Progress& progress) {
  const c10::InferenceMode guard;
  std::vector<std::unique_ptr<CacheEngine>> engines;
  for (const Method& method : methods) {
    engines.push_back(make_engine(method, model.config(), choice));
  }
  const std::vector<PromptBatch> batches = batch_prompts(model, prompts);
  // The margins of a batch, one method after another.
  const auto pass = [&](const std::vector<size_t>& own, const PieceDone& passed) {
    for (const size_t index : own) {
      const PromptBatch& batch = batches[index];
      MultiForward forward{.engines = {}, .position_offset = 0, .first_query = batch.length};
      for (const auto& engine : engines) {
        if (engine) engine->set_prompt(batch.length);
        forward.engines.push_back(engine.get());
      }
      const auto ids = batch_ids(prompts, batch);
      std::vector<double> margins;
      const auto score = [&](size_t, const std::vector<torch::Tensor>& hidden,
                             const std::vector<OutputError>&) {
        for (size_t m = 0; m < methods.size(); ++m) {
          const auto more =
              smallest_margins(model, hidden[m], ids, batch, prompts, methods[m].name);
          margins.insert(margins.end(), more.begin(), more.end());
        }
      };
      run_multi_forward(model, forward, {ids}, score, progress);
      const auto* bytes = reinterpret_cast<const uint8_t*>(margins.data());
      passed(index, {bytes, bytes + margins.size() * sizeof(double)});
    }
  };
  const auto take = [&](size_t index, const std::vector<uint8_t>& bytes, bool own) {
    const PromptBatch& batch = batches[index];
    std::vector<double> margins(methods.size() * batch.count);
    require_size(bytes, margins.size() * sizeof(double));
    std::memcpy(margins.data(), bytes.data(), bytes.size());
    outcomes.resize(methods.size());
    for (size_t i = 0; i < margins.size(); ++i) {
      outcomes[i / batch.count].push_back(needle_outcome(margins[i]));
    }
    counted();
    if (own) return;
    const auto tokens = static_cast<int64_t>(batch.count) * (batch.length + batch.answer);
    progress.advance(tokens * model.config().num_layers);
  };
  const auto first = std::ranges::lower_bound(batches, done, {}, &PromptBatch::first);
  work_in_turn(ranks, static_cast<size_t>(first - batches.begin()), batches.size(), pass, take);
}

void run_needles_generated(Transformer& model, const std::vector<Method>& methods,
                           const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                           Ranks& ranks, size_t done, std::vector<bool>& passes,
                           const std::function<void()>& counted, Progress& progress) {
  const c10::InferenceMode guard;
  const std::vector<PromptBatch> batches = batch_prompts(model, prompts);
  const auto batch_of = [&](size_t piece) { return batches[piece % batches.size()]; };
  // Of each answer of a batch, whether it is right.
  const auto generate = [&](const std::vector<size_t>& own, const PieceDone& passed) {
    if (own.empty()) return;
    std::vector<std::shared_ptr<const LayerWeights>> weights;
    for (int layer = 0; layer < model.config().num_layers; ++layer) {
      stop_if_requested(kStoppedEvaluation);
      weights.push_back(model.load_layer(layer));
    }
    std::unique_ptr<CacheEngine> engine;
    size_t method = methods.size();  // of the engine
    for (const size_t piece : own) {
      stop_if_requested(kStoppedEvaluation);
      if (const size_t wanted = piece / batches.size(); wanted != method) {
        method = wanted;
        engine = generating_engine(methods[method], model.config(), choice);
      }
      const TakesItsTime until_a_batch_ends;
      const PromptBatch batch = batch_of(piece);
      const auto ids = batch_ids(prompts, batch).slice(1, 0, batch.length);
      const auto answers = generate_greedily(model, weights, *engine, ids, batch.answer);
      std::vector<uint8_t> right;
      for (size_t row = 0; row < batch.count; ++row) {
        const auto& wanted = prompts[batch.first + row].answer;
        const auto* got = answers.data_ptr<int64_t>() + static_cast<int64_t>(row) * answers.size(1);
        right.push_back(std::equal(wanted.begin(), wanted.end(), got) ? 1 : 0);
      }
      passed(piece, std::move(right));
    }
  };
  const auto take = [&](size_t piece, const std::vector<uint8_t>& right, bool) {
    const PromptBatch batch = batch_of(piece);
    require_size(right, batch.count);
    for (const uint8_t pass : right) passes.push_back(pass != 0);
    counted();
    progress.advance(static_cast<int64_t>(batch.count) * batch.length);
  };
  const size_t pieces = methods.size() * batches.size();
  size_t begin = 0;
  while (begin < pieces && begin / batches.size() * prompts.size() + batch_of(begin).first < done) {
    ++begin;
  }
  work_in_turn(ranks, begin, pieces, generate, take);
}

}  // namespace oscar
