// The chat template of a folder, out of tokenizer_config.json.
#include "fuzz_case.h"
#include "oscar/base/sha256.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/text/chat_template.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 128};

void read_untrusted(std::string_view bytes) {
  scratch_file("tokenizer_config.json", bytes);
  const auto text = read_chat_template(scratch_folder());
  if (text) require(text->size() <= bytes.size(), "a template longer than its file");
}

}  // namespace oscar::fuzz
