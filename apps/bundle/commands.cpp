// What sub-commands share.
#include "bundle/commands.h"

#include <fmt/format.h>

#include "common/output_paths.h"

namespace oscar::app {

CLI::Option* add_files(CLI::App& sub, std::vector<std::string>& files, int least,
                       const char* description) {
  return sub.add_option("FILES", files, description)
      ->required()
      ->expected(least, 1 << 20)
      ->type_size(1)
      ->option_text("...");
}

void print_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n') c = '?';
  }
  fmt::print("{}\n", text);
}

void check_output(const std::vector<std::string>& inputs, const std::string& output) {
  std::vector<NamedPath> named;
  for (const auto& input : inputs) named.push_back({"input", input});
  const std::vector<NamedPath> outputs = {{"output", output}};
  check_outputs(named, outputs);
  probe_outputs(outputs);
}

}  // namespace oscar::app
