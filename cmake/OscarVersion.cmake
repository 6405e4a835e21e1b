# Run at build time: writes OUTPUT, the source that holds the version and the commit, if it changed.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "oscar/base/version.h"

namespace oscar {

const char* const kToolVersion = "@VERSION@";
const char* const kToolCommit = "@commit@";

}  // namespace oscar
]])
