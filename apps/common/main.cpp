// The one place where exceptions become messages.
#include "common/main.h"

#include <fmt/format.h>

#include <memory>
#include <new>

#include "oscar/base/version.h"

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

}  // namespace

int run_program(CLI::App& program, int argc, char** argv, const std::function<int()>& work) {
  program.set_version_flag(
      "--version", fmt::format("{} {} ({})", program.get_name(), kToolVersion, kToolCommit));
  set_formatter(program);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? kExitDone : kExitUsage;
  }
  try {
    return work();
  } catch (const Interrupted& stop) {
    fmt::print(stderr, "\n{}: {}\n", program.get_name(), stop.what());
  } catch (const UsageError& error) {
    fmt::print(stderr, "\n{}: {}\n", program.get_name(), error.what());
    return kExitUsage;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "\n{}: out of memory\n", program.get_name());
  } catch (const std::exception& error) {
    fmt::print(stderr, "\n{}: {}\n", program.get_name(), error.what());
  }
  return kExitFailed;
}

}  // namespace oscar::app
