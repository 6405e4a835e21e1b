// What a search may choose from, and the text that it judges by.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "oscar/attention/int2_attention.h"
#include "oscar/bundle/bundle.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/head_fit.h"
#include "oscar/text/corpus.h"

namespace oscar {

// What a candidate is, what it is called in the record, and its codec on the device.

// One way of writing a side: from which fit each KV head has its transform, and how its rows are
// written.
using Candidate = std::vector<FittedHead>;  // [Hkv]
using Candidates = std::vector<Candidate>;  // of one side

bool same_candidate(const Candidate& a, const Candidate& b);

// A fit that candidates take heads from, with metrics, and with feedback factors where rows may be
// shaped.
struct SearchFit {
  FitRequest request;
  LayerTransforms transforms;

  const SideTransform& side(Side which) const { return side_of(transforms, which); }
};

// All heads of one fit, with the clipping ratio and the writer of `fixed`.
Candidate candidate_of(const SearchFit& fit, Side side, const FitOptions& fixed);

// The one of `fits` that a candidate's head is from; `other` when it is from none of them.
const SearchFit& fit_of(const FittedHead& head, Side side, const std::vector<SearchFit>& fits,
                        const SearchFit* other = nullptr);

// "balanced centred per-head" and "metric shaped".
std::string fit_text(const SearchFit& fit);
std::string writer_text(const RowRecipe& recipe);

// Codecs of candidates, put together on the device from fits that are brought there once: many
// candidates choose among few fits. For one layer; fits must outlive it.
class CandidateCodecs {
 public:
  CandidateCodecs(const CacheFormat& quantizer, int layer, const Rope& rope, torch::Device device)
      : quantizer_(quantizer), layer_(layer), rope_(rope), device_(device) {}

  // make_side_codec(compose_heads(heads, side)): any number of heads, as if of one layer.
  SideCodec codec(const std::vector<FittedHead>& heads, Side side);

 private:
  const SideCodec& of_fit(const SideTransform& fit, Side side);

  CacheFormat quantizer_;
  int layer_;
  Rope rope_;
  torch::Device device_;
  std::map<const SideTransform*, SideCodec> fits_;
};

// Which sequences of a corpus the fit never sees, so that candidates can be compared and confirmed
// on them (math 9.1).

// Queries behind the exact windows that a sequence must have to be worth holding back.
inline constexpr int64_t kFewestQueries = 128;
inline int64_t fewest_tokens(const CacheFormat& quantizer) {
  return int64_t{quantizer.sink_tokens} + quantizer.recent_tokens + kFewestQueries;
}
inline constexpr int64_t kFewestHeldBack = 2;
// Of a long corpus no more are needed.
inline constexpr int64_t kMostHeldBack = 8;

// Indices of sequences, ascending. Every sequence is in exactly one list.
struct HeldBack {
  std::vector<size_t> fit, search, confirm;
  std::string reason;  // why nothing is held back; "" when something is
};

// A quarter of the sequences (rounded down), kFewestHeldBack to kMostHeldBack of them: the last
// ones that have at least fewest_tokens. They go to the two halves in turn,
// the last one to confirmation, so that both see the same mixture. Nothing is held back when fewer
// than 2 * kFewestHeldBack sequences are long enough.
HeldBack hold_back(const std::vector<int64_t>& lengths, const CacheFormat& quantizer);
HeldBack hold_back(const std::vector<std::vector<int32_t>>& sequences,
                   const CacheFormat& quantizer);

// The sequences of `indices` in that order, with the record of the whole corpus but for `tokens`.
TokenSequences select_sequences(const TokenSequences& corpus, const std::vector<size_t>& indices);

}  // namespace oscar
