// Whether the text was enough.
#include "oscar/fit/convergence.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <numbers>

#include "oscar/base/process.h"
#include "oscar/base/strings.h"
#include "oscar/fit/head_fit.h"

namespace oscar {

// Cosines from the smaller Gram matrix of A^T B.

int leading_dimensions(const VectorD& eigenvalues, double share) {
  const VectorD positive = eigenvalues.cwiseMax(0.0);
  const double wanted = share * positive.sum();
  int count = 0;
  for (double held = 0; held < wanted && count < positive.size(); ++count) {
    held += positive[positive.size() - 1 - count];
  }
  return count;
}

VectorD principal_angles(const MatrixD& a, const MatrixD& b, const std::string& where) {
  assert(a.rows() == b.rows());
  const MatrixD product = a.cols() <= b.cols() ? MatrixD(b.transpose() * a)
                                               : MatrixD(a.transpose() * b);  // [more, fewer]
  const VectorD squared = eigh(product.transpose() * product, where + ", principal angles").values;
  VectorD angles(squared.size());
  for (int i = 0; i < angles.size(); ++i) {
    const double cosine = std::sqrt(std::clamp(squared[squared.size() - 1 - i], 0.0, 1.0));
    angles[i] = std::acos(cosine);
  }
  return angles;
}

// Fits and scores of parts, layer by layer.

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

// Convergence of all layers as a record, and the record in words.

namespace {

// Figures of a table with as many digits as they deserve, so that many layers fit an attribute.
double short_number(double value) { return std::stod(fmt::format("{:.4g}", value)); }

Json side_summary(const std::vector<LayerConvergence>& layers,
                  SideConvergence LayerConvergence::*side) {
  double cost = 0, angle = 0, largest = 0, worst = -1;
  int worst_layer = 0;
  const auto count = static_cast<double>(layers.size());
  for (const LayerConvergence& layer : layers) {
    const SideConvergence& s = layer.*side;
    cost += s.mean_cost / count;
    angle += s.mean_angle / count;
    largest = std::max(largest, s.largest_angle);
    if (s.mean_cost > worst) {
      worst = s.mean_cost;
      worst_layer = layer.layer_id;
    }
  }
  return {{"cost", cost},
          {"worst_layer", worst_layer},
          {"worst_layer_cost", worst},
          {"mean_angle", angle},
          {"largest_angle", largest}};
}

Json split_table(const std::vector<LayerConvergence>& layers) {
  Json table = Json::array();
  const auto count = static_cast<double>(layers.size());
  for (size_t i = 0; i < layers.front().splits.size(); ++i) {
    double key = 0, value = 0;
    for (const LayerConvergence& layer : layers) {
      key += layer.key.excess[i] / count;
      value += layer.value.excess[i] / count;
    }
    const ConvergenceSplit& split = layers.front().splits[i];
    table.push_back({{"fit_tokens", split.fit_tokens},
                     {"scored_tokens", split.scored_tokens},
                     {"key_excess", key},
                     {"value_excess", value}});
  }
  return table;
}

Json layer_table(const std::vector<LayerConvergence>& layers) {
  Json table = Json::object();
  for (const LayerConvergence& layer : layers) {
    table["layer_id"].push_back(layer.layer_id);
    for (const auto& [name, side] : {std::pair{"key", &layer.key}, {"value", &layer.value}}) {
      const std::string prefix = std::string(name) + "_";
      table[prefix + "cost"].push_back(short_number(side->mean_cost));
      table[prefix + "worst_head_cost"].push_back(short_number(side->worst_cost));
      table[prefix + "mean_angle"].push_back(short_number(side->mean_angle));
      table[prefix + "largest_angle"].push_back(short_number(side->largest_angle));
    }
  }
  return table;
}

// Up to two significant digits: an extrapolation deserves no more.
int64_t rounded_up(double tokens) {
  const double unit = std::pow(10.0, std::floor(std::log10(tokens)) - 1);
  return static_cast<int64_t>(std::ceil(tokens / unit) * unit);
}

// A number of the record below the given keys, or NaN.
double number(const Json& record, std::initializer_list<const char*> keys) {
  const Json* at = &record;
  for (const char* key : keys) {
    if (!at->is_object() || !at->contains(key)) return NAN;
    at = &(*at)[key];
  }
  return at->is_number() ? at->get<double>() : NAN;
}

// 0.0012 -> "0.12%", 0.0123 -> "1.2%", 0.123 -> "12%"
std::string share(double value) {
  const double hundredths = 100 * value;
  const int decimals = hundredths < 0.995 ? 2 : hundredths < 9.95 ? 1 : 0;
  return fmt::format("{:.{}f}%", hundredths, decimals);
}

}  // namespace

Json convergence_record(const std::vector<LayerConvergence>& layers, int64_t tokens,
                        const std::string& problem) {
  if (layers.empty()) return {{"tokens", tokens}, {"problem", problem}};
  Json record = {{"tokens", tokens}};
  record["key"] = side_summary(layers, &LayerConvergence::key);
  record["value"] = side_summary(layers, &LayerConvergence::value);
  const double cost =
      std::max(record["key"]["cost"].get<double>(), record["value"]["cost"].get<double>());
  record["cost"] = cost;
  record["enough_cost"] = kEnoughCost;
  record["enough"] = cost <= kEnoughCost;
  // (1 + c/N) against (1 + c/2N).
  record["fall_per_doubling"] = cost / 2 / (1 + cost);
  if (cost > kEnoughCost) {
    record["tokens_needed"] = rounded_up(static_cast<double>(tokens) * cost / kEnoughCost);
  }
  record["splits"] = split_table(layers);
  record["layers"] = layer_table(layers);
  return record;
}

bool needs_more_text(const Json& record) {
  return record.is_object() && record.value("enough", Json()) == Json(false);
}

std::vector<std::string> convergence_lines(const Json& record) {
  if (!record.is_object()) return {};
  if (const auto problem = record.find("problem"); problem != record.end()) {
    return {"not judged: " + (problem->is_string() ? problem->get<std::string>() : "?")};
  }
  const double tokens = number(record, {"tokens"}), needed = number(record, {"tokens_needed"});
  const double key = number(record, {"key", "cost"}), value = number(record, {"value", "cost"});
  if (!std::isfinite(tokens) || !std::isfinite(key) || !std::isfinite(value)) return {};
  const std::string sides = fmt::format("keys {}, values {}", share(key), share(value));
  const std::string angles =
      fmt::format("leading directions of two halves: {:.0f} and {:.0f} degrees apart",
                  number(record, {"key", "mean_angle"}), number(record, {"value", "mean_angle"}));
  if (needs_more_text(record)) {
    return {fmt::format("not enough: predicted loss still falls by {} per doubling;",
                        share(number(record, {"fall_per_doubling"}))),
            fmt::format("use about {} tokens ({} at {})", count(needed), sides, count(tokens)),
            angles};
  }
  return {fmt::format("enough: the choice of text costs about {} of predicted loss",
                      share(std::max(key, value))),
          fmt::format("at {} tokens: {}, worst layer {}", count(tokens), sides,
                      share(std::max(number(record, {"key", "worst_layer_cost"}),
                                     number(record, {"value", "worst_layer_cost"})))),
          angles};
}

std::vector<std::string> verdict_lines(const Json& record) {
  std::vector<std::string> lines = convergence_lines(record);
  if (lines.empty()) lines = {std::string("not judged: ") + kNoVerdict};
  return lines;
}

}  // namespace oscar
