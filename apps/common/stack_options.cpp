// From command-line words to a limited choice.
#include "common/stack_options.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar::app {
namespace {

// The options that name a value, with that word; "auto" names none.
NamedOptions named_options(const CLI::App& program) {
  NamedOptions named;
  for (const char* name : {"--method", "--granularity", "--center", "--key-centers", "--rounding",
                           "--scale-correction", "--clip", "--quant-group-size", "--metadata-dtype",
                           "--sink", "--recent"}) {
    const CLI::Option* option = program.get_option(name);
    if (option->count() > 0 && option->as<std::string>() != "auto") {
      named[name] = option->as<std::string>();
    }
  }
  return named;
}

std::string in_words(const ErrorInfo& info) {
  std::string text = info.what;
  if (!info.expected.empty()) text += "\n  expected: " + info.expected;
  return info.hint.empty() ? text : text + "\n  " + info.hint;
}

}  // namespace

void add_stack_option(CLI::App& program, std::string& stack) {
  program
      .add_option("--for", stack,
                  fmt::format("Only what this serving stack runs, with its codec:\n{}\n(not yet: "
                              "{};\noscar-bundle stacks says why)",
                              stack_names(true), stack_names(false)))
      ->option_text("STACK")
      ->group("Fit");
}

StackChoice choose_for_stack(const CLI::App& program, const std::string& stack,
                             const FitArguments& fit, const QuantizerSettings& quantizer) {
  StackChoice choice;
  try {
    const auto restricted = [&](bool for_stack) {
      return restrict_to(find_stack(stack),
                         {fit.resolve(), fit.resolve_search(for_stack), quantizer},
                         named_options(program));
    };
    choice = restricted(true);
    if (choice.fit == fit.resolve()) choice = restricted(false);  // nothing had to give way
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    throw CLI::ValidationError(info.where.empty() ? "--for " + stack : info.where, in_words(info));
  }
  if (program.count("--search") > 0 && fit.search != "off" && !choice.search.any()) {
    throw CLI::ValidationError(
        "--search " + fit.search,
        fmt::format("nothing is left to search, as {} and the options given fix it all:\n"
                    "  leave out --search",
                    stack));
  }
  return choice;
}

}  // namespace oscar::app
