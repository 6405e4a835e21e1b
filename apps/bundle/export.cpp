// oscar-bundle export: a bundle in the files of a serving stack.
#include "oscar/exchange/export.h"
#include "oscar/exchange/export_statistics.h"

#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "oscar/stacks/describe.h"

namespace oscar::app {
namespace {

struct ExportArguments {
  std::string input, output, to, base;
  bool reduce = false;
};

void print_files(const std::vector<std::string>& files) {
  for (const std::string& name : files) print_line("file        " + name);
}

int run_export(const ExportArguments& arguments) {
  if (arguments.to == kStatisticsExport) {
    const Bundle bundle = read_bundle(arguments.input);
    print_files(export_statistics(bundle, arguments.input, arguments.output));
    print_line(fmt::format("wrote       {}, {} layers, {} tokens", arguments.output,
                           bundle.statistics.size(), bundle.corpus.tokens));
    return kExitDone;
  }
  const ExchangeFormat& format = find_exchange_format(arguments.to, kStatisticsExport);
  const Bundle bundle = read_bundle(arguments.input);
  const ExportResult result = export_bundle(bundle, arguments.input, format, arguments.reduce,
                                            arguments.output, arguments.base);
  const std::string said =
      result.plan ? plans_json({*result.plan})[0]["line"].get<std::string>() : "holds all of it";
  print_line(fmt::format("{}: {}", format.name, said));
  print_files(result.files);
  print_line(fmt::format("wrote       {}, {} layers, read back and checked", arguments.output,
                         result.layers));
  return kExitDone;
}

}  // namespace

void add_export(CLI::App& program, Work& work) {
  add_command<ExportArguments>(
      program, work, "export", "Write a bundle in the files of a serving stack", run_export,
      [](CLI::App& sub, ExportArguments& arguments) {
        sub.add_option("BUNDLE", arguments.input, "Rotation bundle")->required();
        sub.add_option("--to", arguments.to,
                       "sglang-v1, sglang-v2, sglang-0c88a, vllm-pr46774,\n"
                       "mlx, gguf-rot; or npz, safetensors: plain arrays, which\n"
                       "hold any bundle; or statistics: its sums, as .npz")
            ->required()
            ->option_text("STACK REQUIRED");
        sub.add_option("-o,--output", arguments.output,
                       "Folder to write; must not exist. Its README has the\n"
                       "server's variables and launch line")
            ->required();
        sub.add_flag("--reduce", arguments.reduce,
                     "Where the stack cannot run the bundle's own\n"
                     "transforms, write the portable variant and say what\n"
                     "error is predicted");
        sub.add_option("--base", arguments.base,
                       "With gguf-rot: a .gguf of the model, of any\n"
                       "quantization; the file is then a copy of it with the\n"
                       "rotations, as llama.cpp's branch reads them")
            ->option_text("MODEL.gguf");
      });
}

}  // namespace oscar::app
