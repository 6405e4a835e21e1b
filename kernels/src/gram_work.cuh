// How the rows of a gram call are shared out: blocks of rows in one list, cut into equal shares.
#pragma once

#include "oscar_kernels/gram.h"

namespace oscar {

// The fp32 accumulators of the tensor cores never see more rows than this. A block lies in one
// sequence of one head, so batching does not change the blocks.
constexpr int kGramBlockRows = 128;

// An output is one (tensor, KV head); its blocks follow each other in the list, heads in order,
// tensors in order. Share s of the list goes to one thread block. Each (share, output) that meet
// write partial sums to place share + output: along the list one of the two grows at every step, so
// places are distinct.
struct GramWork {
  GramParams params;
  int sequence_blocks[kMaxGramTensors];      // of one sequence of one head
  int64_t head_blocks[kMaxGramTensors];      // of one output
  int64_t first_block[kMaxGramTensors + 1];  // of a tensor in the list
  int64_t shares;

  __host__ __device__ int64_t total() const { return first_block[params.num_tensors]; }
  __host__ __device__ int64_t share_begin(int64_t share) const { return share * total() / shares; }
  __host__ __device__ int64_t outputs() const {
    return int64_t{params.num_tensors} * params.num_kv_heads;
  }
  // The share that holds a block of the list.
  __host__ __device__ int64_t share_of(int64_t block) const {
    int64_t share = block * shares / total();
    while (share_begin(share + 1) <= block) ++share;
    while (share_begin(share) > block) --share;
    return share;
  }
};

inline GramWork make_gram_work(const GramParams& params, int64_t most_shares) {
  GramWork work{.params = params};
  for (int i = 0; i < params.num_tensors; ++i) {
    const GramRows& t = params.tensors[i];
    work.sequence_blocks[i] = t.tokens / kGramBlockRows + (t.tokens % kGramBlockRows != 0);
    work.head_blocks[i] =
        int64_t{work.sequence_blocks[i]} * t.batch * (t.num_heads / params.num_kv_heads);
    work.first_block[i + 1] = work.first_block[i] + work.head_blocks[i] * params.num_kv_heads;
  }
  work.shares = work.total() < most_shares ? work.total() : most_shares;
  return work;
}

}  // namespace oscar
