// Figures about methods: divergence, its tail, errors by layer, needles.
#include "oscar/report/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "oscar/report/chart.h"
#include "oscar/report/figure_parts.h"
#include "oscar/report/html.h"
#include "oscar/report/verdict.h"

namespace oscar {
namespace {

constexpr size_t kMostRows = 24;         // of the divergence chart
constexpr int kNeutralStyle = 8;         // methods beyond those with a style of their own
constexpr size_t kMostNamed = 14;        // points that fit a label each
constexpr double kFirstPercentile = 50;  // the tail is what matters

std::string left_out_note(const ReportData& data) {
  const auto all = std::ranges::count_if(
      data.methods, [](const MethodFigures& m) { return !m.variant && !m.reference && !m.exact; });
  const auto drawn = static_cast<int64_t>(charted_methods(data).size());
  return all > drawn ? fmt::format(" {} more methods are in the table only.", all - drawn) : "";
}

// Place of a percentile on an axis that gives each factor of ten in the tail the same room.
double tail_place(double percentile) { return -std::log10(1 - percentile / 100); }

}  // namespace

std::vector<Charted> charted_methods(const ReportData& data) {
  const MethodFigures* const judged = judged_method(data);
  std::vector<Charted> list;
  int next = 1;
  for (const MethodFigures& m : data.methods) {
    if (m.variant || m.reference || m.exact) continue;
    if (&m == judged) {
      list.push_back({&m, 0});
    } else if (next < kSeriesStyles) {
      list.push_back({&m, next++});
    }
  }
  return list;
}

std::string divergence_figure(const ReportData& data) {
  const auto charted = charted_methods(data);
  IntervalChart chart{.id = "kl", .title = "KL divergence from BF16 by method"};
  std::vector<double> values;
  for (const MethodFigures& m : data.methods) {
    if (m.variant || m.reference || m.exact || !m.has_text || chart.rows.size() == kMostRows)
      continue;
    const auto style =
        std::ranges::find_if(charted, [&](const Charted& c) { return c.method == &m; });
    const double mean = m.kl.mean.value_or(NAN);
    const bool interval = is_finite(m.kl.low) && is_finite(m.kl.high);
    chart.rows.push_back({m.name, figure(m.kl.mean), mean, interval ? *m.kl.low : mean,
                          interval ? *m.kl.high : mean,
                          style == charted.end() ? kNeutralStyle : style->style});
    values.insert(values.end(), {mean, chart.rows.back().low, chart.rows.back().high});
    chart.description +=
        fmt::format("{}: {}. ", m.name, with_interval(m.kl.mean, m.kl.low, m.kl.high));
  }
  if (chart.rows.empty()) return "";
  chart.x = axis_over(values, true, "nats per token, lower is better");
  std::string caption = "Mean over tokens with its 95% interval, on a logarithmic axis.";
  if (is_finite(data.kl_floor)) {
    if (*data.kl_floor >= chart.x.low && *data.kl_floor <= chart.x.high) {
      chart.levels.emplace_back(*data.kl_floor, "floor");
    }
    // A mean of roundings of both signs; below zero it has no other meaning.
    caption += fmt::format(" The arithmetic alone costs {} (method exact).",
                           *data.kl_floor > 0 ? figure(data.kl_floor) : "nothing measurable");
  }
  return figure_html("How far from BF16, on average", draw(chart), caption);
}

double quoted_length(const ReportData& data) {
  double longest = data.longest.value_or(0);
  if (longest == 0) {
    for (const double length : data.needle_lengths) longest = std::max(longest, length);
  }
  return longest;
}

std::string bits_figure(const ReportData& data) {
  constexpr double kExactBits = 16;
  const double length = quoted_length(data);
  ScatterChart chart{.id = "bits", .title = "KL divergence against bits per value, all methods"};
  std::vector<double> values;
  const auto charted = charted_methods(data);
  for (const MethodFigures& m : data.methods) {
    const Figure at = m.bits_at(length);
    if (m.reference || m.exact || !is_finite(at) || !is_finite(m.kl.mean) || !(*m.kl.mean > 0)) {
      continue;
    }
    const auto style =
        std::ranges::find_if(charted, [&](const Charted& c) { return c.method == &m; });
    const bool named = style != charted.end() || data.methods.size() <= kMostNamed;
    chart.points.push_back({.name = named ? m.name : "",
                            .x = *at,
                            .y = *m.kl.mean,
                            .style = style == charted.end() ? kNeutralStyle : style->style});
    values.push_back(*m.kl.mean);
    chart.description += fmt::format("{}: {} bits, {}. ", m.name, figure(at), figure(m.kl.mean));
  }
  if (chart.points.empty()) return "";
  chart.x = {
      fmt::format("bits per value at {} tokens", token_length(length)), 0, kExactBits, false, {}};
  chart.y = axis_over(values, true, "KL divergence, nats per token");
  std::string caption =
      "All methods and variants of this run, BF16 windows included. Lower and further left is "
      "better.";
  if (data.find("bf16") != nullptr) {
    chart.y.low /= 10;  // below all others: no logarithm is that of 0
    chart.points.push_back(
        {.name = "bf16", .x = kExactBits, .y = chart.y.low, .style = kNeutralStyle});
    caption += " BF16 itself, which diverges by nothing, stands on the axis.";
  }
  return figure_html("What each bit buys", draw(chart), caption);
}

std::string position_figure(const ReportData& data) {
  LineChart chart{.id = "pos", .title = "KL divergence by position and method"};
  std::vector<double> values;
  for (const auto& [method, style] : charted_methods(data)) {
    const std::vector<double>& means = method->kl_by_position;
    if (means.empty() || means.size() + 1 != data.positions.size()) continue;
    Series series{.name = method->name, .style = style};
    for (size_t i = 0; i < means.size(); ++i) {
      const double middle = 0.5 * (data.positions[i] + data.positions[i + 1]);
      series.points.emplace_back(middle + data.position_offset.value_or(0), means[i]);
      values.push_back(means[i]);
    }
    chart.description += fmt::format("{}: {} in the first stretch, {} in the last. ", method->name,
                                     figure(means.front()), figure(means.back()));
    chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return "";
  const double offset = data.position_offset.value_or(0);
  chart.x = axis_over({data.positions.front() + offset, data.positions.back() + offset}, false,
                      "position of the token");
  chart.y = axis_over(values, true, "KL divergence, nats per token");
  return figure_html("Whether it grows along a sequence", draw(chart),
                     fmt::format("Means over {} stretches of equal length.{}",
                                 data.positions.size() - 1, left_out_note(data)));
}

std::string percentile_figure(const ReportData& data) {
  LineChart chart{.id = "pct",
                  .title = "Percentiles of KL divergence by method",
                  .description =
                      "Share of tokens on the horizontal axis, KL divergence that this "
                      "share stays under on the vertical axis. "};
  chart.x = {"share of tokens",
             tail_place(kFirstPercentile),
             3,
             false,
             {{tail_place(50), "50%"},
              {tail_place(75), "75"},
              {tail_place(90), "90"},
              {tail_place(99), "99"},
              {tail_place(99.9), "99.9%"}}};
  std::vector<double> values;
  for (const auto& [method, style] : charted_methods(data)) {
    Series series{.name = method->name, .style = style, .mark = SeriesMark::kLine};
    for (const auto& [percentile, kl] : method->kl_percentiles) {
      if (percentile < kFirstPercentile || percentile > 99.95) continue;
      series.points.emplace_back(tail_place(percentile), kl);
      values.push_back(kl);
      if (percentile == 50 || percentile == 99) {
        chart.description += fmt::format("{} at {}%: {}. ", method->name, percentile, figure(kl));
      }
    }
    if (!series.points.empty()) chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return "";
  chart.y = axis_over(values, true, "KL divergence, nats");
  return figure_html(
      "How bad the worst tokens are", draw(chart),
      "Read at 99: one token in a hundred diverges by more than this. The axis gives "
      "each tenth of the tail the same room." +
          left_out_note(data));
}

std::string output_error_figure(const ReportData& data) {
  LineChart chart{.id = "nmse", .title = "Error of the attention output by layer and method"};
  std::vector<double> values;
  size_t layers = 0;
  for (const auto& [method, style] : charted_methods(data)) {
    if (method->output_nmse.empty()) continue;
    Series series{.name = method->name, .style = style};
    for (size_t l = 0; l < method->output_nmse.size(); ++l) {
      series.points.emplace_back(static_cast<double>(l), method->output_nmse[l]);
      values.push_back(method->output_nmse[l]);
    }
    layers = std::max(layers, series.points.size());
    chart.description +=
        fmt::format("{}: {} in the first layer, {} in the last. ", method->name,
                    figure(method->output_nmse.front()), figure(method->output_nmse.back()));
    chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return "";
  chart.x = layer_axis(layers);
  chart.y = axis_over(values, true, "squared error / squared output");
  return figure_html(
      "Error of the attention output, layer by layer", draw(chart),
      "With the errors of all layers before, so lines may rise with depth." + left_out_note(data));
}

std::string head_error_figure(const ReportData& data) {
  constexpr size_t kMostHeads = 64, kMostCells = 4096;
  const MethodFigures* const m = judged_method(data);
  if (m == nullptr || m->output_nmse_heads.empty()) return "";
  const auto& layers = m->output_nmse_heads;
  const size_t heads = layers.front().size();
  double least = INFINITY, most = 0;
  size_t worst_layer = 0, worst_head = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].size() != heads) return "";
    for (size_t h = 0; h < heads; ++h) {
      const double error = layers[l][h];
      if (!(error > 0) || !std::isfinite(error)) continue;
      least = std::min(least, error);
      if (error <= most) continue;
      most = error;
      worst_layer = l;
      worst_head = h;
    }
  }
  if (heads > kMostHeads || heads * layers.size() > kMostCells || !(most > 0)) return "";
  HeatMap map{
      .id = "heads",
      .title = fmt::format("Error of the attention output by layer and KV head, {}", m->name),
      .description = fmt::format("Largest in layer {}, head {}: {}.", worst_layer, worst_head,
                                 percent(most, 2)),
      .column_title = "KV head",
      .row_title = "layer"};
  for (size_t h = 0; h < heads; ++h) map.columns.push_back(std::to_string(h));
  const double range = std::max(std::log(most) - std::log(least), 1e-9);
  for (size_t l = 0; l < layers.size(); ++l) {
    map.rows.push_back(std::to_string(l));
    for (size_t h = 0; h < heads; ++h) {
      const double error = layers[l][h];
      if (!std::isfinite(error)) continue;
      map.cells.push_back({h, l, error > 0 ? (std::log(error) - std::log(least)) / range : 0,
                           figure(100 * error, 2),
                           fmt::format("layer {}, KV head {}: {}", l, h, percent(error, 2))});
    }
  }
  return figure_html(
      "Error of the attention output, head by head", draw(map),
      fmt::format("Method {}: squared error over squared output in percent, with the errors of all "
                  "layers before. Shades are logarithmic, from {} to {}. {}",
                  m->name, figure(100 * least, 2), figure(100 * most, 2), map.description));
}

std::string sensitivity_figure(const ReportData& data) {
  LineChart chart{.id = "sens", .title = "KL divergence with a single layer at 2 bits"};
  Series series{.name = "", .style = 0};
  std::vector<double> values;
  for (const MethodFigures& m : data.methods) {
    const size_t at = m.name.find("@layer:");
    if (at == std::string::npos || !is_finite(m.kl.mean)) continue;
    const std::string digits = m.name.substr(at + 7);
    int layer = 0;
    const char* const end = digits.data() + digits.size();
    const auto [stop, status] = std::from_chars(digits.data(), end, layer);
    if (status != std::errc() || stop != end || layer < 0) continue;
    series.points.emplace_back(layer, *m.kl.mean);
    values.push_back(*m.kl.mean);
  }
  if (series.points.size() < 2) return "";
  std::ranges::sort(series.points);
  chart.x = layer_axis(static_cast<size_t>(series.points.back().first) + 1);
  chart.y = axis_over(values, true, "KL divergence, nats per token");
  auto worst = series.points;
  std::ranges::sort(worst, [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string caption = "Every other layer is exact. Most sensitive: layer";
  for (size_t i = 0; i < std::min<size_t>(3, worst.size()); ++i) {
    caption +=
        fmt::format("{} {:.0f} ({})", i == 0 ? "" : ",", worst[i].first, figure(worst[i].second));
  }
  chart.description = caption;
  chart.series.push_back(std::move(series));
  return figure_html("What one layer at 2 bits costs", draw(chart), caption + ".");
}

std::vector<std::string> needle_figures(const ReportData& data) {
  std::vector<const MethodFigures*> shown;
  for (const MethodFigures& m : data.methods) {
    if (m.reference) shown.push_back(&m);
  }
  for (const Charted& charted : charted_methods(data)) shown.push_back(charted.method);
  std::vector<std::string> figures;
  for (const MethodFigures* m : shown) {
    if (!m->needles || m->needles->cells.empty()) continue;
    std::vector<double> lengths, depths;
    for (const NeedleCell& cell : m->needles->cells) {
      lengths.push_back(cell.length);
      depths.push_back(cell.depth);
    }
    for (auto* list : {&lengths, &depths}) {
      std::ranges::sort(*list);
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
    HeatMap map{
        .id = fmt::format("map{}", figures.size()),
        .title = fmt::format("Needles found by {}", m->name),
        .description = fmt::format("{} of {} prompts passed.", count(m->needles->all.passed),
                                   count(m->needles->all.prompts)),
        .column_title = "prompt length, tokens",
        .row_title = "depth"};
    for (const double length : lengths) map.columns.push_back(token_length(length));
    for (const double depth : depths) map.rows.push_back(percent(depth, 0));
    for (const NeedleCell& cell : m->needles->cells) {
      const double rate = cell.passed / cell.prompts;
      map.cells.push_back(
          {static_cast<size_t>(std::ranges::find(lengths, cell.length) - lengths.begin()),
           static_cast<size_t>(std::ranges::find(depths, cell.depth) - depths.begin()), rate,
           fmt::format("{:.0f}", 100 * rate),
           fmt::format("length {}, depth {}: {} of {} passed", count(cell.length),
                       percent(cell.depth, 0), count(cell.passed), count(cell.prompts))});
    }
    figures.push_back(figure_html(m->name, draw(map),
                                  fmt::format("{} in all", percent(m->needles->all.rate, 0))));
  }
  return figures;
}

}  // namespace oscar
