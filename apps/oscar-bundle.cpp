// oscar-bundle: look at, check and combine bundles and reports. Needs no model.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "common/main.h"
#include "common/options.h"
#include "oscar/base/atomic_file.h"
#include "oscar/bundle/diff.h"
#include "oscar/bundle/inspect.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/refit.h"
#include "oscar/bundle/verify.h"
#include "oscar/report/html_report.h"

namespace {

using oscar::app::kExitDone;
using oscar::app::kExitFailed;

struct Arguments {
  std::string file, other, output;
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

int inspect(const Arguments& arguments) {
  const oscar::Json inspection = oscar::inspect_bundle(arguments.file);
  if (arguments.json) {
    fmt::print("{}\n", inspection.dump(2, ' ', false, oscar::Json::error_handler_t::replace));
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
  const auto bundle = oscar::strip_statistics(oscar::read_bundle(arguments.file), arguments.file);
  oscar::write_bundle(bundle, arguments.output, arguments.force);
  return kExitDone;
}

int merge(const Arguments& arguments) {
  std::vector<oscar::Bundle> bundles;
  for (const auto& input : arguments.inputs) bundles.push_back(oscar::read_bundle(input));
  const auto total = oscar::merge_statistics(std::move(bundles), arguments.inputs, arguments.force);
  oscar::write_bundle(total, arguments.output, arguments.force);
  return kExitDone;
}

int fit(const Arguments& arguments) {
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

int report(const Arguments& arguments) {
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

  sub = command("strip", "Copy a bundle without its statistics", strip);
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

  sub = command("diff", "List what two files say differently", diff);
  sub->add_option("A", arguments.file, "First file")->required();
  sub->add_option("B", arguments.other, "Second file")->required();
  sub->add_flag("--exit-code", arguments.exit_code, "Exit with 1 when they differ");

  sub = command("report", "Make an HTML page of a JSON report of oscar-eval", report);
  sub->add_option("FILE", arguments.file, "JSON report")->required();
  sub->add_option("-o,--output", arguments.output, "HTML file to write")->required();

  return oscar::app::run_program(program, argc, argv, [&work] { return work(); });
}
