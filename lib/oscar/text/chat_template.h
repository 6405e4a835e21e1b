// Documents of text files, and chats rendered by a model's template, through the Python package.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

// The templates (Jinja) of a checkpoint, and the tokens that they may write.
struct ChatTemplate {
  std::map<std::string, std::string> texts;           // by name: "default", "tool_use", ...
  std::map<std::string, std::string> special_tokens;  // bos_token, eos_token, ...

  bool empty() const { return texts.empty(); }
  // For logs and records: "the model's own (SHA256)" of the default one, 12 digits; "none".
  std::string name() const;
};

// One line, entry or row of a file.
struct ReadDocument {
  int64_t place = 0;  // counted from 1, lines without a row included
  std::string text;   // UTF-8; of a conversation as the template renders it
  bool is_chat = false;
  std::string error;  // why it holds no document; the rest is empty then
};

// The documents of a file's `content`, by `python -m oscar_int2 render`: .jsonl, .json, .parquet
// and .txt, also with .gz or .zst behind it, by the name of `file`. python/oscar_int2/documents.py
// says what a row may hold. The Python is $OSCAR_PYTHON, else one beside the program, else that of
// the build's set-up, else python3; templates run in Jinja's sandbox, in a process with limits of
// memory and time. Throws Error naming the file for one that cannot be read, and the package that
// is missing.
std::vector<ReadDocument> read_documents(std::string_view content, const std::string& file,
                                         const ChatTemplate& chat_template);

// The text around a user's message in a conversation of that alone, where the assistant answers
// next. Throws Error when the template refuses it.
struct ChatFrame {
  std::string before, behind;
};
ChatFrame make_chat_frame(const ChatTemplate& chat_template);

}  // namespace oscar
