// `oscar-bench history`, `quantize` and `transform`: kernels beside the time their bytes take.
#pragma once

#include "bench/device.h"

namespace oscar {

// `oscar-bench history`: INT2 tokens back to rows beside the time their bytes take.

struct HistoryBenchOptions {
  int tokens = 32768, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
};

// Two records, without and with key centers: microseconds for keys and values as bf16 rows of one
// request, a copy of as many bytes, and GB/s.
Json bench_history(const HistoryBenchOptions& options);

// `oscar-bench quantize`: quantize and append beside the time its bytes take.

struct QuantizeBenchOptions {
  int tokens = 32768, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
  bool centers = false;  // each way of writing a second time, with key centers
};

// Records: plain rounding, shaped, and shaped with metric scale correction, each in microseconds,
// with the bytes moved and the ratio to a copy of as many bytes.
Json bench_quantize(const QuantizeBenchOptions& options);

// `oscar-bench transform`: rotating q, k and v, and the output, beside the time their bytes take.

struct TransformBenchOptions {
  std::vector<int> rows = {1, 8, 53, 32768};
  int num_qo_heads = 32, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
};

// Two records per number of rows, q, k and v with their means, and the output: microseconds, a copy
// of as many bytes (rows and matrices read, rows written), and TFLOP/s.
Json bench_transform(const TransformBenchOptions& options);

}  // namespace oscar
