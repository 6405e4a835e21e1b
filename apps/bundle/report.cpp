// Sub-commands that show what was measured: report, card.
#include <algorithm>

#include "bundle/commands.h"
#include "common/output_paths.h"
#include "common/program.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/match.h"
#include "oscar/eval/report/card.h"
#include "oscar/eval/report/page.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace oscar::app {

// oscar-bundle report: the HTML page of a JSON report.

namespace {

struct ReportArguments {
  std::string file, output, answers;
  bool force = false;
};

int report(const ReportArguments& arguments) {
  const Replace replace = arguments.force ? Replace::kYes : Replace::kNo;
  std::vector<std::string> inputs = {arguments.file};
  if (!arguments.answers.empty()) inputs.push_back(arguments.answers);
  check_output(inputs, arguments.output, replace);
  const std::optional<Answers> answers = read_answers_file(arguments.answers);
  const std::string page =
      render_html_report(read_json_file(arguments.file), answers ? &*answers : nullptr);
  write_text_output(arguments.output, page, replace);
  print_written(arguments.output);
  return kExitDone;
}

}  // namespace

void add_report(CLI::App& program, Work& work) {
  add_command<ReportArguments>(
      program, work, "report", "Make an HTML page of a JSON report of oscar-eval", report,
      [](CLI::App& sub, ReportArguments& arguments) {
        sub.add_option("FILE", arguments.file, "JSON report")->required();
        sub.add_option("-o,--output", arguments.output, "HTML file to write; - is stdout")
            ->required();
        add_answers_option(sub, arguments.answers);
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
      });
}

// oscar-bundle card: the model card of a bundle.

namespace {

namespace fs = std::filesystem;

struct CardArguments {
  std::string bundle, output, model, base_model, exports, answers, rope_scaling;
  std::vector<std::string> evaluations;
  bool force = false;
};

// The manifests of the exports in `place`.
std::vector<fs::path> manifests_in(const fs::path& place) {
  std::vector<fs::path> found;
  if (!fs::is_directory(place)) {
    throw Error({.what = "no folder of exports", .where = place.string()});
  }
  for (const auto& entry : fs::directory_iterator(place)) {
    const fs::path manifest = entry.path() / kManifestName;
    if (fs::is_regular_file(manifest)) found.push_back(manifest);
  }
  return found;
}

// The folders in `place` that hold an export, by name.
std::vector<CardExport> exports_in(const fs::path& place) {
  std::vector<CardExport> found;
  for (const fs::path& manifest : manifests_in(place)) {
    const fs::path folder = manifest.parent_path().filename();
    found.push_back({(place.filename() / folder).string(), read_json_file(manifest)});
  }
  std::ranges::sort(found, {}, &CardExport::folder);
  return found;
}

// The licence of the bundle's own model, not of another one: one with other files, though samples
// of its weights agree, may have another.
std::optional<StatedLicence> licence_of(const CardArguments& arguments, const Bundle& bundle) {
  const std::string& bundle_file = arguments.bundle;
  const auto rope = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const Checkpoint checkpoint = open_checkpoint(arguments.model, rope);
  for (const std::string& warning : checkpoint.warnings) warn(warning);
  const std::string& expected = bundle.model.weights_fingerprint;
  if (expected.empty()) {
    throw Error({.what = "the bundle names no files of weights, so no model's licence is its own",
                 .where = bundle_file,
                 .hint = "leave --model away, or calibrate " + checkpoint.path.string()});
  }
  const std::string found = checkpoint.weights->fingerprint(false);
  if (found != expected && checkpoint.weights->fingerprint(true) != expected) {
    throw Error({.what = "the bundle is of another model",
                 .where = bundle_file,
                 .expected = "weights_fingerprint " + expected,
                 .found = found + " of " + checkpoint.path.string()});
  }
  const std::string warning = check_bundle_matches(bundle, checkpoint, bundle_file);
  if (!warning.empty()) warn(warning);
  return read_licence(checkpoint.path);
}

// What is read to make the card.
std::vector<std::string> inputs_of(const CardArguments& arguments) {
  std::vector<std::string> inputs = arguments.evaluations;
  inputs.push_back(arguments.bundle);
  if (!arguments.answers.empty()) inputs.push_back(arguments.answers);
  if (!arguments.model.empty()) {
    for (const NamedPath& file : model_paths(arguments.model)) inputs.push_back(file.path.string());
  }
  if (!arguments.exports.empty()) {
    for (const fs::path& file : manifests_in(arguments.exports)) inputs.push_back(file.string());
  }
  return inputs;
}

int card(const CardArguments& arguments) {
  const Replace replace = arguments.force ? Replace::kYes : Replace::kNo;
  check_output(inputs_of(arguments), arguments.output, replace);
  const Bundle bundle = read_bundle(arguments.bundle);
  CardRequest request{.bundle_file = fs::path(arguments.bundle).filename().string(),
                      .evaluations = {},
                      .licence = {},
                      .base_model = arguments.base_model,
                      .exports = {},
                      .answers = read_answers_file(arguments.answers)};
  for (const std::string& file : arguments.evaluations) {
    request.evaluations.push_back(evaluation_of(bundle, read_json_file(file), file));
    request.evaluations.back().file = fs::path(file).filename().string();
  }
  if (request.evaluations.empty()) {
    if (auto stored = stored_evaluation(bundle, request.bundle_file)) {
      request.evaluations.push_back(*std::move(stored));
    }
  }
  if (!arguments.model.empty()) {
    request.licence = licence_of(arguments, bundle);
  }
  if (!arguments.exports.empty()) request.exports = exports_in(arguments.exports);
  write_text_output(arguments.output, model_card(bundle, request), replace);
  print_written(arguments.output);
  return kExitDone;
}

}  // namespace

void add_card(CLI::App& program, Work& work) {
  add_command<CardArguments>(
      program, work, "card", "Write a bundle's model card", card,
      [](CLI::App& sub, CardArguments& arguments) {
        sub.add_option("BUNDLE", arguments.bundle, "Rotation bundle")->required();
        sub.add_option("-o,--output", arguments.output, "README.md to write; - is stdout")
            ->required();
        sub.add_option("--eval", arguments.evaluations,
                       "JSON report of oscar-eval on this bundle, again for\n"
                       "a further one (default: the one that is stored in\n"
                       "the bundle; without any no figure is given)")
            ->allow_extra_args(false)
            ->option_text("FILE");
        add_answers_option(sub, arguments.answers);
        sub.add_option("--model", arguments.model,
                       "The bundle's model, for the licence that its files\n"
                       "state: a folder, a .gguf file or tiny-gqa")
            ->option_text("MODEL");
        sub.add_option("--rope-scaling", arguments.rope_scaling,
                       "JSON, where the model was calibrated with it");
        sub.add_option("--base-model", arguments.base_model, "The model on Hugging Face")
            ->check([](const std::string& name) {
              return is_hub_name(name) ? "" : "must be ORG/NAME, as on Hugging Face";
            })
            ->option_text("ORG/NAME");
        sub.add_option("--exports", arguments.exports,
                       "Folder of exports beside the card, which it lists")
            ->option_text("DIR");
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
      });
}

}  // namespace oscar::app
