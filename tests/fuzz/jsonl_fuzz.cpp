// A .jsonl corpus under a template that is built in.
#include <algorithm>

#include "fuzz_case.h"
#include "oscar/text/corpus.h"
#include "oscar/text/unicode.h"

namespace oscar::fuzz {

namespace {

constexpr const char* kSmolLm2Template =
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788";

}  // namespace

const MemoryBound kMemoryBound{.per_byte = 512};

void read_untrusted(std::string_view bytes) {
  static const CorpusOptions options{.chat_template_sha256 = kSmolLm2Template};
  const auto documents = read_jsonl(bytes, "input.jsonl", options);
  require(documents.size() <= 1 + static_cast<size_t>(std::count(bytes.begin(), bytes.end(), '\n')),
          "more documents than lines");
  for (const JsonlDocument& document : documents) {
    require(first_invalid_utf8(document.text) == kAllValid, "a document is no UTF-8");
  }
}

}  // namespace oscar::fuzz
