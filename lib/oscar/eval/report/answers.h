// Sample answers beside a report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// Answers of one chat over BF16 and over a bundle's 2-bit cache, for the page and the model card.

struct AnsweredTurn {
  std::string question, bf16, int2;
  int64_t tokens_before = 0;  // of the answers, in the prompt
  bool same = false;          // to the last token
};

struct Answers {
  std::string file;            // its name, for people
  std::string serving_sha256;  // of the bundle that they were made with (bundle/edit.h)
  std::string device;
  int64_t most_tokens = 0;   // of an answer
  int64_t exact_tokens = 0;  // first and last tokens that stay in BF16
  std::vector<AnsweredTurn> turns;
};

// What `python -m oscar_int2 answers` writes with --json, schema "oscar-answers-1": all turns of
// the chat, none selected. Throws Error naming `file` and the key for anything that is missing,
// beyond what is known, of another type or larger than any chat.
Answers read_answers(const Json& json, const std::string& file);

// Throws Error unless `answers` are of the bundle with this serving_sha256.
void require_answers_of(const Answers& answers, const std::string& serving_sha256);

// BF16 beside INT2, turn by turn, as a section of the page and of the card.
std::string answers_html(const Answers& answers);
std::string answers_markdown(const Answers& answers);

}  // namespace oscar
