// Attention-output losses of cache variants on held-back chunks of one layer.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/int2/attention_probe.h"
#include "oscar/search/variant_codecs.h"

namespace oscar {

// What one layer's attention saw of one chunk, float32, at its place in the position span.
struct HeldChunk {
  torch::Tensor q;  // [Hq, tokens, d_k]
  torch::Tensor k;  // [Hkv, tokens, d_k]
  torch::Tensor v;  // [Hkv, tokens, d_v]
};

// Which key variant and which value variant run together; kExactRows leaves a side in BF16.
inline constexpr int kExactRows = -1;
struct Pairing {
  int key = kExactRows, value = kExactRows;
};

// Sums of |(o^ - o) W_O|^2 over a KV head's query heads and over the queries of each sample, a run
// of neighbouring queries: [pairings, heads, samples].
struct LossTable {
  int64_t pairings = 0, heads = 0, samples = 0;
  std::vector<double> sums;
  std::vector<double> energy;  // [heads] sum of |o W_O|^2 over the same queries

  double at(int64_t pairing, int64_t head, int64_t sample) const {
    return sums[static_cast<size_t>((pairing * heads + head) * samples + sample)];
  }
  double total(int64_t pairing, int64_t head) const;
  // Adds the pairing whose head h is that of pairing `first + picked[h]`, and returns its index:
  // heads do not influence each other.
  int64_t add_combined(int64_t first, const std::vector<int>& picked);
};

// Loss of `pairing` less that of `baseline`, and the standard error of that sum from its spread
// over samples. Negative: `pairing` is better. head < 0: all heads together.
struct LossDifference {
  double difference = 0, standard_error = 0;
  bool better() const { return difference < -standard_error; }
};
LossDifference compare(const LossTable& table, int64_t pairing, int64_t baseline, int64_t head);

// What losses are measured with.
struct LossSettings {
  QuantizerSettings quantizer;
  int layer = 0, sliding_window = 0;
  double sm_scale = 1;
  torch::Tensor output_metric;  // [Hq, d_v, d_v] on the device that computes
  // May be shared by the halves of one search, whose fits then live as long; null: each its own.
  std::shared_ptr<VariantCodecs> codecs = nullptr;
};

class HeldBackHalf {
 public:
  // A seeded sample of `queries_per_chunk` queries behind the exact windows, one from each of as
  // many equal strata. `keep`: what does not depend on the variant is computed once and kept.
  static HeldBackHalf sampled(const std::vector<HeldChunk>& chunks, const LossSettings& settings,
                              int64_t queries_per_chunk, uint64_t seed, bool keep);
  // Every query behind the exact windows; nothing is kept but the chunks.
  static HeldBackHalf all_queries(const std::vector<HeldChunk>& chunks,
                                  const LossSettings& settings);

  // Loss of each pairing of the given variants, INT2 as the bundle will run it.
  LossTable losses(const std::vector<SideVariant>& keys, const std::vector<SideVariant>& values,
                   const std::vector<Pairing>& pairings) const;

  int64_t num_queries() const;

 private:
  struct Part;   // queries of one chunk that are looked at together
  struct Batch;  // chunks whose rows are quantized together
  struct Rows;   // the rows of all variants of a batch

  explicit HeldBackHalf(const LossSettings& settings);
  std::vector<VariantRows> quantized(const std::vector<SideVariant>& variants, Side side,
                                     const torch::Tensor& x) const;
  // `positions`, ascending, fall into `samples` runs of equal length. `keep`: as far as memory for
  // it reaches.
  void add_chunk(const HeldChunk& chunk, const std::vector<int64_t>& positions, int64_t samples,
                 bool keep);
  AttentionProbe make_probe(const Batch& batch, const Part& part) const;
  torch::Tensor part_losses(const AttentionProbe& probe, const Part& part, const Rows& rows,
                            const std::vector<Pairing>& pairings) const;

  LossSettings settings_;
  CacheView view_;
  std::shared_ptr<VariantCodecs> codecs_;
  int64_t samples_ = 0, kept_ = 0;
  std::vector<std::shared_ptr<Batch>> batches_;
};

}  // namespace oscar
