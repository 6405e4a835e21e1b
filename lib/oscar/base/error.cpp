// Layout of an error text: the sentence first, then one indented line per known part.
#include "oscar/base/error.h"

#include "oscar/base/printable.h"

namespace oscar {
namespace {

std::string error_text(const ErrorInfo& info) {
  std::string text = printable_lines(info.what);
  const auto add_line = [&text](const char* label, const std::string& value) {
    if (!value.empty()) text += std::string("\n  ") + label + printable(value);
  };
  add_line("where:    ", info.where);
  add_line("expected: ", info.expected);
  add_line("found:    ", info.found);
  if (!info.hint.empty()) text += "\n  hint:     " + printable_lines(info.hint);
  return text;
}

}  // namespace

Error::Error(ErrorInfo info) : std::runtime_error(error_text(info)), info_(std::move(info)) {}

}  // namespace oscar
