// Documents to sequences of equal length, with separators and repeated stretches where wanted.
#include "oscar/text/packing.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <map>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/text/corpus.h"

namespace oscar {

// The names that families give to their separators.

namespace {

// Ends of documents, then of turns: GPT-2 and Qwen, Llama 2 and Mistral, Llama 3, Gemma; ChatML,
// Llama 3, Gemma.
constexpr std::array kNames = {"<|endoftext|>", "</s>",       "<|end_of_text|>", "<eos>",
                               "<|im_end|>",    "<|eot_id|>", "<end_of_turn>"};

}  // namespace

std::vector<int32_t> separator_tokens(const std::vector<int32_t>& eos_token_ids,
                                      const std::vector<AddedToken>& added, int32_t vocab_size) {
  std::vector<int32_t> ids;
  const auto add = [&](int32_t id) {
    if (id >= 0 && id < vocab_size && std::find(ids.begin(), ids.end(), id) == ids.end()) {
      ids.push_back(id);
    }
  };
  for (const int32_t id : eos_token_ids) add(id);
  for (const char* name : kNames) {
    for (const AddedToken& token : added) {
      if (token.content == name) add(token.id);
    }
  }
  return ids;
}

bool is_rare(const std::vector<std::vector<int32_t>>& sequences, const std::vector<int32_t>& ids) {
  int64_t tokens = 0;
  for (const auto& sequence : sequences) tokens += static_cast<int64_t>(sequence.size());
  return count_tokens(sequences, ids) * kTokensOfASeparator < tokens;
}

int64_t count_tokens(const std::vector<std::vector<int32_t>>& sequences,
                     const std::vector<int32_t>& ids) {
  int64_t count = 0;
  for (const auto& sequence : sequences) {
    count += std::count_if(sequence.begin(), sequence.end(), [&](int32_t token) {
      return std::find(ids.begin(), ids.end(), token) != ids.end();
    });
  }
  return count;
}

std::string padding_warning(const TokenSequences& corpus) {
  const bool has_ids = std::ranges::any_of(corpus.record.sources, [](const CorpusSource& source) {
    return source.kind.starts_with("ids") || source.kind == "folder";
  });
  if (!has_ids) return "";
  std::map<int32_t, int64_t> in_runs;
  int64_t tokens = 0;
  for (const auto& sequence : corpus.sequences) {
    tokens += static_cast<int64_t>(sequence.size());
    for (size_t begin = 0, end = 0; begin < sequence.size(); begin = end) {
      while (end < sequence.size() && sequence[end] == sequence[begin]) ++end;
      if (end - begin >= kPaddingRun) in_runs[sequence[begin]] += static_cast<int64_t>(end - begin);
    }
  }
  const auto most = std::ranges::max_element(
      in_runs, {}, [](const std::pair<const int32_t, int64_t>& run) { return run.second; });
  if (most == in_runs.end()) return "";
  const double share = static_cast<double>(most->second) / static_cast<double>(tokens);
  if (share <= kPaddingShare) return "";
  return fmt::format(
      "{:.0f}% of the corpus is token {} in runs of {} or more, which looks like padding: leave it "
      "out of the ids",
      100 * share, most->first, kPaddingRun);
}

std::vector<std::vector<int32_t>> with_separators(std::vector<std::vector<int32_t>> sequences,
                                                  const std::vector<int32_t>& separators,
                                                  int64_t gap) {
  assert(gap > 0 && !separators.empty());
  for (auto& sequence : sequences) {
    size_t next = 0;
    for (auto i = static_cast<size_t>(gap); i < sequence.size(); i += static_cast<size_t>(gap)) {
      sequence[i] = separators[next++ % separators.size()];
    }
  }
  return sequences;
}

std::string sprinkle_separators(std::vector<std::vector<int32_t>>& sequences,
                                const std::vector<int32_t>& separators, uint64_t seed) {
  assert(!separators.empty());
  SplitMix64 random(seed);
  size_t next = 0;
  const auto gap = [&] {
    constexpr auto kGaps = static_cast<uint64_t>(kLongestGap - kShortestGap + 1);
    return static_cast<size_t>(kShortestGap) + static_cast<size_t>(random.below(kGaps));
  };
  for (size_t s = 1; s < sequences.size(); s += 2) {
    for (size_t i = gap(); i < sequences[s].size(); i += gap()) {
      sequences[s][i] = separators[next++ % separators.size()];
    }
  }
  std::string ids;
  for (const int32_t id : separators) ids += (ids.empty() ? "" : ", ") + std::to_string(id);
  return "ids " + ids + " in every second sequence, " + std::to_string(kShortestGap) + " to " +
         std::to_string(kLongestGap) + " tokens apart, " + std::to_string(next) + " in all";
}

std::string repeat_stretches(std::vector<std::vector<int32_t>>& sequences, uint64_t seed) {
  SplitMix64 random(seed);
  const auto from = [&random](int64_t first, int64_t last) {
    return first + static_cast<int64_t>(random.below(static_cast<uint64_t>(last - first + 1)));
  };
  int64_t repeated = 0;
  for (size_t s = 1; s < sequences.size(); s += 2) {
    std::vector<int32_t>& sequence = sequences[s];
    const auto length = static_cast<int64_t>(sequence.size()), half = length - length / 2;
    if (length < 4 * kLongestStretch) continue;
    for (int64_t to = half; to < length;) {
      const int64_t stretch = std::min(from(kShortestStretch, kLongestStretch), length - to);
      const auto begin = sequence.begin() + from(0, half - stretch);
      std::copy(begin, begin + stretch, sequence.begin() + to);
      to += stretch;
    }
    repeated += length - half;
  }
  if (repeated == 0) return "";
  return fmt::format(
      "the second half of every second sequence repeats stretches of {} to {} tokens of its first, "
      "{} tokens in all",
      kShortestStretch, kLongestStretch, repeated);
}

// Packing, shares of weighted joins, alternation, counts.

namespace {

constexpr size_t kMinSequence = 2;  // one token predicts nothing

int64_t tokens_of(const std::vector<std::vector<int32_t>>& sequences) {
  int64_t tokens = 0;
  for (const auto& sequence : sequences) tokens += static_cast<int64_t>(sequence.size());
  return tokens;
}

// Tokens that each part gives.
std::vector<int64_t> shares(const std::vector<PackedPart>& parts, int64_t max_tokens) {
  std::vector<int64_t> available;
  std::vector<double> weights;
  double sum = 0;
  for (const PackedPart& part : parts) {
    available.push_back(tokens_of(part.sequences));
    weights.push_back(part.has_weight ? part.source.weight : static_cast<double>(available.back()));
    sum += weights.back();
  }
  int64_t all = 0;
  for (const int64_t tokens : available) all += tokens;
  const bool weighted = parts.size() > 1 && parts.front().has_weight;
  if (!weighted && (max_tokens == 0 || all <= max_tokens)) return available;
  double total = static_cast<double>(max_tokens == 0 ? all : std::min(all, max_tokens));
  for (size_t i = 0; i < parts.size(); ++i) {
    total = std::min(total, static_cast<double>(available[i]) * sum / weights[i]);
  }
  std::vector<int64_t> wanted;
  for (size_t i = 0; i < parts.size(); ++i) {
    // The small excess undoes rounding where the share is a whole number.
    const auto share = static_cast<int64_t>(std::floor(total * weights[i] / sum + 1e-6));
    wanted.push_back(std::min(share, available[i]));
  }
  return wanted;
}

// Keeps the first `wanted` tokens of a part.
void cut_part(PackedPart& part, int64_t wanted) {
  size_t kept = 0;
  while (kept < part.sequences.size() && wanted >= static_cast<int64_t>(kMinSequence)) {
    auto& sequence = part.sequences[kept++];
    if (static_cast<int64_t>(sequence.size()) > wanted)
      sequence.resize(static_cast<size_t>(wanted));
    wanted -= static_cast<int64_t>(sequence.size());
  }
  part.sequences.resize(kept);
}

void count_use(PackedPart& part, int64_t packed_tokens) {
  CorpusSource& source = part.source;
  source.tokens_used = tokens_of(part.sequences);
  source.documents_used =
      std::count_if(part.starts.begin(), part.starts.end(), [&part](const DocumentStart& start) {
        return start.sequence < part.sequences.size() &&
               start.offset < part.sequences[start.sequence].size();
      });
  const auto note = [&source](const char* reason, int64_t count) {
    if (count > 0) source.dropped.push_back(std::string(reason) + ": " + std::to_string(count));
  };
  note("tokens in a last chunk of fewer than 2", part.tail_tokens_dropped);
  note("tokens beyond the part's share or max_tokens", packed_tokens - source.tokens_used);
}

// The next part is the one that has given the smallest fraction of its sequences.
std::vector<std::vector<int32_t>> alternate(std::vector<PackedPart>& parts) {
  std::vector<size_t> given(parts.size(), 0);
  std::vector<std::vector<int32_t>> order;
  while (true) {
    size_t next = parts.size();
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t count = parts[i].sequences.size();
      if (given[i] == count) continue;
      // given_i / count_i < given_next / count_next, in integers
      if (next == parts.size() || given[i] * parts[next].sequences.size() < given[next] * count) {
        next = i;
      }
    }
    if (next == parts.size()) return order;
    order.push_back(std::move(parts[next].sequences[given[next]++]));
  }
}

std::string digest_of(const std::vector<std::vector<int32_t>>& sequences) {
  Sha256 digest;
  std::string bytes;
  const auto append = [&bytes](uint32_t value) {
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>((value >> (8 * i)) & 0xFF);
  };
  for (const auto& sequence : sequences) {
    bytes.clear();
    append(static_cast<uint32_t>(sequence.size()));
    for (const int32_t id : sequence) append(static_cast<uint32_t>(id));
    digest.update(bytes);
  }
  return digest.finish();
}

}  // namespace

void pack_stream(const std::vector<std::vector<int32_t>>& documents, int sequence_length,
                 PackedPart& part) {
  const auto length = static_cast<size_t>(sequence_length);
  const size_t first_start = part.starts.size();
  std::vector<int32_t> current;
  for (const auto& document : documents) {
    if (!document.empty()) part.starts.push_back({part.sequences.size(), current.size()});
    part.source.tokens_read += static_cast<int64_t>(document.size());
    for (size_t at = 0; at < document.size();) {
      const size_t take = std::min(length - current.size(), document.size() - at);
      const auto begin = document.begin() + static_cast<std::ptrdiff_t>(at);
      current.insert(current.end(), begin, begin + static_cast<std::ptrdiff_t>(take));
      at += take;
      if (current.size() == length) {
        part.sequences.push_back(std::move(current));
        current = {};
      }
    }
  }
  if (current.size() >= kMinSequence) {
    part.sequences.push_back(std::move(current));
    return;
  }
  part.tail_tokens_dropped += static_cast<int64_t>(current.size());
  const size_t dropped_sequence = part.sequences.size();
  part.starts.erase(
      std::remove_if(
          part.starts.begin() + static_cast<std::ptrdiff_t>(first_start), part.starts.end(),
          [=](const DocumentStart& start) { return start.sequence == dropped_sequence; }),
      part.starts.end());
}

TokenSequences join_parts(std::vector<PackedPart> parts, const CorpusOptions& options) {
  TokenSequences result;
  CorpusRecord& record = result.record;
  for (const PackedPart& part : parts) {
    if (!part.sequences.empty()) continue;
    throw Error({.what = "corpus is empty",
                 .where = part.source.name,
                 .expected = "at least 2 tokens in a sequence",
                 .found = std::to_string(part.source.documents_read) + " documents, " +
                          std::to_string(part.source.tokens_read) + " tokens"});
  }
  const std::vector<int64_t> wanted = shares(parts, options.max_tokens);
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t packed = tokens_of(parts[i].sequences);
    record.sequences_read += static_cast<int64_t>(parts[i].sequences.size());
    cut_part(parts[i], wanted[i]);
    count_use(parts[i], packed);
    record.tokens += parts[i].source.tokens_used;
    record.sources.push_back(parts[i].source);
  }
  if (record.tokens == 0) {
    throw Error({.what = "no token of the corpus is used",
                 .where = "--max-tokens",
                 .expected = "weights and max_tokens that leave each part 2 tokens or more",
                 .found = "max_tokens " + std::to_string(options.max_tokens)});
  }
  result.sequences = alternate(parts);
  if (options.recall) record.recall = repeat_stretches(result.sequences, options.seed);
  const bool enough = options.only_if_rare && !is_rare(result.sequences, options.separators);
  if (!options.separators.empty() && !enough) {
    record.separators = sprinkle_separators(result.sequences, options.separators, options.seed);
  }
  record.sequences_used = static_cast<int64_t>(result.sequences.size());
  record.sequence_length = options.sequence_length;
  record.order_seed = options.seed;
  record.tokens_sha256 = digest_of(result.sequences);
  return result;
}

}  // namespace oscar
