// `oscar-bench quantize`: quantize and append beside the time its bytes take.
#pragma once

#include "bench/device.h"

namespace oscar {

struct QuantizeBenchOptions {
  int tokens = 32768, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
  bool centres = false;  // each way of writing a second time, with key centres
};

// Records: plain rounding, shaped, and shaped with metric scale correction, each in microseconds,
// with the bytes moved and the ratio to a copy of as many bytes.
Json bench_quantize(const QuantizeBenchOptions& options);

}  // namespace oscar
