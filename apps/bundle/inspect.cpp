// oscar-bundle inspect: what a file is and holds.
#include "oscar/inspect/inspect.h"
#include "bundle/commands.h"
#include "common/main.h"
#include "common/standard_streams.h"
#include "oscar/base/json_text.h"

namespace oscar::app {
namespace {

struct InspectArguments {
  std::string file;
  bool json = false;
};

int inspect(const InspectArguments& arguments) {
  const Inspection inspection = inspect_bundle(arguments.file);
  if (arguments.json) {
    print_text(json_text(inspection.json, 2) + "\n");
  } else {
    print_text(inspection_text(inspection));
  }
  return kExitDone;
}

}  // namespace

void add_inspect(CLI::App& program, Work& work) {
  add_command<InspectArguments>(
      program, work, "inspect", "Show what a file is and holds", inspect,
      [](CLI::App& sub, InspectArguments& arguments) {
        sub.add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
        sub.add_flag("--json", arguments.json, "Everything, as JSON");
      });
}

}  // namespace oscar::app
