// `oscar-bench attention`: paged INT2 decode beside its ceilings and bf16 peers, in one process.
#pragma once

#include <string>
#include <vector>

#include "bench/device.h"

namespace oscar {

struct AttentionBenchShape {
  std::string name = "32/8 heads, d 128";
  int num_qo_heads = 32, num_kv_heads = 8, head_dim = 128, q_len = 1;
};

// Known names for --shape, "qwen3-8b, ...", and their shapes; throws Error listing the names for
// any other.
std::string attention_bench_shapes();
AttentionBenchShape attention_bench_shape(const std::string& name);

struct AttentionBenchOptions {
  AttentionBenchShape shape;
  std::vector<std::pair<int, int>> points;  // (batch, context)
  int replays = 21;
  bool centers = false;  // int2 with key centers besides
  // Contenders that may not fit beside a large point.
  bool bf16 = true;      // our BF16 baseline
  bool peers = true;     // SDPA through libtorch, where it was built in
  bool ceilings = true;  // kernels that only read the pages
};

// One record per point: bytes read, and of every contender median, p10 and p90 of microseconds and
// GB/s (of SDPA the median alone). Contenders: int2 (all tokens in pages), int2_settled (the same
// with unsettled_pages, so that a call begins while the one ahead runs), paged_read and read (the
// ceilings), int2_centers (int2 with random key centers), int2_windows, bf16_baseline, sdpa_flash,
// sdpa_cudnn. Throws Error when CUDA fails.
Json bench_attention(const AttentionBenchOptions& options);

// Small correctness checks on this GPU: the subnormal operand at all positions, and attention
// against the CPU. Prints nothing; each record says what was checked and whether it held.
Json bench_selftest();

// SDPA over a contiguous bf16 cache: microseconds, or negative where the backend refused. In a
// file of its own because it needs libtorch; without it both are -1.
struct SdpaTiming {
  double flash = -1.0, cudnn = -1.0;
};
SdpaTiming time_sdpa(const AttentionBenchShape& shape, int batch, int context, int replays);
bool sdpa_available();

}  // namespace oscar
