// Sub-commands that look at bundles: inspect, verify, diff, coverage, plan, backends.
#include <fmt/format.h>

#include <algorithm>

#include "bundle/commands.h"
#include "common/options.h"
#include "common/output_paths.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/base/json.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/coverage.h"
#include "oscar/bundle/decode.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/inspect.h"
#include "oscar/bundle/memory_plan.h"
#include "oscar/bundle/verify_export.h"

namespace oscar::app {

// oscar-bundle inspect: what a file is and holds.

namespace {

struct InspectArguments {
  std::string file;
  std::vector<std::string> evaluations;
  bool all = false;
  JsonOutput json;
};

int inspect(const InspectArguments& arguments) {
  std::vector<std::string> inputs = arguments.evaluations;
  inputs.push_back(arguments.file);
  check_json_output(inputs, arguments.json);
  std::optional<Json> evaluation;
  if (!arguments.evaluations.empty()) {
    evaluation = read_evaluation(read_bundle(arguments.file), arguments.evaluations);
  }
  const Inspection inspection = inspect_bundle(arguments.file, evaluation);
  const auto view = arguments.all ? InspectionView::kAll : InspectionView::kScreen;
  show(inspection_text(inspection, view), inspection.json, arguments.json);
  return kExitDone;
}

}  // namespace

void add_inspect(CLI::App& program, Work& work) {
  add_command<InspectArguments>(
      program, work, "inspect", "Show what a file is and holds", inspect,
      [](CLI::App& sub, InspectArguments& arguments) {
        sub.add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
        sub.add_flag("--all", arguments.all,
                     "Every layer, hash and backend, not what fits a screen");
        add_evaluations_option(sub, arguments.evaluations);
        add_json_option(sub, arguments.json);
      });
}

// oscar-bundle verify: every check of a file, or of an export, with its finding.

namespace {

struct VerifyArguments {
  std::string file, backend;
  JsonOutput json;
};

std::string findings_text(const std::string& file, const std::vector<Finding>& findings,
                          size_t failed) {
  std::string text;
  for (const Finding& finding : findings) {
    text += fmt::format("{}  {}{}{}\n", finding.ok ? "ok    " : "FAILED", finding.check,
                        finding.ok ? ": " : "\n", finding.detail);
  }
  text += failed == 0 ? file + " is sound"
                      : fmt::format("{}: {} of {} checks failed", file, failed, findings.size());
  return printable_lines(text) + "\n";
}

Json findings_json(const std::string& file, const std::vector<Finding>& findings, size_t failed) {
  Json list = Json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"check", finding.check}, {"ok", finding.ok}, {"detail", finding.detail}});
  }
  return {{"file", file}, {"ok", failed == 0}, {"findings", std::move(list)}};
}

int verify(const VerifyArguments& arguments) {
  const std::string& file = arguments.file;
  check_json_output({file}, arguments.json);
  if (arguments.backend == kStatisticsExport) {
    throw UsageError({.what = "no server loads an export of statistics: nothing is to be verified",
                      .where = "--for statistics",
                      .hint = "oscar-bundle verify BUNDLE checks the sums that it was made from"});
  }
  const std::vector<Finding> findings =
      arguments.backend.empty() ? verify_bundle(file)
                                : verify_export(find_exchange_format(arguments.backend), file);
  const size_t failed = std::ranges::count(findings, false, &Finding::ok);
  show(findings_text(file, findings, failed), findings_json(file, findings, failed),
       arguments.json);
  return failed == 0 ? kExitDone : kExitFailed;
}

}  // namespace

void add_verify(CLI::App& program, Work& work) {
  add_command<VerifyArguments>(
      program, work, "verify", "Run every check and list the findings", verify,
      [](CLI::App& sub, VerifyArguments& arguments) {
        sub.add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
        sub.add_option("--for", arguments.backend,
                       "FILE is the folder of an export to this backend, or\n"
                       "another one's files under their names: read them back\n"
                       "under the backend's rules")
            ->option_text("BACKEND");
        add_json_option(sub, arguments.json);
      });
}

// oscar-bundle diff: what two files say differently.

namespace {

struct DiffArguments {
  std::string file, other;
  bool exit_code = false;
};

int diff(const DiffArguments& arguments) {
  const auto lines = diff_bundles(arguments.file, arguments.other);
  for (const auto& line : lines) print_line(line);
  print_line(lines.empty() ? std::string("equal") : fmt::format("{} differences", lines.size()));
  return arguments.exit_code && !lines.empty() ? kExitFailed : kExitDone;
}

}  // namespace

void add_diff(CLI::App& program, Work& work) {
  add_command<DiffArguments>(program, work, "diff", "List what two files say differently", diff,
                             [](CLI::App& sub, DiffArguments& arguments) {
                               sub.add_option("A", arguments.file, "First file")->required();
                               sub.add_option("B", arguments.other, "Second file")->required();
                               sub.add_flag("--exit-code", arguments.exit_code,
                                            "Exit with 1 when they differ");
                             });
}

// oscar-bundle coverage: how well one text stands for another.

namespace {

struct CoverageArguments {
  std::vector<std::string> inputs;
  JsonOutput json;
};

int coverage(const CoverageArguments& arguments) {
  check_json_output(arguments.inputs, arguments.json);
  std::vector<Bundle> bundles;
  for (const auto& input : arguments.inputs) bundles.push_back(read_bundle(input));
  const Json result = oscar::coverage(bundles, arguments.inputs);
  show(coverage_text(result), result, arguments.json);
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
        add_json_option(sub, arguments.json);
      });
}

// oscar-bundle plan: what a model's cache takes, and what of it fits on a GPU.

namespace {

struct PlanArguments {
  std::string model, gpu_memory, weights;
  PlanOptions options;
  JsonOutput json;
};

int plan(const PlanArguments& arguments) {
  std::vector<std::string> inputs = {arguments.model};
  for (const NamedPath& file : model_paths(arguments.model)) inputs.push_back(file.path.string());
  check_json_output(inputs, arguments.json);
  PlanOptions options = arguments.options;
  options.gpu_bytes = parse_bytes(arguments.gpu_memory, "--gpu-memory");
  if (!arguments.weights.empty()) {
    options.weight_bytes = parse_bytes(arguments.weights, "--weights");
  }
  const Json found = memory_plan(read_cached_model(arguments.model), options);
  show(memory_plan_text(found), found, arguments.json);
  return kExitDone;
}

}  // namespace

void add_plan(CLI::App& program, Work& work) {
  add_command<PlanArguments>(
      program, work, "plan", "What a model's cache takes, and how much of it fits", plan,
      [](CLI::App& sub, PlanArguments& arguments) {
        sub.add_option("MODEL", arguments.model,
                       "Hugging Face folder (config.json is read, and the\n"
                       "weights' sizes), a .gguf file (its weights in BF16,\n"
                       "as servers load them), an embedded model's name, or a\n"
                       "bundle")
            ->required();
        auto* memory = sub.add_option("--gpu-memory", arguments.gpu_memory,
                                      "Memory of a GPU, say 80G: shows how many\n"
                                      "requests fit, and the longest context")
                           ->option_text("SIZE");
        sub.add_option("--users", arguments.options.users,
                       "Requests at a time: says whether they fit, and\n"
                       "what would")
            ->transform(positive())
            ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
            ->needs(memory)
            ->option_text("N");
        sub.add_option("--tp", arguments.options.gpus,
                       "GPUs that share weights and KV heads (1): divides\n"
                       "the query heads, and divides the KV heads or is a\n"
                       "multiple of them, as in vLLM")
            ->check(CLI::Range(1, 64))
            ->needs(memory)
            ->option_text("N");
        sub.add_option("--utilization", arguments.options.utilization,
                       "Share of a GPU that the server takes (0.9), in\n"
                       "vLLM gpu_memory_utilization")
            ->check(CLI::Range(0.05, 1.0))
            ->needs(memory)
            ->option_text("SHARE");
        sub.add_option("--context", arguments.options.context,
                       "Tokens a request (default, and at most: all that the\n"
                       "model serves)")
            ->transform(positive())
            ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
            ->option_text("N");
        sub.add_option("--weights", arguments.weights,
                       "What the weights take, in place of what the folder\n"
                       "says; a bundle does not know it")
            ->option_text("SIZE");
        add_json_option(sub, arguments.json);
      });
}

// oscar-bundle backends: the table of backends.

namespace {

struct BackendsArguments {
  JsonOutput json;
};

int backends(const BackendsArguments& arguments) {
  check_json_output({}, arguments.json);
  show(backends_text(), backends_json(), arguments.json);
  return kExitDone;
}

}  // namespace

void add_backends(CLI::App& program, Work& work) {
  add_command<BackendsArguments>(
      program, work, "backends", "What backends take, and which --for serves", backends,
      [](CLI::App& sub, BackendsArguments& arguments) { add_json_option(sub, arguments.json); });
}

}  // namespace oscar::app
