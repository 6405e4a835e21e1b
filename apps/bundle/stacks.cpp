// oscar-bundle stacks: the table of serving stacks.
#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "oscar/stacks/describe.h"

namespace oscar::app {
namespace {

struct StacksArguments {
  bool json = false;
};

int stacks(const StacksArguments& arguments) {
  fmt::print("{}", arguments.json ? stacks_json().dump(2) + "\n" : stacks_text());
  return kExitDone;
}

}  // namespace

void add_stacks(CLI::App& program, Work& work) {
  add_command<StacksArguments>(program, work, "stacks",
                               "What serving stacks take, and which --for serves", stacks,
                               [](CLI::App& sub, StacksArguments& arguments) {
                                 sub.add_flag("--json", arguments.json, "The same, as JSON");
                               });
}

}  // namespace oscar::app
