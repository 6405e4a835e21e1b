// JSON, read strictly and in linear time, and written.
#include "oscar/base/json.h"

#include "oscar/base/error.h"
#include "oscar/base/files.h"

namespace oscar {

// Reading JSON and text files with errors that say where.

std::string read_text_file(const std::filesystem::path& path, size_t max_bytes) {
  const InputFile file(path);
  const auto size = static_cast<size_t>(file.bytes());
  if (size > max_bytes) {
    throw Error({.what = "file is larger than this program accepts",
                 .where = path.string(),
                 .expected = std::to_string(max_bytes) + " bytes at most",
                 .found = std::to_string(size) + " bytes"});
  }
  std::string text(size, '\0');
  if (file.read(text.data(), size) != size) {
    throw Error({.what = "file ended while it was read", .where = path.string()});
  }
  return text;
}

Json parse_json(std::string_view text, const std::string& source) {
  return parse_strict_json<Json>(text, source);
}

Json read_json_file(const std::filesystem::path& path) {
  return parse_json(read_text_file(path, kMaxJsonBytes), path.string());
}

// Counting brackets outside strings, and cutting the parser's messages.

void require_shallow_json(std::string_view text, const std::string& source) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;  // whatever is escaped does not end the string
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == ']' || c == '}') {
      --depth;
    } else if ((c == '[' || c == '{') && ++depth > kMaxJsonDepth) {
      throw Error({.what = "JSON values are nested too deeply",
                   .where = source + ", byte " + std::to_string(i),
                   .expected = "at most " + std::to_string(kMaxJsonDepth) + " levels",
                   .hint = "the file is damaged or hostile; fetch it again"});
    }
  }
}

std::string json_problem(const std::exception& error, std::string_view text) {
  std::string problem = error.what();
  const size_t name_end = problem.find("] ");
  if (problem.starts_with("[json.exception.") && name_end != std::string::npos) {
    problem.erase(0, name_end + 2);
  }
  constexpr std::string_view kOnlyLine = "line 1, ";
  const size_t line = problem.find(kOnlyLine);
  if (text.find('\n') == std::string_view::npos && line != std::string::npos) {
    problem.erase(line, kOnlyLine.size());
  }
  return problem;
}

}  // namespace oscar
