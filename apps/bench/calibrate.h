// `oscar-bench calibrate`: what collecting statistics costs beside the bare forward pass.
#pragma once

#include <string>

#include "oscar/base/json.h"

namespace oscar {

struct CalibrateBenchOptions {
  std::string model = "tiny-gqa";
  std::string corpus;  // as for oscar-calibrate
  std::string device = "auto", dtype = "auto";
  int sequence_length = 4096;
  int64_t batch_tokens = 32768;
  int repeats = 5;
};

// Tokens per second of the forward pass alone and with all statistics (medians and extremes), and
// the share that collecting adds. Prints nothing.
Json bench_calibrate(const CalibrateBenchOptions& options);

}  // namespace oscar
