// `oscar-bench transform`: rotating q, k and v, and the output, beside the time their bytes take.
#pragma once

#include "bench/device.h"

namespace oscar {

struct TransformBenchOptions {
  std::vector<int> rows = {1, 8, 53, 32768};
  int num_qo_heads = 32, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
};

// Two records per number of rows, q, k and v with their means, and the output: microseconds, a copy
// of as many bytes (rows and matrices read, rows written), and TFLOP/s.
Json bench_transform(const TransformBenchOptions& options);

}  // namespace oscar
