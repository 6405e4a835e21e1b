// oscar-bundle import: transforms of other tools as a bundle.
#include "oscar/exchange/import.h"

#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "common/options.h"
#include "common/output_paths.h"
#include "oscar/fit/presets.h"
#include "oscar/stacks/stack.h"

namespace oscar::app {
namespace {

struct ImportArguments {
  std::vector<std::string> inputs;
  std::string model, output, stack, clip, rope_scaling;
  ImportOptions options;
  const CLI::Option* metadata = nullptr;  // --metadata-dtype
  bool force = false;
};

// The codec of --for where it was given, so that the bundle runs there as it is.
QuantizerSettings codec_of(const ImportArguments& arguments, int head_dim) {
  if (arguments.stack.empty()) return arguments.options.quantizer;
  const Stack& stack = find_stack(arguments.stack);
  if (!is_served(stack)) {
    throw UsageError(
        {.what = "not served yet, because\n  " + codec_gap(stack, default_codec(stack)),
         .where = "--for " + arguments.stack,
         .expected = stack_names(true)});
  }
  QuantizerSettings quantizer = default_codec(stack);
  if (arguments.metadata->count() > 0) {
    quantizer.metadata_dtype = arguments.options.quantizer.metadata_dtype;
    take_rules_of(stack, quantizer);
    const std::string gap = codec_gap(stack, quantizer);
    if (!gap.empty()) {
      throw UsageError(
          {.what = std::string(stack.name) + " is not served with it:\n  " + gap,
           .where = std::string("--metadata-dtype ") + codec_word(quantizer.metadata_dtype)});
    }
  }
  quantizer.sink_tokens = arguments.options.quantizer.sink_tokens;
  quantizer.recent_tokens = arguments.options.quantizer.recent_tokens;
  quantizer.demote_block = arguments.options.quantizer.demote_block;
  const int named = arguments.options.quantizer.quant_group_size;
  quantizer.quant_group_size =
      named != 0 ? named : group_size_for(stack.quant_group_sizes, head_dim);
  return quantizer;
}

// What is read to make the bundle.
std::vector<std::string> inputs_of(const ImportArguments& arguments) {
  std::vector<std::string> inputs = arguments.inputs;
  for (const NamedPath& file : model_paths(arguments.model)) inputs.push_back(file.path.string());
  return inputs;
}

int run_import(const ImportArguments& arguments) {
  check_output(inputs_of(arguments), arguments.output,
               arguments.force ? Replace::kYes : Replace::kNo);
  const auto rope = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const Checkpoint checkpoint = open_checkpoint(arguments.model, rope);
  ImportOptions options = arguments.options;
  options.quantizer = codec_of(arguments, checkpoint.config.head_dim);
  if (!arguments.clip.empty()) {
    FitArguments given;
    given.clip = arguments.clip;
    const FitOptions fit = given.resolve();
    options.clip = {fit.clip_k, fit.clip_v};
  }
  const ReadTransforms read = read_transforms({arguments.inputs.begin(), arguments.inputs.end()},
                                              checkpoint.config.num_layers);
  const Bundle bundle = import_bundle(read, checkpoint, options);
  print_layer_warnings(bundle);
  write_bundle(bundle, arguments.output, arguments.force);
  print_line(fmt::format("read        {}, {} layers", read.kind, read.set.size()));
  print_line(fmt::format("wrote       {} as method {}, {}", arguments.output, bundle.method,
                         bundle.granularity));
  return kExitDone;
}

}  // namespace

void add_import(CLI::App& program, Work& work) {
  add_command<ImportArguments>(
      program, work, "import", "Make a bundle of transforms from elsewhere", run_import,
      [](CLI::App& sub, ImportArguments& arguments) {
        add_files(sub, arguments.inputs, 1,
                  "A folder of an export or of mlx-lm; SGLang's two .pt\n"
                  "files; a .gguf with attn_k_rot; one .npz or .safetensors\n"
                  "with k_rotation and v_rotation [layers, heads, d, d],\n"
                  "and what else docs/exchange.md names");
        sub.add_option("--model", arguments.model,
                       "Its Hugging Face folder, .gguf file or name: that of\n"
                       "a model on the Hub, tiny-gqa, or smollm2, once\n"
                       "scripts/fetch_smollm2.sh has fetched it")
            ->required();
        sub.add_option("-o,--output", arguments.output, "Bundle to write")->required();
        sub.add_option("--name", arguments.options.name, "Of the method, in the bundle")
            ->capture_default_str();
        sub.add_option("--for", arguments.stack, "Rows in the codec of this serving stack")
            ->option_text("STACK");
        sub.add_option("--clip", arguments.clip,
                       "K,V where the files hold no ratios (default:\n"
                       "0.96,0.92)")
            ->check([](const std::string& text) {
              return text.find(',') == std::string::npos ? "not two ratios K,V" : "";
            })
            ->option_text("K,V");
        sub.add_option("--rope-scaling", arguments.rope_scaling,
                       "JSON, where the model is served with it");
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
        add_quantizer_options(sub, arguments.options.quantizer);
        arguments.metadata = sub.get_option("--metadata-dtype");
      });
}

}  // namespace oscar::app
