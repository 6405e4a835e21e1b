// The chat templates of a folder and its special tokens, out of tokenizer_config.json.
#include "fuzz_case.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/text/chat_template.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 128};

void read_untrusted(std::string_view bytes) {
  scratch_file("tokenizer_config.json", bytes);
  const ChatTemplate found = read_chat_template(scratch_folder());
  size_t size = 0;
  for (const auto& [name, text] : found.texts) size += text.size();
  for (const auto& [name, text] : found.special_tokens) size += text.size();
  require(size <= bytes.size(), "templates and tokens longer than their file");
}

}  // namespace oscar::fuzz
