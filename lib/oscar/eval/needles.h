// Needle tasks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/eval/methods.h"
#include "oscar/model/ranks.h"
#include "oscar/text/chat_template.h"
#include "oscar/text/tokenizer.h"

namespace oscar {

// Needle tasks from a seed: facts hidden in a text of exact length, a question, and its answer.

// datasets/needle: the kinds of task as tasks.json describes them, and the words they use.
struct NeedleBook {
  Json kinds;  // name -> settings
  std::vector<std::string> words;
  std::vector<std::string> kind_names() const;
};

// Throws Error for a folder that is missing, malformed or of another format.
NeedleBook read_needle_book(const std::filesystem::path& folder);

// Throws UsageError, with the kinds that the book has, for one that it does not.
void require_kinds(const NeedleBook& book, const std::vector<std::string>& kinds);

// Facts in the order in which they stand in the text; `asked` marks those the answer needs.
struct NeedleTask {
  std::vector<std::string> facts;
  std::vector<bool> asked;
  std::string question, answer;
};

NeedleTask sample_task(const NeedleBook& book, const std::string& kind, std::mt19937_64& random);

struct NeedlePrompt {
  std::string kind;
  int64_t length = 0;  // tokens of `prompt`, exactly as asked for
  double depth = 0;    // place of the first asked fact, 0 = start of the text, 1 = its end
  std::vector<int32_t> prompt, answer;
};

// What the prompts are made from.
struct NeedleText {
  const Tokenizer* tokenizer = nullptr;
  const std::vector<int32_t>* haystack = nullptr;
  // Text and question become one user message and the answer is the assistant's; without, the
  // prompt is plain text that the answer continues.
  std::optional<ChatFrame> chat = {};
};

// A stretch of the haystack with the task's facts between its tokens and the question behind. The
// first asked fact stands at `depth`, the other asked facts anywhere behind it, the rest anywhere.
// Throws Error when `length` leaves no room, or the haystack is too short for it.
NeedlePrompt make_needle_prompt(const NeedleBook& book, const std::string& kind, int64_t length,
                                double depth, const NeedleText& text, std::mt19937_64& random);

// How many prompts, of what.
struct NeedlePlan {
  std::vector<std::string> kinds;  // empty: all of the book
  std::vector<int64_t> lengths = {1024, 3968};
  std::vector<double> depths = {0.0, 0.25, 0.5, 0.75, 1.0};
  int64_t prompts = 48;  // in all, spread evenly over kinds, lengths and depths
  uint64_t seed = 0;
};

// The prompts of a plan, ordered by length so that those of one length run together.
std::vector<NeedlePrompt> make_needle_prompts(const NeedleBook& book, const NeedlePlan& plan,
                                              const NeedleText& text);

// Needle prompts through every method: teacher-forced, and by greedy generation.

// One prompt under one method. `margin`: the smallest, over the answer's tokens, of the log
// probability of the right token minus that of the best other one; passes iff it is positive.
struct NeedleOutcome {
  bool passes = false;
  double margin = 0;
};

// passes from its margin.
inline NeedleOutcome needle_outcome(double margin) { return {margin > 0, margin}; }

// Batches in which the prompts and their answers run, the most prompts of one, the tokens of the
// largest, and those of all batches from prompt `done` on.
size_t num_needle_batches(const Transformer& model, const std::vector<NeedlePrompt>& prompts);
int64_t most_needles_together(const Transformer& model, const std::vector<NeedlePrompt>& prompts);
int64_t largest_needle_batch(const Transformer& model, const std::vector<NeedlePrompt>& prompts);
int64_t needle_tokens(const Transformer& model, const std::vector<NeedlePrompt>& prompts,
                      size_t done);

// Greedy continuation of equally long prompts: ids [prompts, length] int64 -> [prompts, tokens]
// int64 on the CPU. `engine` starts with an empty cache; `position_offset` is added to every
// position. weights[l]: Transformer::load_layer(l).
torch::Tensor generate_greedily(Transformer& model,
                                const std::vector<std::shared_ptr<const LayerWeights>>& weights,
                                CacheEngine& engine, const torch::Tensor& ids, int64_t tokens,
                                int64_t position_offset = 0);

// Continues outcomes[method][prompt] from the first `done` prompts, which it holds, to all of
// `prompts`; of several processes those of the first, and each passes its own batches. The right
// answer is fed token by token; greedy generation gives the same verdict, because it leaves the
// right path exactly when a margin is not positive. `position_offset` is added to every position.
// `counted` is called behind each batch.
void run_needles_forced(Transformer& model, const std::vector<Method>& methods,
                        const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                        int64_t position_offset, Ranks& ranks, size_t done,
                        std::vector<std::vector<NeedleOutcome>>& outcomes,
                        const std::function<void()>& counted, Progress& progress);

// Continues `passes`, which holds `done` of them, in the same way: greedy generation from a cache
// that each method quantizes as it grows, one method after another, of each all prompts in order.
// All layers' weights stay on the device. `counted` is called behind each batch.
void run_needles_generated(Transformer& model, const std::vector<Method>& methods,
                           const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                           int64_t position_offset, Ranks& ranks, size_t done,
                           std::vector<bool>& passes, const std::function<void()>& counted,
                           Progress& progress);

}  // namespace oscar
