// Reading .jsonl line by line.
#include "oscar/data/jsonl.h"

#include <optional>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/data/chat_template.h"
#include "oscar/data/unicode.h"

namespace oscar {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& where,
                       const std::string& expected = "", const std::string& hint = "") {
  throw Error({.what = what, .where = where, .expected = expected, .hint = hint});
}

const std::string& text_member(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    fail("'" + std::string(key) + "' is not a string", where, "a string");
  }
  return found->get_ref<const std::string&>();
}

// What a template would read but the built-in ones cannot.
void refuse_keys(const Json& object, std::initializer_list<const char*> keys,
                 const std::string& where, const std::string& hint) {
  for (const char* key : keys) {
    const auto found = object.find(key);
    if (found == object.end() || found->is_null() || found->empty()) continue;
    fail("conversation uses '" + std::string(key) + "', which the built-in templates do not render",
         where, "", hint);
  }
}

std::vector<ChatMessage> read_messages(const Json& line, const std::string& where,
                                       const std::string& hint) {
  const Json& list = line.at("messages");
  if (!list.is_array() || list.empty()) fail("'messages' is not a list of messages", where);
  refuse_keys(line, {"tools", "documents", "functions"}, where, hint);
  std::vector<ChatMessage> messages;
  for (const Json& message : list) {
    const std::string place = where + ", message " + std::to_string(messages.size());
    if (!message.is_object()) fail("message is not an object", place);
    refuse_keys(
        message,
        {"tool_calls", "tool_call_id", "reasoning_content", "metadata", "tools", "function_call"},
        place, hint);
    messages.push_back(
        {text_member(message, "role", place), text_member(message, "content", place)});
  }
  return messages;
}

// The line that renders the file elsewhere.
std::string way_out(const std::filesystem::path& path, const CorpusOptions& options) {
  std::filesystem::path ids = path;
  ids.replace_extension(".npy");
  return "run: scripts/prepare_corpus.py " + options.model + " " + path.string() + " " +
         ids.string() + ", then pass " + ids.string();
}

JsonlDocument read_line(const Json& line, const std::string& where, const std::string& hint,
                        std::optional<ChatTemplate> chat_template) {
  if (!line.is_object()) fail("line is not a JSON object", where);
  if (line.contains("messages")) {
    if (!chat_template) {
      fail("the checkpoint's chat template is not one of the built-in ones", where, "", hint);
    }
    try {
      return {render_chat(*chat_template, read_messages(line, where, hint), false), true,
              chat_template_name(*chat_template)};
    } catch (const Error& error) {
      if (!error.info().where.empty()) throw;
      ErrorInfo info = error.info();
      info.where = where;
      if (info.hint.empty()) info.hint = hint;
      throw Error(std::move(info));
    }
  }
  if (line.contains("prompt") || line.contains("completion")) {
    return {text_member(line, "prompt", where) + text_member(line, "completion", where), false, ""};
  }
  if (!line.contains("text")) {
    fail("line holds no document", where,
         "one of 'messages', 'prompt' with 'completion', or 'text'");
  }
  return {text_member(line, "text", where), false, ""};
}

}  // namespace

std::vector<JsonlDocument> read_jsonl(std::string_view content, const std::filesystem::path& path,
                                      const CorpusOptions& options) {
  const std::string hint = way_out(path, options);
  const auto chat_template = known_chat_template(options.chat_template_sha256);
  std::vector<JsonlDocument> documents;
  size_t number = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view line = content.substr(begin, end - begin);
    const std::string where = path.string() + ", line " + std::to_string(++number);
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    require_valid_utf8(line, where);
    documents.push_back(read_line(parse_json(line, where), where, hint, chat_template));
  }
  return documents;
}

}  // namespace oscar
