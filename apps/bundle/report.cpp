// oscar-bundle report: the HTML page of a JSON report.
#include "bundle/commands.h"
#include "common/main.h"
#include "oscar/base/atomic_file.h"
#include "oscar/base/json.h"
#include "oscar/report/html_report.h"

namespace oscar::app {
namespace {

struct ReportArguments {
  std::string file, output;
};

int report(const ReportArguments& arguments) {
  check_output({arguments.file}, arguments.output);
  const std::string page = render_html_report(read_json_file(arguments.file));
  write_file_atomically(arguments.output, page);
  return kExitDone;
}

}  // namespace

void add_report(CLI::App& program, Work& work) {
  add_command<ReportArguments>(
      program, work, "report", "Make an HTML page of a JSON report of oscar-eval", report,
      [](CLI::App& sub, ReportArguments& arguments) {
        sub.add_option("FILE", arguments.file, "JSON report")->required();
        sub.add_option("-o,--output", arguments.output, "HTML file to write")->required();
      });
}

}  // namespace oscar::app
