// Convergence of all layers as a record, and the record in words.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/base/numbers.h"
#include "oscar/fit/convergence.h"

namespace oscar {
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

}  // namespace oscar
