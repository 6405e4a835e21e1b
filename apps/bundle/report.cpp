// oscar-bundle report: the HTML page of a JSON report.
#include "bundle/commands.h"
#include "common/main.h"
#include "common/output_paths.h"
#include "oscar/base/json.h"
#include "oscar/report/html_report.h"

namespace oscar::app {
namespace {

struct ReportArguments {
  std::string file, output, answers;
  bool force = false;
};

int report(const ReportArguments& arguments) {
  const Replace replace = arguments.force ? Replace::kYes : Replace::kNo;
  std::vector<std::string> inputs = {arguments.file};
  if (!arguments.answers.empty()) inputs.push_back(arguments.answers);
  check_output(inputs, arguments.output, replace);
  const std::optional<Answers> answers = read_answers_file(arguments.answers);
  const std::string page =
      render_html_report(read_json_file(arguments.file), answers ? &*answers : nullptr);
  write_text_output(arguments.output, page, replace);
  return kExitDone;
}

}  // namespace

void add_report(CLI::App& program, Work& work) {
  add_command<ReportArguments>(
      program, work, "report", "Make an HTML page of a JSON report of oscar-eval", report,
      [](CLI::App& sub, ReportArguments& arguments) {
        sub.add_option("FILE", arguments.file, "JSON report")->required();
        sub.add_option("-o,--output", arguments.output, "HTML file to write; - is stdout")
            ->required();
        add_answers_option(sub, arguments.answers);
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
      });
}

}  // namespace oscar::app
