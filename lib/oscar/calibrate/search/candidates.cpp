// What a search may choose from, and the text that it judges by.
#include "oscar/calibrate/search/candidates.h"

#include <fmt/format.h>
#include <algorithm>

#include "oscar/fit/fit.h"

namespace oscar {

// Names of candidates; heads picked from stacks, and the identity where a head has no such matrix.

namespace {

bool same_head(const FittedHead& a, const FittedHead& b) {
  return a.fit == b.fit && a.head == b.head && a.recipe == b.recipe;
}

// One part a head along dimension `dim`; what a head lacks is `missing`.
template <typename Of>
torch::Tensor picked(const std::vector<FittedHead>& heads, const torch::Tensor& missing, Of of,
                     int64_t dim = 0) {
  std::vector<torch::Tensor> parts;
  for (const FittedHead& head : heads) {
    const torch::Tensor stack = of(head);
    parts.push_back(stack.defined() ? stack.select(dim, head.head) : missing);
  }
  return torch::stack(parts, dim);
}

}  // namespace

bool same_candidate(const Candidate& a, const Candidate& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_head);
}

Candidate candidate_of(const SearchFit& fit, Side side, const FitOptions& fixed) {
  const SideTransform& transform = fit.side(side);
  Candidate candidate;
  for (int head = 0; head < transform.forward.count; ++head) {
    RowRecipe recipe = transform.recipe[static_cast<size_t>(head)];
    recipe.clip_ratio = static_cast<float>(side == Side::kKey ? fixed.clip_k : fixed.clip_v);
    recipe.scale_correction = fixed.scale_correction;
    recipe.rounding = fixed.rounding;
    candidate.push_back({.fit = &transform, .head = head, .recipe = recipe});
  }
  return candidate;
}

const SearchFit& fit_of(const FittedHead& head, Side side, const std::vector<SearchFit>& fits,
                        const SearchFit* other) {
  for (const SearchFit& fit : fits) {
    if (&fit.side(side) == head.fit) return fit;
  }
  return other ? *other : fits.front();
}

std::string fit_text(const SearchFit& fit) {
  const FitOptions& options = fit.request.options;
  return fmt::format("{}{} {}{} {}", method_name(options.kind),
                     fit.request.own_basis ? " in own basis" : "",
                     options.key_centers ? "in segments"
                     : options.center    ? "centred"
                                         : "uncentred",
                     options.row_weights == RowWeights::kAttention ? " by-attention" : "",
                     granularity_name(options.granularity));
}

std::string writer_text(const RowRecipe& recipe) {
  return fmt::format("{} {}", scale_correction_name(recipe.scale_correction),
                     rounding_name(recipe.rounding));
}

const SideCodec& CandidateCodecs::of_fit(const SideTransform& fit, Side side) {
  const auto found = fits_.find(&fit);
  if (found != fits_.end()) return found->second;
  return fits_.emplace(&fit, make_side_codec(fit, side, quantizer_, layer_, rope_, device_))
      .first->second;
}

SideCodec CandidateCodecs::codec(const std::vector<FittedHead>& heads, Side side) {
  bool centered = false;
  torch::Tensor some_centers;
  SideCodec result;
  for (const FittedHead& head : heads) {
    const SideCodec& fit = of_fit(*head.fit, side);
    centered = centered || fit.mean.defined();
    if (fit.centers.defined()) some_centers = fit.centers;
    result.recipe.push_back(head.recipe);
  }
  const SideCodec& any = of_fit(*heads.front().fit, side);
  result.format = any.format;
  const auto fit = [&](const FittedHead& head) -> const SideCodec& {
    return of_fit(*head.fit, side);
  };
  const int64_t d = any.forward.size(1);
  const auto identity = torch::eye(d, any.forward.options());
  result.forward = picked(heads, {}, [&](const FittedHead& h) { return fit(h).forward; });
  result.partner = picked(heads, {}, [&](const FittedHead& h) { return fit(h).partner; });
  if (centered) {
    const auto zero = torch::zeros({d}, any.forward.options());
    result.mean = picked(heads, zero, [&](const FittedHead& h) { return fit(h).mean; });
  }
  if (some_centers.defined()) {
    const auto none = torch::zeros_like(some_centers.select(1, 0));
    result.centers = picked(
        heads, none, [&](const FittedHead& h) { return fit(h).centers; }, 1);
  }
  if (result.recipe.any(Rounding::kShaped)) {
    result.feedback = picked(heads, identity, [&](const FittedHead& h) {
      return h.recipe.rounding == Rounding::kShaped ? fit(h).feedback : torch::Tensor();
    });
  }
  if (result.recipe.any(ScaleCorrection::kMetric)) {
    result.metric = picked(heads, identity, [&](const FittedHead& h) {
      return h.recipe.scale_correction == ScaleCorrection::kMetric ? fit(h).metric
                                                                   : torch::Tensor();
    });
  }
  return result;
}

// The split as a pure function of sequence lengths.

HeldBack hold_back(const std::vector<std::vector<int32_t>>& sequences,
                   const CacheFormat& quantizer) {
  std::vector<int64_t> lengths;
  for (const auto& sequence : sequences) lengths.push_back(static_cast<int64_t>(sequence.size()));
  return hold_back(lengths, quantizer);
}

HeldBack hold_back(const std::vector<int64_t>& lengths, const CacheFormat& quantizer) {
  const int64_t shortest = fewest_tokens(quantizer);
  std::vector<size_t> usable;
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] >= shortest) usable.push_back(i);
  }
  HeldBack split;
  if (static_cast<int64_t>(usable.size()) < 2 * kFewestHeldBack) {
    split.reason = fmt::format(
        "choices are those of the preset: to hold text back for a search, at least {} sequences of "
        "{} tokens are needed, and there {} {}",
        2 * kFewestHeldBack, shortest, usable.size() == 1 ? "is" : "are", usable.size());
    usable.clear();
  } else {
    const auto quarter = static_cast<int64_t>(lengths.size() / 4);
    const int64_t wanted = std::clamp(quarter, kFewestHeldBack, kMostHeldBack);
    const auto count = std::min<size_t>(static_cast<size_t>(wanted), usable.size() / 2);
    usable.erase(usable.begin(), usable.end() - static_cast<std::ptrdiff_t>(count));
  }
  for (size_t i = 0, next = 0; i < lengths.size(); ++i) {
    if (next < usable.size() && usable[next] == i) {
      const bool last_of_pair = (usable.size() - next) % 2 == 1;
      (last_of_pair ? split.confirm : split.search).push_back(i);
      ++next;
    } else {
      split.fit.push_back(i);
    }
  }
  return split;
}

TokenSequences select_sequences(const TokenSequences& corpus, const std::vector<size_t>& indices) {
  TokenSequences selected{.sequences = {}, .record = corpus.record};
  selected.record.tokens = 0;
  for (const size_t i : indices) {
    selected.sequences.push_back(corpus.sequences[i]);
    selected.record.tokens += static_cast<int64_t>(corpus.sequences[i].size());
  }
  return selected;
}

}  // namespace oscar
