// oscar-bundle: look at, check, combine and hand over bundles, and show reports. Runs no model.
#include <CLI/CLI.hpp>

#include "bundle/commands.h"
#include "common/program.h"
#include "oscar/base/process.h"

int main(int argc, char** argv) {
  CLI::App program{
      "Look at, check and combine rotation bundles and statistics files,\n"
      "carry transforms to backends and from other tools, and show\n"
      "what oscar-eval measured.\n"
      "Exit codes: 0 done, 1 failed (a message says why), 2 usage,\n"
      "130 stopped on request.",
      "oscar-bundle"};
  program.require_subcommand(1);
  oscar::app::Work work;
  for (const auto add : {oscar::app::add_inspect, oscar::app::add_verify, oscar::app::add_strip,
                         oscar::app::add_rewrite, oscar::app::add_merge, oscar::app::add_fit,
                         oscar::app::add_coverage, oscar::app::add_diff, oscar::app::add_export,
                         oscar::app::add_import, oscar::app::add_fold, oscar::app::add_plan,
                         oscar::app::add_backends, oscar::app::add_report, oscar::app::add_card}) {
    add(program, work);
  }
  oscar::install_interrupt_handlers();
  return oscar::app::run_program(program, argc, argv, [&work] { return work(); });
}
