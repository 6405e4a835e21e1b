// oscar-bundle fit: transforms from statistics, without the model.
#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "common/options.h"
#include "oscar/bundle/refit.h"

namespace oscar::app {
namespace {

struct RefitArguments {
  std::string input, output;
  bool force = false, no_statistics = false;
  FitArguments fit;
  QuantizerSettings quantizer;
};

int fit(const RefitArguments& arguments) {
  check_output({arguments.input}, arguments.output, arguments.force ? Replace::kYes : Replace::kNo);
  Bundle input = read_bundle(arguments.input);
  const auto out = refit_bundle(std::move(input),
                                {.preset = arguments.fit.preset,
                                 .fit = arguments.fit.resolve(),
                                 .quantizer = arguments.quantizer,
                                 .keep_statistics = !arguments.no_statistics},
                                arguments.input);
  print_layer_warnings(out);
  write_bundle(out, arguments.output, arguments.force);
  return kExitDone;
}

}  // namespace

void add_fit(CLI::App& program, Work& work) {
  add_command<RefitArguments>(
      program, work, "fit", "Fit again from statistics, without model or search", fit,
      [](CLI::App& sub, RefitArguments& arguments) {
        sub.add_option("IN", arguments.input, "Statistics file, or bundle that holds statistics")
            ->required();
        sub.add_option("-o,--output", arguments.output, "Bundle to write")->required();
        sub.add_flag("--no-statistics", arguments.no_statistics,
                     "Leave the sums out of the bundle");
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
        add_fit_options(sub, arguments.fit, /*searchable=*/false);
        add_quantizer_options(sub, arguments.quantizer);
      });
}

}  // namespace oscar::app
