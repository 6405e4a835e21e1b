// The sub-commands of oscar-bundle, and what they share.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/files.h"
#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/eval/report/answers.h"

namespace oscar::app {

// What the command line asks for: set by the sub-command that it names, run after parsing.
using Work = std::function<int()>;

// Each adds its sub-commands to `program`. They stand in --help in the order of the calls.
void add_inspect(CLI::App& program, Work& work);
void add_verify(CLI::App& program, Work& work);
void add_strip(CLI::App& program, Work& work);
void add_rewrite(CLI::App& program, Work& work);
void add_merge(CLI::App& program, Work& work);
void add_fit(CLI::App& program, Work& work);
void add_coverage(CLI::App& program, Work& work);
void add_diff(CLI::App& program, Work& work);
void add_export(CLI::App& program, Work& work);
void add_import(CLI::App& program, Work& work);
void add_fold(CLI::App& program, Work& work);
void add_plan(CLI::App& program, Work& work);
void add_backends(CLI::App& program, Work& work);
void add_report(CLI::App& program, Work& work);
void add_card(CLI::App& program, Work& work);

// Adds one sub-command. `options` declares its options on `Arguments`, which live as long as
// `program`; `function` is its work.
template <typename Arguments>
void add_command(CLI::App& program, Work& work, const char* name, const char* description,
                 int (*function)(const Arguments&),
                 const std::function<void(CLI::App& sub, Arguments& arguments)>& options) {
  CLI::App* sub = program.add_subcommand(name, description);
  const auto arguments = std::make_shared<Arguments>();
  options(*sub, *arguments);
  sub->callback([&work, arguments, function] {
    work = [arguments, function] { return function(*arguments); };
  });
}

// FILES: `least` or more of them.
CLI::Option* add_files(CLI::App& sub, std::vector<std::string>& files, int least,
                       const char* description);

// Texts of a file may hold control characters, which a terminal must not obey, and be of any
// length.
void print_line(const std::string& text);

// The file that a command has written, with its size; nothing for a stream, which has the output.
void print_written(const std::string& file);

// On stderr, one line for what layers have in common.
void print_layer_warnings(const Bundle& bundle);

// The output replaces none of the files it is made from, whatever --force says, can be written, and
// stands where it may.
void check_output(const std::vector<std::string>& inputs, const std::string& output,
                  Replace replace = Replace::kYes);

// --json FILE of a sub-command that shows something, and --force.
struct JsonOutput {
  std::string file;
  bool force = false;
};
void add_json_option(CLI::App& sub, JsonOutput& output);

// check_output of that file, where there is one.
void check_json_output(const std::vector<std::string>& inputs, const JsonOutput& output);

// Prints `text` and writes `json` to its file. Where that is standard output, prints only `json`.
void show(const std::string& text, const Json& json, const JsonOutput& output);

// --eval FILE, any number of times: reports of oscar-eval on the bundle, and the first one that
// compared a portable variant, whose KL takes the place of predicted errors. Reading throws Error
// where a report is of another bundle, or of a part of the text.
void add_evaluations_option(CLI::App& sub, std::vector<std::string>& files);
std::optional<Json> read_evaluation(const Bundle& bundle, const std::vector<std::string>& files);

// --answers FILE, and what is in it; none where the option was left out.
void add_answers_option(CLI::App& sub, std::string& file);
std::optional<Answers> read_answers_file(const std::string& file);

}  // namespace oscar::app
