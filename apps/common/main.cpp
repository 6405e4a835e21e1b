// The one place where exceptions become messages.
#include "common/main.h"

#include <fmt/format.h>

#include <new>

#include "oscar/base/error.h"
#include "oscar/base/version.h"

namespace oscar::app {

int run_program(CLI::App& program, int argc, char** argv, const std::function<int()>& work) {
  program.set_version_flag(
      "--version", fmt::format("{} {} ({})", program.get_name(), kToolVersion, kToolCommit));
  program.get_formatter()->column_width(28);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? kExitDone : kExitUsage;
  }
  try {
    return work();
  } catch (const Interrupted& stop) {
    fmt::print(stderr, "\n{}: {}\n", program.get_name(), stop.what());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "\n{}: out of memory\n", program.get_name());
  } catch (const std::exception& error) {
    fmt::print(stderr, "\n{}: {}\n", program.get_name(), error.what());
  }
  return kExitFailed;
}

}  // namespace oscar::app
