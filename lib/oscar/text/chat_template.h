// Chats to text, for templates that are known by their hash.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace oscar {

// Built-in chat templates, used only for checkpoints whose template text has a known hash.

struct ChatMessage {
  std::string role;     // "system", "user" or "assistant"
  std::string content;  // UTF-8
};

enum class ChatTemplate {
  kQwen25,
  kQwen3,
  kQwen3Instruct,
  kLlama3,
  kLlama31,
  kSmolLm2,
  kGemma,
  kGemma3,
};

// The built-in template whose reference text has this sha256, if any.
std::optional<ChatTemplate> known_chat_template(const std::string& chat_template_sha256);

const char* chat_template_name(ChatTemplate chat_template);

// Renders a conversation as transformers' apply_chat_template does (no generation prompt unless
// asked for). Throws Error for roles or orders that the template refuses.
std::string render_chat(ChatTemplate chat_template, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt);

}  // namespace oscar
