// oscar-bundle export: a bundle in the files of a serving stack.
#include "oscar/exchange/export.h"

#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "oscar/stacks/describe.h"

namespace oscar::app {
namespace {

struct ExportArguments {
  std::string input, output, to;
  bool reduce = false;
};

int run_export(const ExportArguments& arguments) {
  const ExchangeFormat& format = find_exchange_format(arguments.to);
  const Bundle bundle = read_bundle(arguments.input);
  const ExportResult result =
      export_bundle(bundle, arguments.input, format, arguments.reduce, arguments.output);
  const std::string said =
      result.plan ? plans_json({*result.plan})[0]["line"].get<std::string>() : "holds all of it";
  print_line(fmt::format("{:<12}{}", format.name, said));
  for (const std::string& name : result.files) print_line("file        " + name);
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
                       "sglang-v1, sglang-v2, vllm, mlx, gguf-rot; or npz,\n"
                       "safetensors: plain arrays, which hold any bundle")
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
      });
}

}  // namespace oscar::app
