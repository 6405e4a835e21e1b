// Options in the order of --help, in roff and in bash.
#include "common/manual.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace oscar::app {
namespace {

// roff takes a backslash, a hyphen, and a full stop or quote at the start of a line for itself.
std::string roff(const std::string& text) {
  std::string out;
  bool line_start = true;
  for (const char c : text) {
    if (line_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    line_start = c == '\n';
  }
  return out;
}

bool is_hidden(const CLI::Option& option) { return option.get_group().empty(); }

// Lines as they stand: they are laid out already.
std::string verbatim(const std::string& text) { return ".nf\n" + roff(text) + "\n.fi\n"; }

void add_options(const CLI::App& program, std::string& page) {
  std::vector<std::string> groups;
  for (const CLI::Option* option : program.get_options()) {
    const std::string& group = option->get_group();
    if (is_hidden(*option) || std::find(groups.begin(), groups.end(), group) != groups.end()) {
      continue;
    }
    groups.push_back(group);
  }
  const auto add = [&page](const CLI::Option& option) {
    const std::string value =
        option.get_positional() || option.get_expected_max() == 0
            ? ""
            : " " + (option.get_option_text().empty() ? option.get_type_name()
                                                      : option.get_option_text());
    const std::string standard =
        option.get_default_str().empty() ? "" : " (default: " + option.get_default_str() + ")";
    page +=
        fmt::format(".TP\n.B {}{}\n{}{}\n", roff(option.get_name(option.get_positional(), true)),
                    roff(value), roff(option.get_description()), roff(standard));
  };
  for (const CLI::Option* option : program.get_options()) {
    if (option->get_positional()) add(*option);
  }
  for (const std::string& group : groups) {
    page += ".SS " + roff(group) + "\n";
    for (const CLI::Option* option : program.get_options()) {
      if (!option->get_positional() && option->get_group() == group) add(*option);
    }
  }
}

std::vector<const CLI::App*> commands_of(const CLI::App& program) {
  std::vector<const CLI::App*> commands;
  for (const CLI::App* command : program.get_subcommands(nullptr)) commands.push_back(command);
  return commands;
}

// "{a,b}" of a type name, which lists the values that are allowed: "a b".
std::string allowed_values(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t begin = type.find('{'), end = type.find('}');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "";
  std::string words = type.substr(begin + 1, end - begin - 1);
  std::replace(words.begin(), words.end(), ',', ' ');
  const bool plain = words.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                         "0123456789 ._+-") == std::string::npos;
  return plain ? words : "";
}

std::string option_words(const CLI::App& program) {
  std::string words;
  for (const CLI::Option* option : program.get_options()) {
    if (is_hidden(*option)) continue;
    for (const std::string& name : option->get_lnames()) words += " --" + name;
    for (const std::string& name : option->get_snames()) words += " -" + name;
  }
  return words.empty() ? words : words.substr(1);
}

// The branches of `case $previous` for options with fixed values.
std::string value_cases(const CLI::App& program) {
  std::string cases;
  for (const CLI::Option* option : program.get_options()) {
    const std::string values = allowed_values(*option);
    if (is_hidden(*option) || values.empty()) continue;
    for (const std::string& name : option->get_lnames()) {
      cases += fmt::format("    --{}) COMPREPLY=($(compgen -W \"{}\" -- \"$word\")); return;;\n",
                           name, values);
    }
  }
  return cases;
}

}  // namespace

std::string man_page(const CLI::App& program, const std::string& version) {
  const std::string& name = program.get_name();
  const std::string words = program.get_description();
  std::string page =
      fmt::format(".TH {} 1 \"\" \"{}\" \"OSCAR Toolkit\"\n", roff(name), roff(version));
  const std::string first = words.substr(0, words.find('\n'));
  page += fmt::format(".SH NAME\n{} \\- {}\n", roff(name), roff(first));
  page += fmt::format(".SH SYNOPSIS\n.B {}\n", roff(name));
  const auto commands = commands_of(program);
  for (const CLI::Option* option : program.get_options()) {
    if (option->get_positional()) page += roff(option->get_name(true)) + "\n";
  }
  page += commands.empty() ? "[OPTIONS]\n" : "COMMAND [OPTIONS]\n";
  page += ".SH DESCRIPTION\n" + verbatim(words);
  page += ".SH OPTIONS\n";
  add_options(program, page);
  for (const CLI::App* command : commands) {
    page += fmt::format(".SH {}\n{}\n", roff(name + " " + command->get_name()),
                        roff(command->get_description()));
    add_options(*command, page);
  }
  if (!program.get_footer().empty()) page += ".SH NOTES\n" + verbatim(program.get_footer());
  return page;
}

std::string bash_completion(const CLI::App& program) {
  const std::string& name = program.get_name();
  std::string function = "_" + name;
  std::replace(function.begin(), function.end(), '-', '_');
  const auto commands = commands_of(program);
  std::string names;
  for (const CLI::App* command : commands) {
    names += (names.empty() ? "" : " ") + command->get_name();
  }
  std::string text =
      fmt::format("# Completion of {}, made from its options.\n{}() {{\n", name, function);
  text +=
      "  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
      "  local options command=${COMP_WORDS[1]}\n"
      "  COMPREPLY=()\n";
  const auto add = [&text](const CLI::App& app, const char* indent) {
    const std::string cases = value_cases(app);
    if (!cases.empty()) text += "  case $previous in\n" + cases + "  esac\n";
    text += fmt::format("{}options=\"{}\"\n", indent, option_words(app));
  };
  if (commands.empty()) {
    add(program, "  ");
  } else {
    text += fmt::format(
        "  if ((COMP_CWORD == 1)); then\n    COMPREPLY=($(compgen -W \"{} {}\" -- \"$word\"))\n"
        "    return\n  fi\n  case $command in\n",
        names, option_words(program));
    for (const CLI::App* command : commands) {
      text += fmt::format("  {})\n", command->get_name());
      add(*command, "    ");
      text += "    ;;\n";
    }
    text += "  esac\n";
  }
  text +=
      "  if [[ $word == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n"
      "  fi\n}\n";
  return text + fmt::format("complete -o default -F {} {}\n", function, name);
}

}  // namespace oscar::app
