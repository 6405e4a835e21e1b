// Lines of a .jsonl corpus to documents: `text`, `prompt` and `completion`, or `messages`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "oscar/data/corpus.h"

namespace oscar {

struct JsonlDocument {
  std::string text;
  bool is_chat = false;
  std::string chat_template;  // name of the template that rendered it
};

// The content of a .jsonl file: one document a line; blank lines are skipped. A line is taken by
// the first of these that it has: `messages` (rendered with the checkpoint's template), `prompt`
// and `completion` (put together), `text`. Throws Error with file and line for malformed JSON,
// invalid UTF-8, lines with none of them, values of other types, and conversations that no built-in
// template can render.
std::vector<JsonlDocument> read_jsonl(std::string_view content, const std::filesystem::path& path,
                                      const CorpusOptions& options);

}  // namespace oscar
