// oscar-bundle verify: every check of a file, or of an export, with its finding.
#include <fmt/format.h>

#include "bundle/commands.h"
#include "common/main.h"
#include "common/standard_streams.h"
#include "oscar/base/json.h"
#include "oscar/base/json_text.h"
#include "oscar/bundle/verify.h"
#include "oscar/exchange/verify_export.h"

namespace oscar::app {
namespace {

struct VerifyArguments {
  std::string file, stack;
  bool json = false;
};

int verify(const VerifyArguments& arguments) {
  const auto findings = arguments.stack.empty()
                            ? verify_bundle(arguments.file)
                            : verify_export(find_exchange_format(arguments.stack), arguments.file);
  size_t failed = 0;
  Json list = Json::array();
  for (const auto& finding : findings) {
    if (!finding.ok) ++failed;
    list.push_back({{"check", finding.check}, {"ok", finding.ok}, {"detail", finding.detail}});
  }
  if (arguments.json) {
    const Json report{{"file", arguments.file}, {"ok", failed == 0}, {"findings", std::move(list)}};
    print_text(json_text(report, 2) + "\n");
    return failed == 0 ? kExitDone : kExitFailed;
  }
  for (const auto& finding : findings) {
    print_line(fmt::format("{}  {}{}{}", finding.ok ? "ok    " : "FAILED", finding.check,
                           finding.ok ? ": " : "\n", finding.detail));
  }
  print_line(failed == 0 ? arguments.file + " is sound"
                         : fmt::format("{}: {} of {} checks failed", arguments.file, failed,
                                       findings.size()));
  return failed == 0 ? kExitDone : kExitFailed;
}

}  // namespace

void add_verify(CLI::App& program, Work& work) {
  add_command<VerifyArguments>(
      program, work, "verify", "Run every check and list the findings", verify,
      [](CLI::App& sub, VerifyArguments& arguments) {
        sub.add_option("FILE", arguments.file, "Bundle, statistics file or checkpoint")->required();
        sub.add_option("--stack", arguments.stack,
                       "FILE is the folder of an export to this stack, or\n"
                       "another one's files under their names: read them back\n"
                       "under the stack's rules")
            ->option_text("STACK");
        sub.add_flag("--json", arguments.json, "The findings, as JSON");
      });
}

}  // namespace oscar::app
