// Chats to text, for templates that are known by their hash.
#include "oscar/text/chat_template.h"

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/text/unicode.h"

namespace oscar {

// The built-in templates and the table of hashes that they stand for.

namespace {

struct KnownTemplate {
  std::string_view sha256;
  ChatTemplate chat_template;
};

// Text of `chat_template` in tokenizer_config.json (or chat_template.jinja), hashed as UTF-8, and
// the models that publish it.
constexpr std::array<KnownTemplate, 8> kKnownTemplates = {{
    // Qwen2.5 Instruct
    {"cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f", ChatTemplate::kQwen25},
    // Qwen3, thinking and not
    {"a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8", ChatTemplate::kQwen3},
    // Qwen3 Instruct 2507
    {"64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
     ChatTemplate::kQwen3Instruct},
    // Llama 3 Instruct
    {"ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122", ChatTemplate::kLlama3},
    // Llama 3.1 Instruct; 3.2 and 3.3 write today's date, so their text is not reproducible
    {"e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65", ChatTemplate::kLlama31},
    // SmolLM2 Instruct
    {"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788", ChatTemplate::kSmolLm2},
    // Gemma 1 and 2 Instruct
    {"ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6", ChatTemplate::kGemma},
    // Gemma 3 Instruct
    {"7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4", ChatTemplate::kGemma3},
}};

// White space to Python's str.strip, which Jinja's trim calls: Unicode's and four separators.
bool is_python_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

std::string_view python_strip(std::string_view text) {
  while (!text.empty()) {
    size_t next = 0;
    if (!is_python_space(next_code_point(text, next))) break;
    text.remove_prefix(next);
  }
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while ((static_cast<uint8_t>(text[last]) & 0xC0) == 0x80) --last;
    size_t next = last;
    if (!is_python_space(next_code_point(text, next))) break;
    text = text.substr(0, last);
  }
  return text;
}

std::string_view strip_line_breaks(std::string_view text, bool left, bool right) {
  while (left && !text.empty() && text.front() == '\n') text.remove_prefix(1);
  while (right && !text.empty() && text.back() == '\n') text.remove_suffix(1);
  return text;
}

std::string join(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

std::string chatml_turn(std::string_view role, std::string_view content) {
  return join({"<|im_start|>", role, "\n", content, "<|im_end|>\n"});
}

// A turn for every message, as it is.
std::string render_chatml(const std::vector<ChatMessage>& messages) {
  std::string text;
  for (const ChatMessage& message : messages) text += chatml_turn(message.role, message.content);
  return text;
}

// A system message of the template's own when the first message is none.
std::string render_chatml_with(std::string_view system, const std::vector<ChatMessage>& messages) {
  const bool has_system = messages.front().role == "system";
  return (has_system ? "" : chatml_turn("system", system)) + render_chatml(messages);
}

bool is_tool_response(std::string_view content) {
  constexpr std::string_view kBegin = "<tool_response>", kEnd = "</tool_response>";
  return content.size() >= kEnd.size() && content.substr(0, kBegin.size()) == kBegin &&
         content.substr(content.size() - kEnd.size()) == kEnd;
}

// What the assistant thought and what it said.
struct Thought {
  std::string_view reasoning, answer;
};

Thought split_thought(std::string_view content) {
  constexpr std::string_view kBegin = "<think>", kEnd = "</think>";
  const size_t first_end = content.find(kEnd);
  if (first_end == std::string_view::npos) return {"", content};
  std::string_view reasoning = strip_line_breaks(content.substr(0, first_end), false, true);
  const size_t begin = reasoning.rfind(kBegin);
  if (begin != std::string_view::npos) reasoning.remove_prefix(begin + kBegin.size());
  const std::string_view answer = content.substr(content.rfind(kEnd) + kEnd.size());
  return {strip_line_breaks(reasoning, true, false), strip_line_breaks(answer, true, false)};
}

// Qwen3: thoughts stay only behind the last question.
std::string render_qwen3(const std::vector<ChatMessage>& messages) {
  size_t last_query = messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role == "user" && !is_tool_response(messages[i].content)) {
      last_query = i;
      break;
    }
  }
  std::string text;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role != "assistant") {
      text += chatml_turn(message.role, message.content);
      continue;
    }
    const Thought thought = split_thought(message.content);
    const bool is_last = i + 1 == messages.size();
    if (i > last_query && (is_last || !thought.reasoning.empty())) {
      text += chatml_turn("assistant",
                          join({"<think>\n", strip_line_breaks(thought.reasoning, true, true),
                                "\n</think>\n\n", strip_line_breaks(thought.answer, true, false)}));
    } else {
      text += chatml_turn("assistant", thought.answer);
    }
  }
  return text;
}

std::string llama3_header(std::string_view role) {
  return join({"<|start_header_id|>", role, "<|end_header_id|>\n\n"});
}

std::string llama3_turn(const ChatMessage& message) {
  return join({llama3_header(message.role), python_strip(message.content), "<|eot_id|>"});
}

std::string render_llama3(const std::vector<ChatMessage>& messages) {
  std::string text = "<|begin_of_text|>";
  for (const ChatMessage& message : messages) text += llama3_turn(message);
  return text;
}

// The system turn is always there, with two fixed dates before what the first message says.
std::string render_llama31(const std::vector<ChatMessage>& messages) {
  const bool has_system = messages.front().role == "system";
  std::string text = join({"<|begin_of_text|>", llama3_header("system"),
                           "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
                           has_system ? python_strip(messages.front().content) : std::string_view{},
                           "<|eot_id|>"});
  for (size_t i = has_system ? 1 : 0; i < messages.size(); ++i) text += llama3_turn(messages[i]);
  return text;
}

// Gemma: user and assistant ("model") by turns. What the system says begins the first turn of Gemma
// 3; the ones before know no system.
std::string render_gemma(std::span<const ChatMessage> messages, bool takes_system) {
  std::string text = "<bos>", first;
  if (messages.front().role == "system") {
    if (!takes_system) {
      throw Error({.what = "the chat template knows no system message",
                   .expected = "a user's first",
                   .found = "system"});
    }
    first = messages.front().content + "\n\n";
    messages = messages.subspan(1);
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if ((message.role == "user") != (i % 2 == 0)) {
      throw Error({.what = "the chat template wants user and assistant by turns",
                   .expected = i % 2 == 0 ? "user" : "assistant",
                   .found = message.role});
    }
    text += join({"<start_of_turn>", message.role == "assistant" ? "model" : message.role, "\n",
                  i == 0 ? std::string_view(first) : std::string_view(),
                  python_strip(message.content), "<end_of_turn>\n"});
  }
  return text;
}

}  // namespace

std::optional<ChatTemplate> known_chat_template(const std::string& chat_template_sha256) {
  const auto* const known =
      std::find_if(kKnownTemplates.begin(), kKnownTemplates.end(),
                   [&](const KnownTemplate& k) { return k.sha256 == chat_template_sha256; });
  if (known == kKnownTemplates.end()) return std::nullopt;
  return known->chat_template;
}

const char* chat_template_name(ChatTemplate chat_template) {
  constexpr std::array<const char*, 8> kNames = {"qwen2.5",  "qwen3",   "qwen3-instruct", "llama3",
                                                 "llama3.1", "smollm2", "gemma",          "gemma3"};
  return kNames[static_cast<size_t>(chat_template)];
}

std::string render_chat(ChatTemplate chat_template, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt) {
  if (messages.empty()) throw Error({.what = "conversation has no messages"});
  for (const ChatMessage& message : messages) {
    if (message.role == "system" || message.role == "user" || message.role == "assistant") continue;
    throw Error({.what = "message of a role that the built-in templates do not render",
                 .expected = "system, user or assistant",
                 .found = message.role});
  }
  constexpr const char* kChatmlPrompt = "<|im_start|>assistant\n";
  const auto ends_with = [&](std::string text, const std::string& prompt) {
    if (add_generation_prompt) text += prompt;
    return text;
  };
  switch (chat_template) {
    case ChatTemplate::kQwen25:
      return ends_with(
          render_chatml_with("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
                             messages),
          kChatmlPrompt);
    case ChatTemplate::kQwen3:
      return ends_with(render_qwen3(messages), kChatmlPrompt);
    case ChatTemplate::kQwen3Instruct:
      return ends_with(render_chatml(messages), kChatmlPrompt);
    case ChatTemplate::kLlama3:
      return ends_with(render_llama3(messages), llama3_header("assistant"));
    case ChatTemplate::kLlama31:
      return ends_with(render_llama31(messages), llama3_header("assistant"));
    case ChatTemplate::kSmolLm2:
      return ends_with(
          render_chatml_with("You are a helpful AI assistant named SmolLM, trained by Hugging Face",
                             messages),
          kChatmlPrompt);
    case ChatTemplate::kGemma:
    case ChatTemplate::kGemma3:
      return ends_with(render_gemma(messages, chat_template == ChatTemplate::kGemma3),
                       "<start_of_turn>model\n");
  }
  throw Error({.what = "unknown chat template"});
}

}  // namespace oscar
