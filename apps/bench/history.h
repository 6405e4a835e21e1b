// `oscar-bench history`: INT2 tokens back to rows beside the time their bytes take.
#pragma once

#include "bench/device.h"

namespace oscar {

struct HistoryBenchOptions {
  int tokens = 32768, num_kv_heads = 8, head_dim = 128;
  int replays = 21;
};

// Two records, without and with key centres: microseconds for keys and values as bf16 rows of one
// request, a copy of as many bytes, and GB/s.
Json bench_history(const HistoryBenchOptions& options);

}  // namespace oscar
