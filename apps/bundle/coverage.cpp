// oscar-bundle coverage: how well one text stands for another.
#include "oscar/inspect/coverage.h"

#include "bundle/commands.h"
#include "common/main.h"
#include "common/standard_streams.h"
#include "oscar/base/json_text.h"

namespace oscar::app {
namespace {

struct CoverageArguments {
  std::vector<std::string> inputs;
  bool json = false;
};

int coverage(const CoverageArguments& arguments) {
  std::vector<Bundle> bundles;
  for (const auto& input : arguments.inputs) bundles.push_back(read_bundle(input));
  const Json result = oscar::coverage(bundles, arguments.inputs);
  if (arguments.json) {
    print_text(json_text(result, 2) + "\n");
  } else {
    print_text(coverage_text(result));
  }
  for (const auto& warning : result["warnings"]) {
    warn(warning.get<std::string>());
  }
  return kExitDone;
}

}  // namespace

void add_coverage(CLI::App& program, Work& work) {
  add_command<CoverageArguments>(
      program, work, "coverage", "How well each file's text stands for the others'", coverage,
      [](CLI::App& sub, CoverageArguments& arguments) {
        add_files(sub, arguments.inputs, 2,
                  "Two or more files that hold statistics of one model,\n"
                  "for example of one domain each. Shows the predicted\n"
                  "loss of a fit on the row's text, on the column's text,\n"
                  "over that of the column's own fit, and warns where a\n"
                  "text is covered badly");
        sub.add_flag("--json", arguments.json, "Everything, as JSON");
      });
}

}  // namespace oscar::app
