// Counting brackets outside strings, and cutting the parser's messages.
#include "oscar/base/json_text.h"

#include "oscar/base/error.h"

namespace oscar {

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
