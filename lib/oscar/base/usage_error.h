// The error of a command line: the programs end with another exit code than for bad files.
#pragma once

#include "oscar/base/error.h"

namespace oscar {

// Thrown for an option's value that means nothing whatever the files hold, and for options that
// contradict each other, where that shows after the command line was parsed.
class UsageError : public Error {
 public:
  using Error::Error;
};

}  // namespace oscar
