// Sub-commands that make bundles of bundles: strip, rewrite, merge, fit.
#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/options.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/merge.h"

namespace oscar::app {

// oscar-bundle strip: a bundle with less in it.

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
  print_written(arguments.output);
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
            "portable variant, which other backends take, and the\n"
            "stored evaluation go too; what this toolkit's own\n"
            "cache reads is left");
        sub.add_flag("--force", arguments.force, "Replace OUT if it exists");
      });
}

// oscar-bundle rewrite: a bundle of an earlier version as this one writes it.

namespace {

struct RewriteArguments {
  std::string input, output;
  bool force = false;
};

int rewrite(const RewriteArguments& arguments) {
  check_output({arguments.input}, arguments.output, arguments.force ? Replace::kYes : Replace::kNo);
  write_bundle(read_bundle(arguments.input), arguments.output, arguments.force);
  print_written(arguments.output);
  return kExitDone;
}

}  // namespace

void add_rewrite(CLI::App& program, Work& work) {
  add_command<RewriteArguments>(
      program, work, "rewrite", "Write a bundle of version 0.1 with all its tensors", rewrite,
      [](CLI::App& sub, RewriteArguments& arguments) {
        sub.add_option("IN", arguments.input, "Rotation bundle")->required();
        sub.add_option("OUT", arguments.output, "Bundle to write")->required();
        sub.add_flag("--force", arguments.force, "Replace OUT if it exists");
      });
}

// oscar-bundle merge: the statistics of several runs added.

namespace {

struct MergeArguments {
  std::vector<std::string> inputs;
  std::string output;
  bool force = false, allow_repeats = false;
};

int merge(const MergeArguments& arguments) {
  check_output(arguments.inputs, arguments.output, arguments.force ? Replace::kYes : Replace::kNo);
  std::vector<Bundle> bundles;
  for (const auto& input : arguments.inputs) {
    bundles.push_back(read_bundle(input));
    if (!names_its_text(bundles.back())) {
      warn(
          fmt::format("{}: nothing says which text its sums are of: take care that no other file "
                      "holds the same",
                      input));
    }
    if (bundles.size() == 1 || have_comparable_weights(bundles.front(), bundles.back())) continue;
    warn(
        fmt::format("{}: nothing says that it is of the same weights as {}: they name no files of "
                    "weights and hold no samples of them",
                    input, arguments.inputs.front()));
  }
  const std::vector<std::string> warnings = merge_warnings(bundles, arguments.inputs);
  const auto total =
      merge_statistics(std::move(bundles), arguments.inputs, arguments.allow_repeats);
  for (const std::string& warning : warnings) warn(warning);
  write_bundle(total, arguments.output, arguments.force);
  print_written(arguments.output);
  return kExitDone;
}

}  // namespace

void add_merge(CLI::App& program, Work& work) {
  add_command<MergeArguments>(
      program, work, "merge", "Add the statistics of several runs of one model", merge,
      [](CLI::App& sub, MergeArguments& arguments) {
        add_files(sub, arguments.inputs, 2, "Two or more files that hold statistics");
        sub.add_option("-o,--output", arguments.output, "Statistics file to write")->required();
        sub.add_flag("--allow-repeats", arguments.allow_repeats,
                     "Count a text twice if two files hold it");
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
      });
}

// oscar-bundle fit: transforms from statistics, without the model.

namespace {

struct RefitArguments {
  std::string input, output;
  bool force = false, no_statistics = false;
  FitArguments fit;
  CacheFormat quantizer;
  const CLI::App* program = nullptr;  // which says what was given
};

// Servers of this codec; "another server" where none is known.
std::string servers_of(const CacheFormat& quantizer) {
  std::string names;
  for (const Backend& backend : backends()) {
    if (!is_served(backend) || !codec_gap(backend, quantizer).empty()) continue;
    names += (names.empty() ? "" : ", ") + std::string(backend.name);
  }
  return names.empty() ? "another server" : names;
}

// The cache that `input` is for. Of one whose rows are coded as another server's, which a fit for
// all that this toolkit serves would not run on, the windows alone, with a warning.
CacheFormat kept_format(const Bundle& input, const std::string& place) {
  CacheFormat kept = input.quantizer;
  if (kept.rules == CodecRules{}) return kept;
  warn(
      fmt::format("{}: it was made for the codec of {}, and this fit is for this toolkit's own; "
                  "oscar-calibrate --for NAME makes a bundle for that server",
                  place, servers_of(kept)));
  kept.rules = {};
  kept.metadata_dtype = CacheFormat{}.metadata_dtype;
  kept.quant_group_size = 0;
  return kept;
}

int fit(const RefitArguments& arguments) {
  check_output({arguments.input}, arguments.output, arguments.force ? Replace::kYes : Replace::kNo);
  Bundle input = read_bundle(arguments.input);
  const CacheFormat quantizer =
      with_given(*arguments.program, arguments.quantizer, kept_format(input, arguments.input));
  const auto out = refit_bundle(std::move(input),
                                {.preset = arguments.fit.preset,
                                 .fit = arguments.fit.resolve(),
                                 .quantizer = quantizer,
                                 .keep_statistics = !arguments.no_statistics},
                                arguments.input);
  print_layer_warnings(out);
  write_bundle(out, arguments.output, arguments.force);
  print_written(arguments.output);
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
        for (const char* option : {"--sink", "--recent", "--metadata-dtype", "--demote-block"}) {
          sub.get_option(option)->default_str("as in IN");
        }
        sub.get_option("--quant-group-size")
            ->description("Values that share scale and zero (default: as in IN)");
        arguments.program = &sub;
        add_fit_study_options(sub, arguments.fit, /*searchable=*/false);
      });
}

}  // namespace oscar::app
