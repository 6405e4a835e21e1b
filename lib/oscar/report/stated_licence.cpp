// Lines of the form "key: value" between two lines of dashes; no other YAML is read.
#include "oscar/report/stated_licence.h"

#include <algorithm>
#include <string_view>

#include "oscar/base/json.h"
#include "oscar/io/gguf.h"

namespace oscar {
namespace {

constexpr const char* kReadme = "README.md";
constexpr size_t kLongestReadme = size_t{4} << 20, kLongestId = 64, kLongestLink = 512;

bool all_of(std::string_view text, const char* marks) {
  return std::all_of(text.begin(), text.end(), [marks](char c) {
    const bool word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    return word || std::string_view(marks).find(c) != std::string_view::npos;
  });
}

std::string word_or_none(std::string_view text) {
  const bool good = !text.empty() && text.size() <= kLongestId && all_of(text, ".-_");
  return good ? std::string(text) : "";
}

std::string link_or_none(std::string_view text) {
  const bool good = text.size() <= kLongestLink && all_of(text, ".-_/:%~#?=&+");
  return good ? std::string(text) : "";
}

std::string_view trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  const bool quoted = text.size() >= 2 && text.front() == text.back() &&
                      (text.front() == '"' || text.front() == '\'');
  return quoted ? text.substr(1, text.size() - 2) : text;
}

std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::optional<StatedLicence> licence_of_readme(std::string_view text) {
  constexpr std::string_view kFence = "---";
  if (trimmed(take_line(text)) != kFence) return std::nullopt;
  StatedLicence licence{.place = kReadme};
  bool closed = false;
  while (!text.empty() && !closed) {
    const std::string_view line = take_line(text);
    closed = trimmed(line) == kFence;
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;
    const std::string_view key = line.substr(0, colon), value = trimmed(line.substr(colon + 1));
    if (key == "license") licence.id = word_or_none(value);
    if (key == "license_name") licence.name = word_or_none(value);
    if (key == "license_link") licence.link = link_or_none(value);
  }
  return closed && !licence.id.empty() ? std::optional(licence) : std::nullopt;
}

std::optional<StatedLicence> licence_of_gguf(const GgufFile& file) {
  const auto text = [&file](const char* key) { return file.text(key).value_or(""); };
  const StatedLicence licence{.id = word_or_none(text("general.license")),
                              .name = word_or_none(text("general.license.name")),
                              .link = link_or_none(text("general.license.link")),
                              .place = "general.license"};
  return licence.id.empty() ? std::nullopt : std::optional(licence);
}

}  // namespace

std::optional<StatedLicence> read_licence(const std::filesystem::path& model) {
  if (!std::filesystem::is_directory(model)) return licence_of_gguf(GgufFile(model));
  const std::filesystem::path readme = model / kReadme;
  if (!std::filesystem::is_regular_file(readme)) return std::nullopt;
  return licence_of_readme(read_text_file(readme, kLongestReadme));
}

}  // namespace oscar
