// The built-in templates and the table of hashes that they stand for.
#include "oscar/data/chat_template.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/data/unicode.h"

namespace oscar {
namespace {

struct KnownTemplate {
  std::string_view sha256;
  ChatTemplate chat_template;
};

// Text of `chat_template` in tokenizer_config.json (or chat_template.jinja), hashed as UTF-8.
constexpr std::array<KnownTemplate, 4> kKnownTemplates = {{
    // tests/golden/chat_templates/chatml.jinja
    {"502e709c89fe4a77335e8ee0a02184e9d1401721e5fc7c7da88eb68e4564f49d", ChatTemplate::kChatMl},
    // tests/golden/chat_templates/qwen3.jinja
    {"be3f57c1e91a1c2dafeb1bae0df33cfe3f4621388036208457f389d90be17396", ChatTemplate::kQwen3},
    // tests/golden/chat_templates/llama3.jinja
    {"01bc989d6d3e47b2a58ca7fd9142939c24946f382a9165652f080c4f4c786ee0", ChatTemplate::kLlama3},
    // tests/golden/chat_templates/glm4.jinja
    {"4ec113cee6109cd5e427439705dded248fabc54dec9c92ba4fed65acff5f964d", ChatTemplate::kGlm4},
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

// Qwen2.5: a default system message when the first message is none.
std::string render_chatml(const std::vector<ChatMessage>& messages) {
  std::string text;
  if (messages.front().role != "system") {
    text = chatml_turn("system",
                       "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
  }
  for (const ChatMessage& message : messages) text += chatml_turn(message.role, message.content);
  return text;
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

std::string render_llama3(const std::vector<ChatMessage>& messages) {
  std::string text = "<|begin_of_text|>";
  for (const ChatMessage& message : messages) {
    text += join({llama3_header(message.role), python_strip(message.content), "<|eot_id|>"});
  }
  return text;
}

// GLM-4 (0414): system messages first, wherever they stand.
std::string render_glm4(const std::vector<ChatMessage>& messages) {
  std::string text = "[gMASK]<sop>";
  for (const bool system : {true, false}) {
    for (const ChatMessage& message : messages) {
      if ((message.role == "system") != system) continue;
      text += join({"<|", message.role, "|>\n", message.content});
    }
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
  constexpr std::array<const char*, 4> kNames = {"chatml", "qwen3", "llama3", "glm4"};
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
  switch (chat_template) {
    case ChatTemplate::kChatMl:
      return render_chatml(messages) + (add_generation_prompt ? "<|im_start|>assistant\n" : "");
    case ChatTemplate::kQwen3:
      return render_qwen3(messages) + (add_generation_prompt ? "<|im_start|>assistant\n" : "");
    case ChatTemplate::kLlama3:
      return render_llama3(messages) + (add_generation_prompt ? llama3_header("assistant") : "");
    case ChatTemplate::kGlm4:
      return render_glm4(messages) + (add_generation_prompt ? "<|assistant|>" : "");
  }
  throw Error({.what = "unknown chat template"});
}

}  // namespace oscar
