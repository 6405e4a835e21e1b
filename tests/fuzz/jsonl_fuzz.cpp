// A .jsonl corpus of plain texts.
#include <algorithm>

#include "fuzz_case.h"
#include "oscar/text/corpus.h"
#include "oscar/text/unicode.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 512};

void read_untrusted(std::string_view bytes) {
  const auto documents = read_plain_jsonl(bytes);
  if (!documents) return;  // chats: Python's to read
  const auto lines = 1 + std::count(bytes.begin(), bytes.end(), '\n');
  require(documents->size() <= static_cast<size_t>(lines), "more documents than lines");
  for (const ReadDocument& document : *documents) {
    require(document.place >= 1 && document.place <= lines, "a line behind the last");
    require(document.text.empty() || document.error.empty(), "a text and an error");
    require(first_invalid_utf8(document.text) == kAllValid, "a document is no UTF-8");
  }
}

}  // namespace oscar::fuzz
