// oscar-bundle strip: a bundle with less in it.
#include "oscar/bundle/strip.h"

#include "bundle/commands.h"
#include "common/main.h"
#include "common/options.h"

namespace oscar::app {
namespace {

struct StripArguments {
  std::string input, output;
  StripProfile profile = StripProfile::kPublish;
  bool force = false;
};

int strip(const StripArguments& arguments) {
  check_output({arguments.input}, arguments.output, arguments.force ? Replace::kYes : Replace::kNo);
  const auto bundle =
      strip_bundle(read_bundle(arguments.input), arguments.profile, arguments.input);
  write_bundle(bundle, arguments.output, arguments.force);
  return kExitDone;
}

}  // namespace

void add_strip(CLI::App& program, Work& work) {
  add_command<StripArguments>(
      program, work, "strip", "Copy a bundle without statistics and fingerprint", strip,
      [](CLI::App& sub, StripArguments& arguments) {
        sub.add_option("IN", arguments.input, "Rotation bundle")->required();
        sub.add_option("OUT", arguments.output, "Bundle to write")->required();
        add_choice<StripProfile>(
            sub, "--profile", arguments.profile,
            {{"publish", StripProfile::kPublish}, {"serving", StripProfile::kServing}},
            "publish: all else is kept (default). serving: the\n"
            "portable variant, which other stacks take, goes too;\n"
            "what this toolkit's own cache reads is left");
        sub.add_flag("--force", arguments.force, "Replace OUT if it exists");
      });
}

}  // namespace oscar::app
