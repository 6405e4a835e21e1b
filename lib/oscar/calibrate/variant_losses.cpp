// Rows of all variants are quantized side by side, as if they were heads of one layer.
#include "oscar/calibrate/variant_losses.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "oscar/data/document_order.h"
#include "oscar/int2/side_codec.h"

namespace oscar {
namespace {

constexpr int64_t kSampledBlocks = 8;  // samples of one chunk's sampled queries
// Of one part, where queries are many: scores and queries.
constexpr int64_t kScoreElements = int64_t{1} << 24;
constexpr int64_t kMostQueries = 256;

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

// All positions of [first, last) in runs that keep the scores small.
std::vector<std::vector<int64_t>> runs_of(int64_t first, int64_t last, int64_t query_heads) {
  std::vector<std::vector<int64_t>> runs;
  for (int64_t begin = first; begin < last;) {
    const int64_t fitting = kScoreElements / (query_heads * std::max<int64_t>(begin, 1));
    const int64_t end = std::min(last, begin + std::clamp<int64_t>(fitting, 16, kMostQueries));
    std::vector<int64_t> run;
    for (int64_t i = begin; i < end; ++i) run.push_back(i);
    runs.push_back(std::move(run));
    begin = end;
  }
  return runs;
}

// Rows of every variant of one side: x [1, Hkv, tokens, d] -> one VariantRows each.
std::vector<VariantRows> quantized_variants(const std::vector<SideVariant>& variants, Side side,
                                            const torch::Tensor& x, const LossSettings& settings) {
  std::vector<VariantRows> rows;
  if (variants.empty()) return rows;
  std::vector<HeadChoice> heads;
  for (const SideVariant& variant : variants) {
    heads.insert(heads.end(), variant.begin(), variant.end());
  }
  const bool of_keys = side == Side::kKey;
  const auto codec =
      make_side_codec(compose_heads(heads, side), of_keys ? CacheSide::kKey : CacheSide::kValue,
                      settings.quantizer, settings.layer, x.device());
  const auto count = static_cast<int64_t>(variants.size()), per_variant = x.size(1);
  const auto exact = to_cache_basis(codec, x.repeat({1, count, 1, 1}));
  const std::string where = "layer " + std::to_string(settings.layer) + ", search";
  auto result = quantize_dequantize(codec, exact, where);
  if (!of_keys) result = result.sub(exact);
  for (int64_t i = 0; i < count; ++i) {
    const auto own = [&](const torch::Tensor& t, int64_t dim) {
      return t.defined() ? t.narrow(dim, i * per_variant, per_variant) : t;
    };
    rows.push_back({own(result, 1)[0], own(codec.partner, 0), own(codec.mean, 0)});
  }
  return rows;
}

VariantRows slice_tokens(const VariantRows& rows, int64_t begin, int64_t tokens) {
  return {rows.rows.narrow(1, begin, tokens), rows.partner, rows.mean};
}

}  // namespace

struct HeldBackHalf::Part {
  int64_t begin = 0, tokens = 0;   // of the chunk within the group
  std::vector<int64_t> positions;  // within the chunk
  torch::Tensor q;                 // [Hq, queries, d_k]
  torch::Tensor sample_of_query;   // [queries, samples] float64, one 1 in each row
  std::optional<AttentionProbe> kept;
};

struct HeldBackHalf::Group {
  torch::Tensor k, v;  // [1, Hkv, tokens of all chunks, d]
  std::vector<Part> parts;
};

double LossTable::total(int64_t pairing, int64_t head) const {
  double sum = 0;
  for (int64_t s = 0; s < samples; ++s) sum += at(pairing, head, s);
  return sum;
}

int64_t LossTable::add_combined(int64_t first, const std::vector<int>& picked) {
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t s = 0; s < samples; ++s) {
      sums.push_back(at(first + picked[static_cast<size_t>(head)], head, s));
    }
  }
  return pairings++;
}

LossDifference compare(const LossTable& table, int64_t pairing, int64_t baseline, int64_t head) {
  std::vector<double> differences(static_cast<size_t>(table.samples), 0.0);
  for (int64_t h = head < 0 ? 0 : head; h < (head < 0 ? table.heads : head + 1); ++h) {
    for (int64_t s = 0; s < table.samples; ++s) {
      differences[static_cast<size_t>(s)] += table.at(pairing, h, s) - table.at(baseline, h, s);
    }
  }
  const auto n = static_cast<double>(table.samples);
  LossDifference result;
  for (const double d : differences) result.difference += d;
  double squares = 0;
  for (const double d : differences) squares += std::pow(d - result.difference / n, 2);
  // Of a sum of n independent samples; with a single one nothing is known about the spread.
  result.standard_error =
      table.samples > 1 ? std::sqrt(squares * n / (n - 1)) : std::abs(result.difference);
  return result;
}

void HeldBackHalf::add_group(std::vector<HeldChunk> chunks,
                             const std::vector<std::vector<int64_t>>& positions,
                             int64_t samples_per_part, bool keep) {
  auto group = std::make_shared<Group>();
  std::vector<torch::Tensor> k, v;
  int64_t begin = 0;
  for (size_t i = 0, next = 0; i < chunks.size(); ++i) {
    const HeldChunk& chunk = chunks[i];
    k.push_back(chunk.k);
    v.push_back(chunk.v);
    const int64_t tokens = chunk.k.size(1);
    // One entry of `positions` for each chunk of a kept group, all of them for a single chunk.
    const size_t end = chunks.size() == 1 ? positions.size() : next + 1;
    for (; next < end; ++next) {
      const auto& own = positions[next];
      const auto count = static_cast<int64_t>(own.size());
      const int64_t samples = std::min(samples_per_part, count);
      const auto sample =
          torch::arange(count).mul(samples).div(count, "floor").unsqueeze(1);  // of each query
      const auto membership = sample.eq(torch::arange(samples)).to(torch::kFloat64);
      Part part{
          .begin = begin,
          .tokens = tokens,
          .positions = own,
          .q = chunk.q.index_select(1, torch::tensor(own, torch::kInt64).to(chunk.q.device())),
          .sample_of_query = membership.to(chunk.q.device()),
          .kept = std::nullopt};
      group->parts.push_back(std::move(part));
    }
    begin += tokens;
  }
  group->k = torch::cat(k, 1).unsqueeze(0);
  group->v = torch::cat(v, 1).unsqueeze(0);
  if (keep) {
    for (Part& part : group->parts) part.kept = make_probe(*group, part);
  }
  groups_.push_back(std::move(group));
}

AttentionProbe HeldBackHalf::make_probe(const Group& group, const Part& part) const {
  const int64_t tokens = part.positions.back() + 1;  // later keys are hidden from all
  return AttentionProbe(view_, part.positions, part.q, group.k[0].narrow(1, part.begin, tokens),
                        group.v[0].narrow(1, part.begin, tokens), settings_.output_metric,
                        settings_.sm_scale);
}

static CacheView view_of(const LossSettings& settings) {
  return {.sink = settings.quantizer.sink_tokens,
          .recent = settings.quantizer.recent_tokens,
          .demote_block = settings.quantizer.demote_block,
          .sliding_window = settings.sliding_window};
}

HeldBackHalf HeldBackHalf::sampled(std::vector<HeldChunk> chunks, const LossSettings& settings,
                                   int64_t queries_per_chunk, uint64_t seed) {
  HeldBackHalf half;
  half.settings_ = settings;
  half.view_ = view_of(settings);
  const int64_t first = half.view_.sink + half.view_.recent;
  std::vector<std::vector<int64_t>> positions;
  for (size_t i = 0; i < chunks.size(); ++i) {
    positions.push_back(stratified(first, chunks[i].k.size(1), queries_per_chunk, seed + i));
  }
  half.add_group(std::move(chunks), positions, kSampledBlocks, /*keep=*/true);
  return half;
}

HeldBackHalf HeldBackHalf::all_queries(std::vector<HeldChunk> chunks,
                                       const LossSettings& settings) {
  HeldBackHalf half;
  half.settings_ = settings;
  half.view_ = view_of(settings);
  const int64_t first = half.view_.sink + half.view_.recent;
  for (HeldChunk& chunk : chunks) {
    const auto runs = runs_of(first, chunk.k.size(1), chunk.q.size(0));
    half.add_group({std::move(chunk)}, runs, 1, /*keep=*/false);
  }
  return half;
}

LossTable HeldBackHalf::losses(const std::vector<SideVariant>& keys,
                               const std::vector<SideVariant>& values,
                               const std::vector<Pairing>& pairings) const {
  std::vector<torch::Tensor> samples;  // [pairings, heads, samples of a part] each
  torch::Tensor energy;                // [heads]
  for (const auto& group : groups_) {
    const auto key_rows = quantized_variants(keys, Side::kKey, group->k, settings_);
    const auto value_rows = quantized_variants(values, Side::kValue, group->v, settings_);
    for (const Part& part : group->parts) {
      const AttentionProbe fresh = part.kept ? *part.kept : make_probe(*group, part);
      std::vector<torch::Tensor> of_part(pairings.size());
      for (int key = kExactRows; key < static_cast<int>(keys.size()); ++key) {
        torch::Tensor weights, key_error, int2_part;
        for (size_t p = 0; p < pairings.size(); ++p) {
          if (pairings[p].key != key) continue;
          if (!weights.defined()) {
            weights = key == kExactRows
                          ? fresh.exact_weights()
                          : fresh.weights(slice_tokens(key_rows[key], part.begin, part.tokens));
            key_error = fresh.key_error(weights);
          }
          auto error = key_error;
          if (pairings[p].value != kExactRows) {
            if (!int2_part.defined()) int2_part = fresh.int2_part(weights);
            error = error + fresh.value_error(int2_part, slice_tokens(value_rows[pairings[p].value],
                                                                      part.begin, part.tokens));
          }
          of_part[p] = torch::matmul(fresh.loss(error), part.sample_of_query);
        }
      }
      samples.push_back(torch::stack(of_part));
      const auto own_energy = fresh.energy().sum(1);
      energy = energy.defined() ? energy + own_energy : own_energy;
    }
  }
  const auto all = torch::cat(samples, 2).to(torch::kCPU).contiguous();
  energy = energy.to(torch::kCPU).contiguous();
  const auto values_of = [](const torch::Tensor& t) {
    return std::vector<double>(t.data_ptr<double>(), t.data_ptr<double>() + t.numel());
  };
  return {all.size(0), all.size(1), all.size(2), values_of(all), values_of(energy)};
}

int64_t HeldBackHalf::num_queries() const {
  size_t count = 0;
  for (const auto& group : groups_) {
    for (const Part& part : group->parts) count += part.positions.size();
  }
  return static_cast<int64_t>(count);
}

}  // namespace oscar
