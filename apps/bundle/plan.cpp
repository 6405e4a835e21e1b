// oscar-bundle plan: what a model's cache takes, and what of it fits on a GPU.
#include "bundle/commands.h"
#include "common/main.h"
#include "common/options.h"
#include "common/standard_streams.h"
#include "oscar/base/json_text.h"
#include "oscar/inspect/memory_plan.h"

namespace oscar::app {
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

}  // namespace oscar::app
