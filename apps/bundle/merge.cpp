// oscar-bundle merge: the statistics of several runs added.
#include "oscar/bundle/merge.h"

#include "bundle/commands.h"
#include "common/main.h"

namespace oscar::app {
namespace {

struct MergeArguments {
  std::vector<std::string> inputs;
  std::string output;
  bool force = false;
};

int merge(const MergeArguments& arguments) {
  check_output(arguments.inputs, arguments.output, arguments.force ? Replace::kYes : Replace::kNo);
  std::vector<Bundle> bundles;
  for (const auto& input : arguments.inputs) bundles.push_back(read_bundle(input));
  const auto total = merge_statistics(std::move(bundles), arguments.inputs, arguments.force);
  write_bundle(total, arguments.output, arguments.force);
  return kExitDone;
}

}  // namespace

void add_merge(CLI::App& program, Work& work) {
  add_command<MergeArguments>(
      program, work, "merge", "Add the statistics of several runs of one model", merge,
      [](CLI::App& sub, MergeArguments& arguments) {
        add_files(sub, arguments.inputs, 2, "Two or more files that hold statistics");
        sub.add_option("-o,--output", arguments.output, "Statistics file to write")->required();
        sub.add_flag("--force", arguments.force,
                     "Replace the output if it exists, and count a\n"
                     "corpus twice if two files hold it");
      });
}

}  // namespace oscar::app
