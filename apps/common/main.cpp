// The one place where exceptions become messages.
#include "common/main.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <sstream>
#include <string_view>
#include <system_error>

#include "common/manual.h"
#include "common/standard_streams.h"
#include "common/usage.h"
#include "oscar/base/printable.h"
#include "oscar/base/version.h"
#include "oscar/io/cut_files.h"

namespace oscar::app {
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
  // OpenBLAS has one thread in every call (linalg/eigh.cpp): further ones, each with its buffer,
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
