// Distances between words, and what CLI11 has left over.
#include "common/usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "oscar/base/printable.h"

namespace oscar::app {
namespace {

// Letters to insert, drop, change or swap with their neighbour.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> older(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({change, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], older[j - 2] + 1);
      }
    }
    older = std::exchange(last, row);
  }
  return last[b.size()];
}

const CLI::App& deepest(const CLI::App& program) {
  const auto chosen = program.get_subcommands();
  return chosen.empty() ? program : deepest(*chosen.back());
}

std::vector<std::string> option_names(const CLI::App& program) {
  std::vector<std::string> names;
  for (const CLI::Option* option : program.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

}  // namespace

std::string nearest_word(const std::string& word, const std::vector<std::string>& known) {
  constexpr size_t kLongest = 64;  // no name is as long
  if (word.size() > kLongest) return "";
  std::string nearest;
  size_t best = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : known) {
    const size_t letters = word.size() > 3 && name.starts_with(word) ? 1 : distance(word, name);
    if (letters >= best) continue;
    best = letters;
    nearest = name;
  }
  return nearest;
}

std::string unknown_word(const CLI::App& program) {
  const CLI::App& at = deepest(program);
  const auto answer = [](const char* kind, const std::string& word, const std::string& nearest) {
    return fmt::format("unknown {} {}{}", kind, printable(word),
                       nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest));
  };
  for (const std::string& word : program.remaining(true)) {
    if (word.size() > 1 && word[0] == '-') {
      const std::string name = word.substr(0, word.find('='));
      return answer("option", name, nearest_word(name, option_names(at)));
    }
    std::vector<std::string> commands;
    for (const CLI::App* command : at.get_subcommands(nullptr)) {
      commands.push_back(command->get_name());
    }
    if (!commands.empty()) return answer("command", word, nearest_word(word, commands));
  }
  return "";
}

}  // namespace oscar::app
