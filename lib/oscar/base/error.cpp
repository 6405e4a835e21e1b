// Layout of an error text: the sentence first, then one indented line per known part.
#include "oscar/base/error.h"

namespace oscar {
namespace {

std::string error_text(const ErrorInfo& info) {
  std::string text = info.what;
  const auto add_line = [&text](const char* label, const std::string& value) {
    if (!value.empty()) text += std::string("\n  ") + label + value;
  };
  add_line("where:    ", info.where);
  add_line("expected: ", info.expected);
  add_line("found:    ", info.found);
  add_line("hint:     ", info.hint);
  return text;
}

}  // namespace

Error::Error(ErrorInfo info) : std::runtime_error(error_text(info)), info_(std::move(info)) {}

}  // namespace oscar
