// Fits and scores of parts, layer by layer.
#include "oscar/fit/convergence.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "oscar/base/parallel.h"
#include "oscar/fit/predicted_loss.h"
#include "oscar/fit/principal_angles.h"

namespace oscar {
namespace {

// What is fitted to a part, and what a transform is scored against.
struct Part {
  int64_t tokens = 0;
  LayerTransforms fit;
  LayerMoments moments;
};

Part make_part(LayerStatistics sums, const LayerStatistics& total, const FitOptions& options,
               const Rope& rope) {
  sums.o_proj_metric = total.o_proj_metric;
  return {.tokens = sums.count_kv,
          .fit = fit_layer(sums, options, rope),
          .moments = scoring_moments(sums, options, rope)};
}

// [Hkv] how much more the fit of `from` loses on `to` than the fit of `to` itself.
std::vector<double> excess_of(const Part& from, const Part& to, Side side) {
  const auto own = predicted_losses(side_of(to.fit, side), side, to.moments);
  std::vector<double> excess = loss_ratios(side_of(from.fit, side), side, to.moments, own);
  for (double& head : excess) head -= 1;
  return excess;
}

MatrixD leading_space(const MatrixD& moment, const std::string& where) {
  const Eigh e = eigh(moment, where);
  return e.vectors.rightCols(leading_dimensions(e.values, kLeadingShare));
}

void measure_angles(const Part& first, const Part& second, Side side, SideConvergence& out) {
  const bool key = side == Side::kKey;
  const auto& a = key ? first.moments.query : first.moments.value_target;
  const auto& b = key ? second.moments.query : second.moments.value_target;
  std::vector<VectorD> of_head(static_cast<size_t>(a.count));
  parallel_for(a.count, [&](int64_t index) {
    const int head = static_cast<int>(index);
    const std::string where = fmt::format("layer {}, {}, head {}", first.fit.geometry.layer_id,
                                          key ? "C_Q" : "C_S", head);
    of_head[static_cast<size_t>(index)] =
        principal_angles(leading_space(a[head], where), leading_space(b[head], where), where) *
        (180 / std::numbers::pi);
  });
  double sum = 0;
  int64_t count = 0;
  for (const VectorD& angles : of_head) {
    sum += angles.sum();
    count += angles.size();
    if (angles.size() > 0) out.largest_angle = std::max(out.largest_angle, angles.maxCoeff());
  }
  out.mean_angle = count > 0 ? sum / static_cast<double>(count) : 0.0;
}

// A fit, and the part that it has not seen.
using Pair = std::pair<const Part*, const Part*>;

SideConvergence measure_side(const std::vector<Pair>& pairs, int64_t tokens, Side side) {
  SideConvergence out;
  std::vector<double> weighted;  // [Hkv] sum of excess times (1/n + 1/m)
  double squares = 0;
  for (const auto& [from, to] : pairs) {
    const std::vector<double> excess = excess_of(*from, *to, side);
    const auto heads = static_cast<double>(excess.size());
    const double rate = 1 / static_cast<double>(from->tokens) + 1 / static_cast<double>(to->tokens);
    weighted.resize(excess.size());
    squares += rate * rate;
    double sum = 0;
    for (size_t head = 0; head < excess.size(); ++head) {
      weighted[head] += excess[head] * rate;
      sum += excess[head];
    }
    out.excess.push_back(sum / heads);
  }
  for (const double part : weighted) {
    // Rounding can leave a fit that fits by less than nothing.
    const double cost = std::max(0.0, part / squares / static_cast<double>(tokens));
    out.mean_cost += cost / static_cast<double>(weighted.size());
    out.worst_cost = std::max(out.worst_cost, cost);
  }
  return out;
}

}  // namespace

std::string convergence_problem(const std::vector<int64_t>& part_tokens, int head_dim) {
  if (part_tokens.size() < 2) {
    return "the text is one batch, without two parts: use more";
  }
  const int64_t total = part_tokens.back(), first = part_tokens[part_tokens.size() - 2];
  const int64_t fewest = std::min(first, total - first), wanted = kRowsPerDimension * head_dim;
  if (fewest >= wanted) return "";
  return fmt::format("a part of the text has {} tokens, and {} are needed", fewest, wanted);
}

LayerConvergence layer_convergence(const std::vector<const LayerStatistics*>& parts,
                                   const LayerStatistics& total, const FitOptions& options,
                                   const Rope& rope) {
  const FitOptions fit = judging_fit(options);
  const LayerStatistics rest = remaining_statistics(total, *parts.back());
  std::vector<const LayerStatistics*> used;
  const int64_t wanted = kRowsPerDimension * total.geometry.head_dim_k;
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    if (parts[i]->count_kv >= wanted) used.push_back(parts[i]);
  }
  used.push_back(parts.back());
  used.push_back(&rest);
  std::vector<Part> made(used.size());
  parallel_for(static_cast<int64_t>(used.size()), [&](int64_t index) {
    const auto i = static_cast<size_t>(index);
    made[i] = make_part(*used[i], total, fit, rope);
  });
  const Part &first = made[made.size() - 2], &second = made.back();
  std::vector<Pair> pairs;
  for (const Part& part : made) {
    if (&part != &second) pairs.emplace_back(&part, &second);
  }
  pairs.emplace_back(&second, &first);

  LayerConvergence result;
  result.layer_id = total.geometry.layer_id;
  for (const auto& [from, to] : pairs) result.splits.push_back({from->tokens, to->tokens});
  result.key = measure_side(pairs, total.count_kv, Side::kKey);
  result.value = measure_side(pairs, total.count_kv, Side::kValue);
  measure_angles(first, second, Side::kKey, result.key);
  measure_angles(first, second, Side::kValue, result.value);
  return result;
}

}  // namespace oscar
