// What every main does around its work: parse, run, turn exceptions into messages and exit codes;
// what a wrong command line is told; man page and completion.
#include "common/program.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/terminal.h"
#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/base/version.h"
#include "oscar/io/gguf.h"

namespace oscar::app {

// What CLI11 has left over.

namespace {

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

// Options in the order of --help, in roff and in bash.

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

// The one place where exceptions become messages.

namespace {

constexpr size_t kColumns = 80, kDescriptionColumn = 28;

// Breaks the descriptions of options between words.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = CLI::Formatter::make_option_desc(option);
    size_t line = 0, space = std::string::npos;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\n') {
        line = i + 1;
        space = std::string::npos;
      }
      if (text[i] == ' ') space = i;
      if (i - line >= kColumns - kDescriptionColumn && space != std::string::npos) {
        text[space] = '\n';
        line = space + 1;
        space = std::string::npos;
      }
    }
    return text;
  }
};

void set_formatter(CLI::App& program) {
  const auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(kDescriptionColumn);
  program.formatter(formatter);
  for (CLI::App* subcommand : program.get_subcommands(nullptr)) subcommand->formatter(formatter);
}

// An empty word means nothing, and never that an option or a file was left out.
void refuse_empty_words(CLI::App& program) {
  const CLI::Validator there(
      [](const std::string& text) { return text.empty() ? std::string("must not be empty") : ""; },
      "");
  for (CLI::Option* option : program.get_options()) option->check(there);
  for (CLI::App* subcommand : program.get_subcommands(nullptr)) refuse_empty_words(*subcommand);
}

// Asked for by `cmake --install` (cmake/OscarInstall.cmake).
void add_manual_options(CLI::App& program, const std::string& version) {
  const auto add = [&program](const char* name, const std::function<std::string()>& text) {
    program
        .add_flag_callback(name,
                           [text] {
                             fmt::print("{}", text());
                             throw CLI::Success();
                           })
        ->group("");
  };
  add("--print-man-page", [&program, version] { return man_page(program, version); });
  add("--print-completion", [&program] { return bash_completion(program); });
}

// Exit code 2, with what is wrong in one line.
int refuse_usage(const CLI::App& program, const std::string& problem) {
  say("{}: {}\nRun with --help for more information.\n", program.get_name(), problem);
  return kExitUsage;
}

std::string system_problem(const std::system_error& error) {
  const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&error);
  if (file == nullptr) {
    const bool threads = error.code() == std::errc::resource_unavailable_try_again;
    return threads ? "threads cannot be created: raise ulimit -v and ulimit -u"
                   : error.code().message();
  }
  return fmt::format("cannot use {}: {}", printable(file->path1().string()),
                     file->code().message());
}

int parse_and_work(CLI::App& program, int argc, char** argv, const std::function<int()>& work) {
  const std::string version =
      fmt::format("{} {} ({})", program.get_name(), kToolVersion, kToolCommit);
  program.set_version_flag("-V,--version", version);
  add_manual_options(program, version);
  set_formatter(program);
  refuse_empty_words(program);
  try {
    program.parse(argc, argv);
    return work();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);
    const std::string unknown = unknown_word(program);
    if (!unknown.empty()) return refuse_usage(program, unknown);
    std::ostringstream said;
    program.exit(error, said, said);
    say("{}", printable_lines(said.str()));
    return kExitUsage;
  } catch (const Interrupted& stop) {
    say("\n{}: {}\n", program.get_name(), stop.what());
    return kExitInterrupted;
  } catch (const UsageError& error) {
    say("\n{}: {}\n", program.get_name(), error.what());
    return kExitUsage;
  } catch (const std::bad_alloc&) {
    say("\n{}: out of memory\n", program.get_name());
  } catch (const Error& error) {  // has made its parts printable
    say("\n{}: {}\n", program.get_name(), error.what());
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) == 0) {
      say("\n{}: {}\n", program.get_name(), system_problem(error));
    } else if (error.code() != std::errc::broken_pipe) {  // whose reader has seen enough
      say("\n{}: cannot write to standard output: {}\n", program.get_name(),
          error.code().message());
    }
  } catch (const std::exception& error) {
    // libtorch's errors end in a list of addresses.
    const std::string_view what = error.what();
    const std::string said(what.substr(0, what.find("\nframe #")));
    say("\n{}: {}\n", program.get_name(), printable_lines(said));
  }
  return kExitFailed;
}

}  // namespace

int run_program(CLI::App& program, int argc, char** argv, const std::function<int()>& work) {
  guard_standard_streams();
  install_cut_file_handler();
  // OpenBLAS has one thread in every call (fit/linalg.cpp): further ones, each with its buffer,
  // cost address space, and wait for ever where there is none.
  ::setenv("OPENBLAS_NUM_THREADS", "1", 1);
  const int code = parse_and_work(program, argc, argv, work);
  const std::string problem = finish_standard_output();
  if (code != kExitDone || problem.empty()) return code;
  if (problem != kReaderLeft) {
    say("\n{}: cannot write to standard output: {}\n", program.get_name(), problem);
  }
  return kExitFailed;
}

}  // namespace oscar::app
