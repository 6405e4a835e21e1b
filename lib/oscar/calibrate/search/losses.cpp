// Rows of all candidates are quantized side by side, as if they were heads of one layer; losses of
// parts of the queries are added up.
#include "oscar/calibrate/search/losses.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>

#include "oscar/attention/int2_attention.h"
#include "oscar/base/error.h"
#include "oscar/calibrate/search/pass.h"
#include "oscar/model/side_by_side.h"
#include "oscar/text/corpus.h"

namespace oscar {
namespace {

constexpr int64_t kSampledBlocks = 8;   // of one sequence's sampled queries
constexpr int64_t kBlockQueries = 256;  // queries of a block, where all are looked at

// One position of each of `count` equal strata of [first, last), ascending.
std::vector<int64_t> stratified(int64_t first, int64_t last, int64_t count, uint64_t seed) {
  SplitMix64 random(seed);
  const int64_t range = last - first;
  count = std::min(count, range);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = first + range * i / count, end = first + range * (i + 1) / count;
    positions.push_back(begin +
                        static_cast<int64_t>(random.below(static_cast<uint64_t>(end - begin))));
  }
  return positions;
}

std::vector<int64_t> all_of(int64_t first, int64_t last) {
  std::vector<int64_t> positions;
  for (int64_t i = first; i < last; ++i) positions.push_back(i);
  return positions;
}

// How many of positions[begin...] fit into one part.
int64_t part_size(const std::vector<int64_t>& positions, int64_t begin, int64_t query_heads,
                  int64_t most_scores) {
  const auto count = static_cast<int64_t>(positions.size());
  int64_t end = begin + 1;
  const auto fits = [&](int64_t queries, int64_t last) {
    return queries <= kFewestTogether || queries * query_heads * (last + 1) <= most_scores;
  };
  while (end < count && fits(end + 1 - begin, positions[static_cast<size_t>(end)])) ++end;
  return end - begin;
}

// Calls work(i) for all i: side by side on the CPU, where torch would find too little in each.
template <typename Work>
void for_each_part(int64_t count, torch::Device device, const Work& work) {
  if (device.is_cuda()) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  side_by_side(count, 1, [&](int64_t begin, int64_t end) {
    const torch::InferenceMode inference;  // of this thread
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

// Where a sequence lies among the rows of its batch, and at which position it begins.
struct SequencePlace {
  int64_t begin = 0, tokens = 0, first_position = 0;
};

std::vector<SegmentRun> runs_of(const SideCodec& codec, const std::vector<SequencePlace>& sequences,
                                int64_t sink) {
  std::vector<SegmentRun> runs;
  for (const SequencePlace& sequence : sequences) {
    const RowPlaces places{.first_position = sequence.first_position, .sink = sink};
    for (const SegmentRun& run : segment_runs(codec, places, sequence.tokens)) {
      runs.push_back({sequence.begin + run.begin, sequence.begin + run.end, run.segment});
    }
  }
  return runs;
}

// Rows of candidates of one side, written as if they were heads of one layer. x [1, Hkv, tokens,
// d].
void quantize_together(std::span<const Candidate> candidates, Side side, const torch::Tensor& x,
                       const std::vector<SequencePlace>& sequences, int64_t sink,
                       CandidateCodecs& codecs, const std::string& where,
                       std::vector<Int2Rows>& rows) {
  std::vector<FittedHead> heads;
  for (const Candidate& candidate : candidates) {
    heads.insert(heads.end(), candidate.begin(), candidate.end());
  }
  const SideCodec codec = codecs.codec(heads, side);
  const auto count = static_cast<int64_t>(candidates.size()), num_heads = x.size(1);
  const auto exact = to_cache_basis(codec, x.repeat({1, count, 1, 1}));
  auto result = quantize_dequantize(codec, exact, where, runs_of(codec, sequences, sink));
  if (side == Side::kValue) result = torch::matmul(result.sub_(exact), codec.partner);
  for (int64_t i = 0; i < count; ++i) {
    const auto own = [&](const torch::Tensor& t, int64_t dim) {
      return t.defined() ? t.narrow(dim, i * num_heads, num_heads) : t;
    };
    rows.push_back({own(result, 1)[0], own(codec.partner, 0), own(codec.mean, 0)});
  }
}

Int2Rows slice_tokens(const Int2Rows& rows, int64_t begin, int64_t tokens) {
  return {rows.rows.narrow(1, begin, tokens), rows.partner, rows.mean};
}

}  // namespace

struct HeldBackHalf::Part {
  int64_t begin = 0, tokens = 0;   // of the sequence within the batch
  std::vector<int64_t> positions;  // within the sequence
  torch::Tensor q;                 // [Hq, queries, d_k]
  torch::Tensor gate;              // [Hq, queries, d_v] or undefined
  int64_t first_block = 0;         // of the half
  torch::Tensor block_of_query;    // [queries, blocks from there] float64, one 1 in each row
  std::optional<AttentionProbe> kept;
};

struct HeldBackHalf::Batch {
  torch::Tensor k, v;  // [1, Hkv, tokens of all sequences, d]
  std::vector<SequencePlace> sequences;
  std::vector<Part> parts;
};

struct HeldBackHalf::Rows {
  std::vector<Int2Rows> keys, values;
};

// One Int2Rows for each candidate, as many together as memory allows.
std::vector<Int2Rows> HeldBackHalf::quantized(const Candidates& candidates, Side side,
                                              const Batch& batch) const {
  const torch::Tensor& x = side == Side::kKey ? batch.k : batch.v;
  const std::string where = "layer " + std::to_string(settings_.layer) + ", search";
  std::vector<Int2Rows> rows;
  const auto together =
      static_cast<size_t>(std::max<int64_t>(1, search_limits(x.device()).rows / x.numel()));
  const std::span<const Candidate> all = candidates;
  for (size_t begin = 0; begin < all.size(); begin += together) {
    const size_t count = std::min(all.size() - begin, together);
    quantize_together(all.subspan(begin, count), side, x, batch.sequences, view_.sink, *codecs_,
                      where, rows);
  }
  return rows;
}

std::vector<CandidatePair> one_side_each(size_t keys, size_t values) {
  std::vector<CandidatePair> pairs;
  for (size_t i = 0; i < keys; ++i) pairs.push_back({static_cast<int>(i), kExactRows});
  for (size_t i = 0; i < values; ++i) pairs.push_back({kExactRows, static_cast<int>(i)});
  return pairs;
}

double LossTable::total(int64_t pair, int64_t head) const {
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += at(pair, head, b);
  return sum;
}

double LossTable::share(double loss, int64_t head) const {
  const double of = energy[static_cast<size_t>(head)];
  return of > 0 ? loss / of : 0.0;
}

int64_t LossTable::add_combined(int64_t first, const std::vector<int>& picked) {
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t b = 0; b < blocks; ++b) {
      sums.push_back(at(first + picked[static_cast<size_t>(head)], head, b));
    }
  }
  return pairs++;
}

LossDifference compare(const LossTable& table, int64_t pair, int64_t baseline, int64_t head) {
  std::vector<double> differences(static_cast<size_t>(table.blocks), 0.0);
  for (int64_t h = head < 0 ? 0 : head; h < (head < 0 ? table.heads : head + 1); ++h) {
    for (int64_t b = 0; b < table.blocks; ++b) {
      differences[static_cast<size_t>(b)] += table.at(pair, h, b) - table.at(baseline, h, b);
    }
  }
  const auto n = static_cast<double>(table.blocks);
  LossDifference result;
  for (const double d : differences) result.difference += d;
  double squares = 0;
  for (const double d : differences) squares += std::pow(d - result.difference / n, 2);
  // Of a sum of n independent blocks; with a single one nothing is known about the spread.
  result.standard_error =
      table.blocks > 1 ? std::sqrt(squares * n / (n - 1)) : std::abs(result.difference);
  return result;
}

double four_digits(double value) {
  return std::isfinite(value) ? std::stod(fmt::format("{:.4g}", value)) : 0.0;
}

void HeldBackHalf::add_sequence(const HeldSequence& sequence, const std::vector<int64_t>& positions,
                                int64_t blocks, bool keep) {
  const torch::Device device = sequence.q.device();
  const SearchLimits& limits = search_limits(device);
  const auto count = static_cast<int64_t>(positions.size());
  if (batches_.empty() || batches_.back()->k.numel() + sequence.k.numel() > limits.sequence_rows) {
    batches_.push_back(std::make_shared<Batch>());
    batches_.back()->k = sequence.k.slice(1, 0, 0).unsqueeze(0);
    batches_.back()->v = sequence.v.slice(1, 0, 0).unsqueeze(0);
  }
  Batch& batch = *batches_.back();
  const int64_t begin = batch.k.size(2);
  batch.sequences.push_back({begin, sequence.k.size(1), sequence.first_position});
  batch.k = torch::cat({batch.k, sequence.k.unsqueeze(0)}, 2);
  batch.v = torch::cat({batch.v, sequence.v.unsqueeze(0)}, 2);
  blocks = std::min(blocks, count);
  for (int64_t first = 0; first < count;) {
    const int64_t size = part_size(positions, first, sequence.q.size(0), limits.scores);
    const std::vector<int64_t> own(positions.begin() + first, positions.begin() + first + size);
    const auto block = torch::arange(first, first + size).mul(blocks).div(count, "floor");
    const auto range = torch::arange(block[0].item<int64_t>(), block[-1].item<int64_t>() + 1);
    const auto places = torch::tensor(own, torch::kInt64).to(device);
    Part part{
        .begin = begin,
        .tokens = sequence.k.size(1),
        .positions = own,
        .q = sequence.q.index_select(1, places),
        .gate = sequence.gate.defined() ? sequence.gate.index_select(1, places) : torch::Tensor(),
        .first_block = blocks_ + block[0].item<int64_t>(),
        .block_of_query = block.unsqueeze(1).eq(range).to(device, torch::kFloat64),
        .kept = std::nullopt};
    const int64_t scores = 2 * size * sequence.q.size(0) * (own.back() + 1);
    if (keep && kept_ + scores <= limits.kept) {
      part.kept = make_probe(batch, part);
      kept_ += scores;
    }
    batch.parts.push_back(std::move(part));
    first += size;
  }
  blocks_ += blocks;
}

AttentionProbe HeldBackHalf::make_probe(const Batch& batch, const Part& part) const {
  const int64_t tokens = part.positions.back() + 1;  // later keys are hidden from all
  return AttentionProbe(view_, part.positions, part.q, batch.k[0].narrow(1, part.begin, tokens),
                        batch.v[0].narrow(1, part.begin, tokens), settings_.output_metric,
                        settings_.sm_scale, part.gate);
}

HeldBackHalf::HeldBackHalf(const LossSettings& settings)
    : settings_(settings),
      view_(cache_view(settings.quantizer, settings.sliding_window)),
      codecs_(settings.codecs ? settings.codecs
                              : std::make_shared<CandidateCodecs>(
                                    settings.quantizer, settings.layer, settings.rope,
                                    settings.output_metric.device())) {}

HeldBackHalf HeldBackHalf::sampled(const std::vector<HeldSequence>& sequences,
                                   const LossSettings& settings, int64_t queries_per_sequence,
                                   uint64_t seed, bool keep) {
  HeldBackHalf half(settings);
  const int64_t first = half.view_.sink + half.view_.recent;
  for (size_t i = 0; i < sequences.size(); ++i) {
    half.add_sequence(sequences[i],
                      stratified(first, sequences[i].k.size(1), queries_per_sequence, seed + i),
                      kSampledBlocks, keep);
  }
  return half;
}

HeldBackHalf HeldBackHalf::all_queries(const std::vector<HeldSequence>& sequences,
                                       const LossSettings& settings) {
  HeldBackHalf half(settings);
  for (const HeldSequence& sequence : sequences) {
    const auto positions = all_of(half.view_.sink + half.view_.recent, sequence.k.size(1));
    const auto count = static_cast<int64_t>(positions.size());
    half.add_sequence(sequence, positions, (count + kBlockQueries - 1) / kBlockQueries, false);
  }
  return half;
}

// [pairs, heads, blocks of the part].
torch::Tensor HeldBackHalf::part_losses(const AttentionProbe& probe, const Part& part,
                                        const Rows& rows,
                                        const std::vector<CandidatePair>& pairs) const {
  std::vector<torch::Tensor> losses(pairs.size());
  for (int key = kExactRows; key < static_cast<int>(rows.keys.size()); ++key) {
    torch::Tensor weights, int2_part;
    for (size_t p = 0; p < pairs.size(); ++p) {
      if (pairs[p].key != key) continue;
      const int value = pairs[p].value;
      if (!weights.defined()) {
        weights = key == kExactRows
                      ? probe.exact_weights()
                      : probe.weights(slice_tokens(rows.keys[key], part.begin, part.tokens));
      }
      torch::Tensor error;
      if (value == kExactRows) {
        error = probe.key_error(weights);
      } else {
        const Int2Rows own = slice_tokens(rows.values[value], part.begin, part.tokens);
        if (key == kExactRows) {
          if (!int2_part.defined()) int2_part = probe.int2_part(weights);
          error = probe.value_error(int2_part, own);
        } else {
          error = probe.pair_error(weights, own);
        }
      }
      losses[p] = torch::matmul(probe.loss(error), part.block_of_query);
    }
  }
  return torch::stack(losses);
}

LossTable HeldBackHalf::losses(const Candidates& keys, const Candidates& values,
                               const std::vector<CandidatePair>& pairs) const {
  std::vector<torch::Tensor> losses, energies;  // of each part
  std::vector<int64_t> block_of_column;
  for (const auto& batch : batches_) {
    const Rows rows{quantized(keys, Side::kKey, *batch), quantized(values, Side::kValue, *batch)};
    const size_t first = losses.size(), count = batch->parts.size();
    losses.resize(first + count);
    energies.resize(first + count);
    for_each_part(static_cast<int64_t>(count), batch->k.device(), [&](int64_t i) {
      const Part& part = batch->parts[static_cast<size_t>(i)];
      const AttentionProbe probe = part.kept ? *part.kept : make_probe(*batch, part);
      const auto index = first + static_cast<size_t>(i);
      losses[index] = part_losses(probe, part, rows, pairs);
      energies[index] = probe.energy().sum(1);
    });
    for (const Part& part : batch->parts) {
      for (int64_t s = 0; s < part.block_of_query.size(1); ++s) {
        block_of_column.push_back(part.first_block + s);
      }
    }
  }
  const auto columns = torch::cat(losses, 2).to(torch::kCPU).contiguous();
  const auto energy = torch::stack(energies).sum(0).to(torch::kCPU).contiguous();
  LossTable table{.pairs = columns.size(0),
                  .heads = columns.size(1),
                  .blocks = blocks_,
                  .sums = std::vector<double>(
                      static_cast<size_t>(columns.size(0) * columns.size(1) * blocks_), 0.0),
                  .energy = std::vector<double>(energy.data_ptr<double>(),
                                                energy.data_ptr<double>() + energy.numel())};
  if (!columns.isfinite().all().item<bool>() || !energy.isfinite().all().item<bool>()) {
    throw Error({.what = "a loss of the search is not finite",
                 .where = "layer " + std::to_string(settings_.layer),
                 .hint =
                     "the weights or activations of this layer overflow; --search off takes the "
                     "preset's choices"});
  }
  const double* column = columns.data_ptr<double>();
  for (int64_t row = 0; row < table.pairs * table.heads; ++row) {
    for (const int64_t block : block_of_column) {
      table.sums[static_cast<size_t>(row * blocks_ + block)] += *column++;
    }
  }
  return table;
}

int64_t HeldBackHalf::num_queries() const {
  size_t count = 0;
  for (const auto& batch : batches_) {
    for (const Part& part : batch->parts) count += part.positions.size();
  }
  return static_cast<int64_t>(count);
}

}  // namespace oscar
