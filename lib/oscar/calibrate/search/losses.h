// Attention-output losses of candidates on held-back sequences of one layer (math 9.2), and how two
// compare.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "oscar/attention/attention_probe.h"
#include "oscar/bundle/bundle.h"
#include "oscar/calibrate/search/candidates.h"

namespace oscar {

// What one layer's attention saw of one sequence, float32, at its place in the position span.
struct HeldSequence {
  torch::Tensor q;  // [Hq, tokens, d_k]
  torch::Tensor k;  // [Hkv, tokens, d_k]
  torch::Tensor v;  // [Hkv, tokens, d_v]
  int64_t first_position = 0;
  torch::Tensor gate = {};  // [Hq, tokens, d_v] that outputs are multiplied by; undefined: none
};

// A key candidate with a value candidate, by index; kExactRows leaves a side in BF16.
inline constexpr int kExactRows = -1;
struct CandidatePair {
  int key = kExactRows, value = kExactRows;
};

// Each candidate with the other side exact: keys first, then values.
std::vector<CandidatePair> one_side_each(size_t keys, size_t values);

// Sums of |(o^ - o) W_O|^2 over a KV head's query heads and over the queries of each block, a run
// of neighbouring queries of a sequence: [pairs, heads, blocks]. Outputs are gated where the layer
// gates them.
struct LossTable {
  int64_t pairs = 0, heads = 0, blocks = 0;
  std::vector<double> sums;
  std::vector<double> energy;  // [heads] sum of |o W_O|^2 over the same queries

  double at(int64_t pair, int64_t head, int64_t block) const {
    return sums[static_cast<size_t>((pair * heads + head) * blocks + block)];
  }
  double total(int64_t pair, int64_t head) const;
  // Of a loss of `head`, the share of its energy; 0 when it has none.
  double share(double loss, int64_t head) const;
  // share(total): the error of the pair's output relative to the output, NMSE.
  double nmse(int64_t pair, int64_t head) const { return share(total(pair, head), head); }
  // Adds the pair whose head h is that of pair `first + picked[h]`, and returns its index: heads
  // do not influence each other.
  int64_t add_combined(int64_t first, const std::vector<int>& picked);
};

// Loss of `pair` less that of `baseline`, and the standard error of that sum from its spread over
// blocks (math 9.3). Negative: `pair` is better. head < 0: all heads together.
struct LossDifference {
  double difference = 0, standard_error = 0;
  bool better() const { return difference < -standard_error; }
};
LossDifference compare(const LossTable& table, int64_t pair, int64_t baseline, int64_t head);

// Four digits, for the record, which is for people and has to stay small. 0 when not finite.
double four_digits(double value);

// What losses are measured with.
struct LossSettings {
  CacheFormat quantizer;
  int layer = 0, sliding_window = 0;
  double sm_scale = 1;
  torch::Tensor output_metric;  // [Hq, d_v, d_v] on the device that computes
  Rope rope = {};               // needed when keys have centers
  // May be shared by the halves of one search, whose fits then live as long; null: each its own.
  std::shared_ptr<CandidateCodecs> codecs = nullptr;
};

class HeldBackHalf {
 public:
  // A seeded sample of `queries_per_sequence` queries behind the exact windows, one from each of as
  // many equal strata. `keep`: what does not depend on the candidate is computed once and kept.
  static HeldBackHalf sampled(const std::vector<HeldSequence>& sequences,
                              const LossSettings& settings, int64_t queries_per_sequence,
                              uint64_t seed, bool keep);
  // Every query behind the exact windows; nothing is kept but the sequences.
  static HeldBackHalf all_queries(const std::vector<HeldSequence>& sequences,
                                  const LossSettings& settings);

  // Loss of each of `pairs` of the given candidates, INT2 as the bundle will run it.
  LossTable losses(const Candidates& keys, const Candidates& values,
                   const std::vector<CandidatePair>& pairs) const;

  int64_t num_queries() const;

 private:
  struct Part;   // queries of one sequence that are looked at together
  struct Batch;  // sequences whose rows are quantized together
  struct Rows;   // the rows of all candidates of a batch

  explicit HeldBackHalf(const LossSettings& settings);
  std::vector<Int2Rows> quantized(const Candidates& candidates, Side side,
                                  const Batch& batch) const;
  // `positions`, ascending, fall into `blocks` of equal length. `keep`: as far as memory for it
  // reaches.
  void add_sequence(const HeldSequence& sequence, const std::vector<int64_t>& positions,
                    int64_t blocks, bool keep);
  AttentionProbe make_probe(const Batch& batch, const Part& part) const;
  torch::Tensor part_losses(const AttentionProbe& probe, const Part& part, const Rows& rows,
                            const std::vector<CandidatePair>& pairs) const;

  LossSettings settings_;
  CacheView view_;
  std::shared_ptr<CandidateCodecs> codecs_;
  int64_t blocks_ = 0, kept_ = 0;
  std::vector<std::shared_ptr<Batch>> batches_;
};

}  // namespace oscar
