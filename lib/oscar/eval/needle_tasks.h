// Needle tasks from a seed: facts hidden in a text of exact length, a question, and its answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/data/chat_template.h"
#include "oscar/data/tokenizer.h"

namespace oscar {

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
  std::optional<ChatTemplate> chat_template = {};
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

}  // namespace oscar
