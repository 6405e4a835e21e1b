// What sub-commands share.
#include "bundle/commands.h"

#include <fmt/format.h>

#include "common/output_paths.h"
#include "common/terminal.h"
#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/eval/report/card.h"

namespace oscar::app {

CLI::Option* add_files(CLI::App& sub, std::vector<std::string>& files, int least,
                       const char* description) {
  return sub.add_option("FILES", files, description)
      ->required()
      ->expected(least, 1 << 20)
      ->type_size(1)
      ->option_text("...");
}

void print_line(const std::string& text) { fmt::print("{}\n", printable_lines(text)); }

void print_written(const std::string& file) {
  if (file == kStandardOutput || leads_to_stream(file)) return;
  std::error_code status;
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(file, status));
  print_line(fmt::format("wrote       {} ({})", file, format_bytes(bytes)));
}

void print_layer_warnings(const Bundle& bundle) {
  std::vector<std::string> warnings;
  for (const LayerTransforms& layer : bundle.layers) {
    warnings.insert(warnings.end(), layer.warnings.begin(), layer.warnings.end());
  }
  for (const std::string& warning : joined_by_layer(warnings)) {
    warn(warning);
  }
}

void check_output(const std::vector<std::string>& inputs, const std::string& output,
                  Replace replace) {
  std::vector<NamedPath> named;
  for (const auto& input : inputs) named.push_back({"input", input});
  const std::vector<NamedPath> outputs = {{"output", output}};
  check_outputs(named, outputs);
  probe_outputs(outputs, replace);
}

void add_json_option(CLI::App& sub, JsonOutput& output) {
  sub.add_option("--json", output.file, "Write all of it as JSON (-: to stdout)")
      ->option_text("FILE");
  sub.add_flag("--force", output.force, "Replace the file of --json");
}

void check_json_output(const std::vector<std::string>& inputs, const JsonOutput& output) {
  if (output.file.empty()) return;
  check_output(inputs, output.file, output.force ? Replace::kYes : Replace::kNo);
}

void show(const std::string& text, const Json& json, const JsonOutput& output) {
  if (output.file != kStandardOutput) print_text(text);
  if (output.file.empty()) return;
  write_text_output(output.file, json_text(json, 2) + "\n",
                    output.force ? Replace::kYes : Replace::kNo);
}

void add_evaluations_option(CLI::App& sub, std::vector<std::string>& files) {
  sub.add_option("--eval", files,
                 "JSON report of oscar-eval on this bundle, again for\n"
                 "a further one: what was measured of the portable\n"
                 "variant, in place of predicted errors (default: the\n"
                 "report that is stored in the bundle)")
      ->allow_extra_args(false)
      ->option_text("FILE");
}

std::optional<Json> read_evaluation(const Bundle& bundle, const std::vector<std::string>& files) {
  std::optional<Json> found;
  for (const std::string& file : files) {
    Json report = read_json_file(file);
    const bool compares = evaluation_of(bundle, report, file).kl.compares();
    if (!found && compares) found = std::move(report);
  }
  return found;
}

void add_answers_option(CLI::App& sub, std::string& file) {
  sub.add_option("--answers", file,
                 "Sample answers to show: JSON that\n"
                 "python -m oscar_int2 answers wrote with this bundle")
      ->option_text("FILE");
}

std::optional<Answers> read_answers_file(const std::string& file) {
  if (file.empty()) return std::nullopt;
  return read_answers(read_json_file(file), std::filesystem::path(file).filename().string());
}

}  // namespace oscar::app
