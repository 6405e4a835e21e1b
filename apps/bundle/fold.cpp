// oscar-bundle fold: value transforms into a copy of the model.
#include "oscar/fold/fold.h"

#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "common/options.h"
#include "common/standard_streams.h"

namespace oscar::app {
namespace {

struct FoldArguments {
  std::string bundle, model, output, rope_scaling;
  ValueMean value_mean = ValueMean::kAuto;
};

int fold(const FoldArguments& arguments) {
  const auto rope = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const auto result =
      fold_model(read_bundle(arguments.bundle), arguments.bundle,
                 open_checkpoint(arguments.model, rope), arguments.output, arguments.value_mean);
  if (!result.warning.empty()) warn(result.warning);
  for (const auto& name : result.left_out) print_line("not copied  " + name);
  print_line(fmt::format("folded      {} tensors of {} layers, {} as bundle", result.tensors,
                         result.layers, kFoldedBundleName));
  if (result.mean != ValueMean::kAuto) {
    print_line(fmt::format("value mean  {}", describe(result.mean)));
  }
  print_line(fmt::format("check       attention's contribution changes by {:.2g} at most, relative",
                         result.largest_change));
  print_line(fmt::format("wrote       {}", arguments.output));
  return kExitDone;
}

}  // namespace

void add_fold(CLI::App& program, Work& work) {
  add_command<FoldArguments>(
      program, work, "fold", "Fold value transforms into a copy of the model", fold,
      [](CLI::App& sub, FoldArguments& arguments) {
        sub.add_option("BUNDLE", arguments.bundle, "Rotation bundle of the model")->required();
        sub.add_option("MODEL", arguments.model,
                       "Its Hugging Face folder, its .gguf file in F16,\n"
                       "BF16 or F32 (for llama.cpp and what is made of it),\n"
                       "or tiny-gqa")
            ->required();
        sub.add_option("OUT", arguments.output, "Folder to write; must not exist")->required();
        add_choice<ValueMean>(sub, "--value-mean", arguments.value_mean,
                              {{"auto", ValueMean::kAuto},
                               {"fold", ValueMean::kFold},
                               {"keep", ValueMean::kKeep},
                               {"drop", ValueMean::kDrop}},
                              "Where values are centred: fold the mean into\n"
                              "biases, keep it in the bundle (for servers that\n"
                              "centre), drop it (values are then not centred), or\n"
                              "auto: fold if v_proj and o_proj have biases, else\n"
                              "keep");
        sub.add_option("--rope-scaling", arguments.rope_scaling,
                       "JSON, where the model was calibrated with it");
      });
}

}  // namespace oscar::app
