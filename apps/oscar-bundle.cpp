// oscar-bundle: look at, check and combine bundles and reports. Needs no model.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/main.h"
#include "common/options.h"
#include "common/output_paths.h"
#include "oscar/base/atomic_file.h"
#include "oscar/base/interrupt.h"
#include "oscar/bundle/diff.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/refit.h"
#include "oscar/bundle/verify.h"
#include "oscar/fold/fold.h"
#include "oscar/inspect/coverage.h"
#include "oscar/inspect/inspect.h"
#include "oscar/report/html_report.h"
#include "oscar/stacks/describe.h"

namespace {

using oscar::app::kExitDone;
using oscar::app::kExitFailed;

struct Arguments {
  std::string file, other, output, rope_scaling;
  oscar::ValueMean value_mean = oscar::ValueMean::kAuto;
  std::vector<std::string> inputs;
  bool json = false, force = false, exit_code = false, no_statistics = false;
  oscar::app::FitArguments fit;
  oscar::QuantizerSettings quantizer;
};

// Texts of a file may hold control characters; a terminal must not obey them.
void print_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n') c = '?';
  }
  fmt::print("{}\n", text);
}

// The output replaces none of the files it is made from, whatever --force says, and can be written.
void check_output(const Arguments& arguments) {
  std::vector<oscar::app::NamedPath> inputs = {{"input", arguments.file}};
  for (const auto& input : arguments.inputs) inputs.push_back({"input", input});
  const std::vector<oscar::app::NamedPath> outputs = {{"output", arguments.output}};
  oscar::app::check_outputs(inputs, outputs);
  oscar::app::probe_outputs(outputs);
}

int inspect(const Arguments& arguments) {
  const oscar::Inspection inspection = oscar::inspect_bundle(arguments.file);
  if (arguments.json) {
    fmt::print("{}\n", inspection.json.dump(2, ' ', false, oscar::Json::error_handler_t::replace));
  } else {
    fmt::print("{}", oscar::inspection_text(inspection));
  }
  return kExitDone;
}

int verify(const Arguments& arguments) {
  const auto findings = oscar::verify_bundle(arguments.file);
  size_t failed = 0;
  oscar::Json list = oscar::Json::array();
  for (const auto& finding : findings) {
    if (!finding.ok) ++failed;
    list.push_back({{"check", finding.check}, {"ok", finding.ok}, {"detail", finding.detail}});
  }
  if (arguments.json) {
    const oscar::Json report{
        {"file", arguments.file}, {"ok", failed == 0}, {"findings", std::move(list)}};
    fmt::print("{}\n", report.dump(2, ' ', false, oscar::Json::error_handler_t::replace));
    return failed == 0 ? kExitDone : kExitFailed;
  }
  for (const auto& finding : findings) {
    print_line(fmt::format("{}  {}{}{}", finding.ok ? "ok    " : "FAILED", finding.check,
                           finding.ok ? ": " : "\n", finding.detail));
  }
  print_line(failed == 0 ? arguments.file + " is sound"
                         : fmt::format("{}: {} of {} checks failed", arguments.file, failed,
                                       findings.size()));
  return failed == 0 ? kExitDone : kExitFailed;
}

int strip(const Arguments& arguments) {
  check_output(arguments);
  const auto bundle = oscar::strip_statistics(oscar::read_bundle(arguments.file), arguments.file);
  oscar::write_bundle(bundle, arguments.output, arguments.force);
  return kExitDone;
}

int merge(const Arguments& arguments) {
  check_output(arguments);
  std::vector<oscar::Bundle> bundles;
  for (const auto& input : arguments.inputs) bundles.push_back(oscar::read_bundle(input));
  const auto total = oscar::merge_statistics(std::move(bundles), arguments.inputs, arguments.force);
  oscar::write_bundle(total, arguments.output, arguments.force);
  return kExitDone;
}

int fit(const Arguments& arguments) {
  check_output(arguments);
  oscar::Bundle input = oscar::read_bundle(arguments.file);
  const auto out = oscar::refit_bundle(std::move(input),
                                       {.preset = arguments.fit.preset,
                                        .fit = arguments.fit.resolve(),
                                        .quantizer = arguments.quantizer,
                                        .keep_statistics = !arguments.no_statistics},
                                       arguments.file);
  for (const auto& layer : out.layers) {
    for (const auto& warning : layer.warnings) fmt::print(stderr, "warning: {}\n", warning);
  }
  oscar::write_bundle(out, arguments.output, arguments.force);
  return kExitDone;
}

int diff(const Arguments& arguments) {
  const auto lines = oscar::diff_bundles(arguments.file, arguments.other);
  for (const auto& line : lines) print_line(line);
  print_line(lines.empty() ? std::string("equal") : fmt::format("{} differences", lines.size()));
  return arguments.exit_code && !lines.empty() ? kExitFailed : kExitDone;
}

int coverage(const Arguments& arguments) {
  std::vector<oscar::Bundle> bundles;
  for (const auto& input : arguments.inputs) bundles.push_back(oscar::read_bundle(input));
  const oscar::Json result = oscar::coverage(bundles, arguments.inputs);
  if (arguments.json) {
    fmt::print("{}\n", result.dump(2, ' ', false, oscar::Json::error_handler_t::replace));
  } else {
    fmt::print("{}", oscar::coverage_text(result));
  }
  for (const auto& warning : result["warnings"]) {
    fmt::print(stderr, "warning: {}\n", warning.get<std::string>());
  }
  return kExitDone;
}

int fold(const Arguments& arguments) {
  oscar::install_interrupt_handlers();
  const auto rope = oscar::app::parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const auto result = oscar::fold_model(oscar::read_bundle(arguments.file), arguments.file,
                                        oscar::open_checkpoint(arguments.other, rope),
                                        arguments.output, arguments.value_mean);
  if (!result.warning.empty()) fmt::print(stderr, "warning: {}\n", result.warning);
  for (const auto& name : result.left_out) print_line("not copied  " + name);
  print_line(fmt::format("folded      {} tensors of {} layers, {} as bundle", result.tensors,
                         result.layers, oscar::kFoldedBundleName));
  if (result.mean != oscar::ValueMean::kAuto) {
    print_line(fmt::format("value mean  {}", oscar::describe(result.mean)));
  }
  print_line(fmt::format("check       attention's contribution changes by {:.2g} at most, relative",
                         result.largest_change));
  print_line(fmt::format("wrote       {}", arguments.output));
  return kExitDone;
}

int stacks(const Arguments& arguments) {
  fmt::print("{}", arguments.json ? oscar::stacks_json().dump(2) + "\n" : oscar::stacks_text());
  return kExitDone;
}

int report(const Arguments& arguments) {
  check_output(arguments);
  const std::string page = oscar::render_html_report(oscar::read_json_file(arguments.file));
  oscar::write_file_atomically(arguments.output, page);
  return kExitDone;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program{
      "Look at, check and combine rotation bundles and statistics files,\n"
      "and show what oscar-eval measured.\n"
      "Exit codes: 0 done, 1 failed (a message says why), 2 usage.",
      "oscar-bundle"};
  program.require_subcommand(1);
  Arguments arguments;
  std::function<int()> work;
  const auto command = [&](const char* name, const char* description,
                           int (*function)(const Arguments&)) {
    CLI::App* sub = program.add_subcommand(name, description);
    sub->callback([&work, &arguments, function] {
      work = [&arguments, function] { return function(arguments); };
    });
    return sub;
  };
  const auto add_force = [&](CLI::App* sub, const char* description) {
    sub->add_flag("--force", arguments.force, description);
  };

  auto* sub = command("inspect", "Show what a file is and holds", inspect);
  sub->add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
  sub->add_flag("--json", arguments.json, "Everything, as JSON");

  sub = command("verify", "Run every check and list the findings", verify);
  sub->add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
  sub->add_flag("--json", arguments.json, "The findings, as JSON");

  sub = command("strip", "Copy a bundle without statistics and fingerprint", strip);
  sub->add_option("IN", arguments.file, "Rotation bundle")->required();
  sub->add_option("OUT", arguments.output, "Bundle to write")->required();
  add_force(sub, "Replace OUT if it exists");

  sub = command("merge", "Add the statistics of several runs of one model", merge);
  sub->add_option("FILES", arguments.inputs, "Two or more files that hold statistics")
      ->required()
      ->expected(2, 1 << 20)
      ->type_size(1)
      ->option_text("...");
  sub->add_option("-o,--output", arguments.output, "Statistics file to write")->required();
  add_force(sub,
            "Replace the output if it exists, and count a\n"
            "corpus twice if two files hold it");

  sub = command("fit", "Fit again from statistics, without model or search", fit);
  sub->add_option("IN", arguments.file, "Statistics file, or bundle that holds statistics")
      ->required();
  sub->add_option("-o,--output", arguments.output, "Bundle to write")->required();
  sub->add_flag("--no-statistics", arguments.no_statistics, "Leave the sums out of the bundle");
  add_force(sub, "Replace the output if it exists");
  oscar::app::add_fit_options(*sub, arguments.fit, /*searchable=*/false);
  oscar::app::add_quantizer_options(*sub, arguments.quantizer);

  sub = command("coverage", "How well each file's text stands for the others'", coverage);
  sub->add_option("FILES", arguments.inputs,
                  "Two or more files that hold statistics of one model,\n"
                  "for example of one domain each. Shows the predicted\n"
                  "loss of a fit on the row's text, on the column's text,\n"
                  "over that of the column's own fit, and warns where a\n"
                  "text is covered badly")
      ->required()
      ->expected(2, 1 << 20)
      ->type_size(1)
      ->option_text("...");
  sub->add_flag("--json", arguments.json, "Everything, as JSON");

  sub = command("diff", "List what two files say differently", diff);
  sub->add_option("A", arguments.file, "First file")->required();
  sub->add_option("B", arguments.other, "Second file")->required();
  sub->add_flag("--exit-code", arguments.exit_code, "Exit with 1 when they differ");

  sub = command("fold", "Fold value transforms into a copy of the model", fold);
  sub->add_option("BUNDLE", arguments.file, "Rotation bundle of the model")->required();
  sub->add_option("MODEL", arguments.other, "Its Hugging Face folder, or tiny-gqa")->required();
  sub->add_option("OUT", arguments.output, "Folder to write; must not exist")->required();
  const std::map<std::string, oscar::ValueMean> value_means = {{"auto", oscar::ValueMean::kAuto},
                                                               {"fold", oscar::ValueMean::kFold},
                                                               {"keep", oscar::ValueMean::kKeep},
                                                               {"drop", oscar::ValueMean::kDrop}};
  sub->add_option("--value-mean", arguments.value_mean,
                  "Where values are centred: fold the mean into\n"
                  "biases, keep it in the bundle (for servers that\n"
                  "centre), drop it (values are then not centred), or\n"
                  "auto: fold if v_proj and o_proj have biases, else\n"
                  "keep")
      ->transform(CLI::CheckedTransformer(value_means))
      ->option_text("auto|fold|keep|drop");
  sub->add_option("--rope-scaling", arguments.rope_scaling,
                  "JSON, where the model was calibrated with it");

  sub = command("stacks", "What serving stacks take, and which --for serves", stacks);
  sub->add_flag("--json", arguments.json, "The same, as JSON");

  sub = command("report", "Make an HTML page of a JSON report of oscar-eval", report);
  sub->add_option("FILE", arguments.file, "JSON report")->required();
  sub->add_option("-o,--output", arguments.output, "HTML file to write")->required();

  return oscar::app::run_program(program, argc, argv, [&work] { return work(); });
}
