// Sub-commands that look at bundles: inspect, verify, diff, coverage, plan, stacks.
#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/options.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/base/json.h"
#include "oscar/bundle/coverage.h"
#include "oscar/bundle/decode.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/inspect.h"
#include "oscar/bundle/memory_plan.h"
#include "oscar/bundle/stack_plan.h"
#include "oscar/bundle/verify_export.h"

namespace oscar::app {

// oscar-bundle inspect: what a file is and holds.

namespace {

struct InspectArguments {
  std::string file;
  bool json = false;
};

int inspect(const InspectArguments& arguments) {
  const Inspection inspection = inspect_bundle(arguments.file);
  if (arguments.json) {
    print_text(json_text(inspection.json, 2) + "\n");
  } else {
    print_text(inspection_text(inspection));
  }
  return kExitDone;
}

}  // namespace

void add_inspect(CLI::App& program, Work& work) {
  add_command<InspectArguments>(
      program, work, "inspect", "Show what a file is and holds", inspect,
      [](CLI::App& sub, InspectArguments& arguments) {
        sub.add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
        sub.add_flag("--json", arguments.json, "Everything, as JSON");
      });
}

// oscar-bundle verify: every check of a file, or of an export, with its finding.

namespace {

struct VerifyArguments {
  std::string file, stack;
  bool json = false;
};

int verify(const VerifyArguments& arguments) {
  const auto findings = arguments.stack.empty()
                            ? verify_bundle(arguments.file)
                            : verify_export(find_exchange_format(arguments.stack), arguments.file);
  size_t failed = 0;
  Json list = Json::array();
  for (const auto& finding : findings) {
    if (!finding.ok) ++failed;
    list.push_back({{"check", finding.check}, {"ok", finding.ok}, {"detail", finding.detail}});
  }
  if (arguments.json) {
    const Json report{{"file", arguments.file}, {"ok", failed == 0}, {"findings", std::move(list)}};
    print_text(json_text(report, 2) + "\n");
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

}  // namespace

void add_verify(CLI::App& program, Work& work) {
  add_command<VerifyArguments>(
      program, work, "verify", "Run every check and list the findings", verify,
      [](CLI::App& sub, VerifyArguments& arguments) {
        sub.add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
        sub.add_option("--stack", arguments.stack,
                       "FILE is the folder of an export to this stack, or\n"
                       "another one's files under their names: read them back\n"
                       "under the stack's rules")
            ->option_text("STACK");
        sub.add_flag("--json", arguments.json, "The findings, as JSON");
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

// oscar-bundle plan: what a model's cache takes, and what of it fits on a GPU.

namespace {

struct PlanArguments {
  std::string model, gpu_memory, weights;
  int64_t context = 0;
  bool json = false;
};

int plan(const PlanArguments& arguments) {
  PlanOptions options;
  options.gpu_bytes = parse_bytes(arguments.gpu_memory, "--gpu-memory");
  options.context = arguments.context;
  if (!arguments.weights.empty()) {
    options.weight_bytes = parse_bytes(arguments.weights, "--weights");
  }
  const Json found = memory_plan(read_cached_model(arguments.model), options);
  print_text(arguments.json ? json_text(found, 2) + "\n" : memory_plan_text(found));
  return kExitDone;
}

}  // namespace

void add_plan(CLI::App& program, Work& work) {
  add_command<PlanArguments>(program, work, "plan",
                             "What a model's cache takes, and how much of it fits", plan,
                             [](CLI::App& sub, PlanArguments& arguments) {
                               sub.add_option("MODEL", arguments.model,
                                              "Hugging Face folder (config.json is read, and the\n"
                                              "weights' sizes), a .gguf file, an embedded\n"
                                              "model's name, or a bundle")
                                   ->required();
                               sub.add_option("--gpu-memory", arguments.gpu_memory,
                                              "Memory for weights and caches, say 80G: shows how\n"
                                              "many requests fit, and the longest context")
                                   ->option_text("SIZE");
                               sub.add_option("--context", arguments.context,
                                              "Tokens a request (default: all that the model\n"
                                              "serves)")
                                   ->transform(positive())
                                   ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
                                   ->option_text("N");
                               sub.add_option("--weights", arguments.weights,
                                              "What the weights take, in place of what the folder\n"
                                              "says; a bundle does not know it")
                                   ->option_text("SIZE");
                               sub.add_flag("--json", arguments.json, "Everything, as JSON");
                             });
}

// oscar-bundle stacks: the table of serving stacks.

namespace {

struct StacksArguments {
  bool json = false;
};

int stacks(const StacksArguments& arguments) {
  fmt::print("{}", arguments.json ? stacks_json().dump(2) + "\n" : stacks_text());
  return kExitDone;
}

}  // namespace

void add_stacks(CLI::App& program, Work& work) {
  add_command<StacksArguments>(program, work, "stacks",
                               "What serving stacks take, and which --for serves", stacks,
                               [](CLI::App& sub, StacksArguments& arguments) {
                                 sub.add_flag("--json", arguments.json, "The same, as JSON");
                               });
}

}  // namespace oscar::app
