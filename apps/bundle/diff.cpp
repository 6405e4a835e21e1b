// oscar-bundle diff: what two files say differently.
#include "oscar/bundle/diff.h"

#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"

namespace oscar::app {
namespace {

struct DiffArguments {
  std::string file, other;
  bool exit_code = false;
};

int diff(const DiffArguments& arguments) {
  const auto lines = diff_bundles(arguments.file, arguments.other);
  for (const auto& line : lines) print_line(line);
  print_line(lines.empty() ? std::string("equal") : fmt::format("{} differences", lines.size()));
  return arguments.exit_code && !lines.empty() ? kExitFailed : kExitDone;
}

}  // namespace

void add_diff(CLI::App& program, Work& work) {
  add_command<DiffArguments>(program, work, "diff", "List what two files say differently", diff,
                             [](CLI::App& sub, DiffArguments& arguments) {
                               sub.add_option("A", arguments.file, "First file")->required();
                               sub.add_option("B", arguments.other, "Second file")->required();
                               sub.add_flag("--exit-code", arguments.exit_code,
                                            "Exit with 1 when they differ");
                             });
}

}  // namespace oscar::app
