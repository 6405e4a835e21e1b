// Joining remarks, and wrapping at blanks.
#include "oscar/base/text_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace oscar {
namespace {

// Remarks about layers that are alike but for numbers.
struct Alike {
  std::string words = {};        // of the first one, behind "layer N"
  std::vector<int> layers = {};  // each once, as they came
  int count = 0;
  bool same = true;  // all of them say `words`
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string without_numbers(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (!is_digit(c)) {
      out += c;
    } else if (out.empty() || out.back() != '#') {
      out += '#';
    }
  }
  return out;
}

// "0 to 3, 7".
std::string ranges(std::vector<int> layers) {
  std::sort(layers.begin(), layers.end());
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t end = i;
    while (end + 1 < layers.size() && layers[end + 1] == layers[end] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(layers[i]);
    if (end > i) text += fmt::format(" to {}", layers[end]);
    i = end + 1;
  }
  return text;
}

std::string joined(const Alike& group) {
  if (group.layers.size() == 1 && group.count == 1) {
    return fmt::format("layer {}{}", group.layers[0], group.words);
  }
  const std::string layers =
      fmt::format("layer{} {}", group.layers.size() == 1 ? "" : "s", ranges(group.layers));
  if (group.same) return layers + group.words;
  return fmt::format("{}, {} times, for example layer {}{}", layers, group.count, group.layers[0],
                     group.words);
}

}  // namespace

std::vector<std::string> joined_by_layer(const std::vector<std::string>& remarks) {
  constexpr std::string_view kLayer = "layer ";
  constexpr size_t kMostDigits = 6;
  std::vector<std::string> out;
  std::vector<std::pair<size_t, Alike>> groups;  // place in `out`
  std::map<std::string, size_t> by_words;
  for (const std::string& remark : remarks) {
    size_t end = kLayer.size();
    while (end < remark.size() && is_digit(remark[end])) ++end;
    const size_t digits = end - kLayer.size();
    if (!remark.starts_with(kLayer) || digits == 0 || digits > kMostDigits) {
      out.push_back(remark);
      continue;
    }
    const int layer = std::stoi(remark.substr(kLayer.size(), digits));
    const std::string words = remark.substr(end);
    const auto [place, is_new] = by_words.emplace(without_numbers(words), groups.size());
    if (is_new) {
      groups.push_back({out.size(), {.words = words, .layers = {}}});
      out.emplace_back();
    }
    Alike& group = groups[place->second].second;
    ++group.count;
    group.same = group.same && group.words == words;
    if (std::find(group.layers.begin(), group.layers.end(), layer) == group.layers.end()) {
      group.layers.push_back(layer);
    }
  }
  for (const auto& [place, group] : groups) out[place] = joined(group);
  return out;
}

void add_line(std::string& text, const std::string& label, const std::string& words,
              size_t indent) {
  constexpr size_t kColumns = 80;
  std::string line = fmt::format("{:<{}}", label, indent);
  for (size_t begin = 0; begin < words.size();) {
    size_t end = words.find(' ', begin);
    if (end == std::string::npos) end = words.size();
    const size_t length = end - begin;
    if (line.size() > indent && line.size() + 1 + length > kColumns) {
      text += line + "\n";
      line = std::string(indent, ' ');
    }
    if (line.size() > indent) line += " ";
    line += words.substr(begin, length);
    begin = end + 1;
  }
  text += line + "\n";
}

}  // namespace oscar
