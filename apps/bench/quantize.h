// `oscar-bench quantize`: quantize and append beside the time its bytes take.
#pragma once

#include "bench/device.h"

namespace oscar {

struct QuantizeBenchOptions {
  int tokens = 32768, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
};

// Records: plain and shaped, microseconds, bytes moved, ratio to a copy of as many bytes.
Json bench_quantize(const QuantizeBenchOptions& options);

}  // namespace oscar
