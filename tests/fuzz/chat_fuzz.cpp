// Conversations under every built-in template: role and content in turn, each ended by a NUL.
#include "fuzz_case.h"
#include "oscar/text/chat_template.h"
#include "oscar/text/unicode.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 1024};

void read_untrusted(std::string_view bytes) {
  std::vector<ChatMessage> messages;
  while (!bytes.empty()) {
    const auto [role, behind] = cut_at_nul(bytes);
    const auto [content, rest] = cut_at_nul(behind);
    messages.push_back({replace_invalid_utf8(role), replace_invalid_utf8(content)});
    bytes = rest;
  }
  size_t most = 4096;  // the system prompts that templates bring along
  for (const ChatMessage& message : messages) {
    most += message.role.size() + message.content.size() + 512;
  }
  for (int i = 0; i <= static_cast<int>(ChatTemplate::kGemma3); ++i) {
    for (const bool prompt : {false, true}) {
      accepted([&] {
        const std::string text = render_chat(static_cast<ChatTemplate>(i), messages, prompt);
        require(text.size() <= most, "a conversation grows out of proportion");
        require(first_invalid_utf8(text) == kAllValid, "a conversation is no UTF-8");
      });
    }
  }
}

}  // namespace oscar::fuzz
