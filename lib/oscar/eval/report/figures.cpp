// The figures of the page.
#include "oscar/eval/report/figures.h"

#include <fmt/format.h>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "oscar/eval/report/charts.h"
#include "oscar/eval/report/page.h"
#include "oscar/eval/report/verdict.h"

namespace oscar {

// What the figures share: the frame around a chart, and the axis of layers.

// `title` and `caption` are plain text, `svg` is markup.
std::string figure_html(const std::string& title, const std::string& svg,
                        const std::string& caption);

// Layers 0 .. layers - 1 with ticks at round numbers.
AxisSpec layer_axis(size_t layers);

// Figures about methods: divergence, its tail, errors by layer, needles.

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

// Figures about the bundle: eigenvalue spectra, and channels before and after the transform.

namespace {

constexpr size_t kMostLines = 64;  // layers drawn in one spectrum
constexpr size_t kRampSteps = 5;   // classes r0 .. r4, first to last layer
constexpr double kSmallestShare = 1e-6;

double median(std::vector<double> values) {
  std::erase_if(values, [](double v) { return !std::isfinite(v); });
  if (values.empty()) return NAN;
  std::ranges::sort(values);
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

double largest(const std::vector<double>& values) {
  double most = -INFINITY;
  for (const double v : values) {
    if (std::isfinite(v)) most = std::max(most, v);
  }
  return std::isfinite(most) ? most : NAN;
}

Series over_median(const char* name, int style, const std::vector<double>& channels,
                   std::vector<double>& all) {
  Series series{.name = name, .style = style, .mark = SeriesMark::kLine};
  const double middle = median(channels);
  for (size_t c = 0; c < channels.size(); ++c) {
    series.points.emplace_back(static_cast<double>(c), channels[c] / middle);
    all.push_back(channels[c] / middle);
  }
  return series;
}

}  // namespace

std::string figure_html(const std::string& title, const std::string& svg,
                        const std::string& caption) {
  return fmt::format("<figure>\n<h3>{}</h3>\n{}<figcaption>{}</figcaption>\n</figure>\n",
                     escape_html(title), svg, escape_html(caption));
}

AxisSpec layer_axis(size_t layers) {
  AxisSpec axis{"layer", -0.5, static_cast<double>(layers) - 0.5, false, {}};
  size_t step = 1;
  for (const size_t wider : {2, 5, 10, 20, 50, 100, 200, 500, 1000}) {
    if (layers > 9 * step) step = wider;
  }
  for (size_t l = 0; l < layers; l += step) {
    axis.ticks.push_back({static_cast<double>(l), std::to_string(l)});
  }
  return axis;
}

std::string spectrum_figure(const ReportData& data, bool keys) {
  const char* const side = keys ? "keys" : "values";
  LineChart chart{.id = keys ? "speck" : "specv",
                  .title = fmt::format("Eigenvalue spectra of the {}, one line per layer", side)};
  std::vector<double> values, ranks;
  const size_t step = (data.spectra.size() + kMostLines - 1) / kMostLines;
  for (size_t l = 0; l < data.spectra.size(); ++l) {
    const SpectrumLayer& layer = data.spectra[l];
    const auto& share = keys ? layer.key : layer.value;
    const Figure rank = keys ? layer.key_rank : layer.value_rank;
    if (share.empty() || share.size() != data.ranks.size()) continue;
    if (is_finite(rank)) ranks.push_back(*rank);
    if (l % step != 0) continue;
    Series series{.name = "",
                  .style = 0,
                  .css = fmt::format("r{}", l * kRampSteps / data.spectra.size()),
                  .mark = SeriesMark::kLine};
    for (size_t i = 0; i < share.size(); ++i) {
      if (!(share[i] >= kSmallestShare)) continue;
      series.points.emplace_back(data.ranks[i], share[i]);
      values.push_back(share[i]);
    }
    if (!series.points.empty()) chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return "";
  const double dimension = data.ranks.back();
  chart.x = axis_over({1, dimension}, true, "eigenvalue, from the largest");
  chart.x.high = std::max(2.0, dimension);
  chart.x.ticks.clear();
  for (double tick = 1; tick <= chart.x.high; tick *= 4)
    chart.x.ticks.push_back({tick, count(tick)});
  chart.y = axis_over(values, true, "share of the whole");
  std::string caption;
  if (!ranks.empty()) {
    const auto [least, most] = std::ranges::minmax(ranks);
    caption = fmt::format("Effective rank {} to {} of {}.", figure(least), figure(most),
                          count(dimension));
  }
  chart.description = caption;
  if (step > 1) caption += fmt::format(" Every {} layers is drawn.", step);
  const std::string title = keys ? "Spectrum the key transform was fitted to"
                                 : "Spectrum the value transform was fitted to";
  std::string html = figure_html(title, draw(chart), caption);
  std::string legend = " First to last layer: <span class=\"ramps\">";
  for (size_t r = 0; r < kRampSteps; ++r)
    legend += fmt::format("<span class=\"ramp r{}\"></span>", r);
  legend += "</span>";
  return html.insert(html.find("</figcaption>"), legend);
}

std::string channel_profile_figure(const ReportData& data) {
  if (!data.profile || data.profile->before.empty()) return "";
  const ChannelProfile& p = *data.profile;
  LineChart chart{.id = "chan", .title = "Size of each key channel before and after the transform"};
  std::vector<double> all;
  chart.series.push_back(over_median("before", 1, p.before, all));
  chart.series.push_back(over_median("after", 0, p.after, all));
  chart.x = {"channel of the head",
             0,
             static_cast<double>(std::max<size_t>(p.before.size(), 2)) - 1,
             false,
             {}};
  chart.y = axis_over(all, true, "root mean square / median");
  const auto peak = [](const std::vector<double>& v) { return largest(v) / median(v); };
  const std::string caption = fmt::format(
      "Layer {}, KV head {}, the one with the largest outlier: the largest channel is {} the "
      "median "
      "before and {} after.",
      count(p.layer), count(p.head), times(peak(p.before)), times(peak(p.after)));
  chart.description = caption;
  return figure_html("Outlier channels of keys", draw(chart), caption);
}

std::string channel_peak_figure(const ReportData& data) {
  LineChart chart{.id = "peak", .title = "Largest channel over the median channel, by layer"};
  struct Line {
    const char* name;
    int style;
    std::vector<double> ChannelLayer::*heads;
  };
  std::vector<double> all;
  double furthest = 0;
  for (const Line& line : {Line{"keys before", 1, &ChannelLayer::key_before},
                           Line{"values before", 3, &ChannelLayer::value_before},
                           Line{"keys after", 0, &ChannelLayer::key_after},
                           Line{"values after", 2, &ChannelLayer::value_after}}) {
    Series series{.name = line.name, .style = line.style};
    for (const ChannelLayer& layer : data.channels) {
      const double height = largest(layer.*line.heads);
      if (!std::isfinite(height) || !(layer.layer >= 0 && layer.layer < 1e5)) continue;
      series.points.emplace_back(layer.layer, height);
      all.push_back(height);
      furthest = std::max(furthest, layer.layer);
    }
    if (series.points.empty()) continue;
    chart.description += fmt::format(
        "{}: {} at most. ", line.name,
        figure(std::ranges::max(series.points, {}, [](const auto& q) { return q.second; }).second));
    chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return "";
  chart.x = layer_axis(static_cast<size_t>(furthest) + 1);
  chart.y = axis_over(all, true, "largest channel / median");
  return figure_html("Largest channel, layer by layer", draw(chart),
                     "The worst KV head of each layer. 1 would be channels of equal size.");
}

// One key row: as the model has it, as the judged method's transform leaves it, and from 2 bits.

namespace {

constexpr int kRowStyle = 8;  // neutral: the row itself

Series row_series(const char* name, const std::vector<double>& row, int style, SeriesMark mark) {
  Series series{.name = name, .style = style, .mark = mark};
  for (size_t c = 0; c < row.size(); ++c)
    series.points.emplace_back(static_cast<double>(c), row[c]);
  return series;
}

// Squared error over square.
double error_of(const std::vector<double>& row, const std::vector<double>& read) {
  double error = 0, square = 0;
  for (size_t c = 0; c < row.size(); ++c) {
    error += (read[c] - row[c]) * (read[c] - row[c]);
    square += row[c] * row[c];
  }
  return error / square;
}

LineChart chart_of(const char* id, const char* title, const char* axis,
                   const std::vector<double>& row, const std::vector<double>* read, int style) {
  LineChart chart{.id = id, .title = title};
  std::vector<double> all = row;
  chart.series.push_back(row_series("exact", row, kRowStyle, SeriesMark::kThinLine));
  if (read != nullptr) {
    chart.series.push_back(row_series("from 2 bits", *read, style, SeriesMark::kDots));
    all.insert(all.end(), read->begin(), read->end());
  }
  all.push_back(0);
  chart.x = {axis, 0, static_cast<double>(std::max<size_t>(row.size(), 2)) - 1, false, {}};
  chart.y = axis_over(all, false, "value");
  chart.levels.emplace_back(0, "");
  return chart;
}

}  // namespace

std::string key_row_figure(const ReportData& data) {
  if (!data.key_row || data.key_row->written.empty()) return "";
  const KeyRowFigures& row = *data.key_row;
  const auto charted = charted_methods(data);
  const auto plain =
      std::ranges::find_if(charted, [](const Charted& c) { return c.method->name == "identity"; });
  const bool read =
      plain != charted.end() && plain->method->key_row_read.size() == row.written.size();
  LineChart chart =
      chart_of("krow", "One key row as the model has it", "channel of the head", row.written,
               read ? &plain->method->key_row_read : nullptr, read ? plain->style : 0);
  std::string caption = fmt::format(
      "Layer {}, KV head {}, the one with the largest outlier channel ({} the median); position "
      "{}, "
      "unselected.",
      count(row.layer), count(row.head), times(row.peak), count(row.position));
  if (read) {
    caption +=
        fmt::format(" Dots: from 2 bits without a transform, squared error {} of the square.",
                    percent(error_of(row.written, plain->method->key_row_read)));
  }
  chart.description = caption;
  return figure_html("A key row as the model has it", draw(chart), caption);
}

std::string transformed_row_figure(const ReportData& data) {
  const MethodFigures* const m = judged_method(data);
  if (!data.key_row || m == nullptr || m->key_row.empty() ||
      m->key_row.size() != m->key_row_read.size()) {
    return "";
  }
  LineChart chart = chart_of("trow", "The same key row after the transform",
                             "coordinate of the transform", m->key_row, &m->key_row_read, 0);
  const std::string caption = fmt::format(
      "Method {}. Line: what the transform makes of the row. Dots: the same from 2 bits, squared "
      "error {} of the square. What counts is how much of it queries see.",
      m->name, percent(error_of(m->key_row, m->key_row_read)));
  chart.description = caption;
  return figure_html("The same row after the transform", draw(chart), caption);
}

// Pictures of memory: what a request takes, and how many fit, by context.

namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr double kRoom = 16;  // GiB for caches in the second picture
constexpr double kShortest = 1024;
constexpr int kMostContexts = 7;  // powers of two that fit beside each other as labels

// Powers of two that end with the model's length, or with the last below it and that.
std::vector<double> drawn_contexts(double longest) {
  std::vector<double> contexts = {longest};
  double context = std::exp2(std::floor(std::log2(longest)));
  if (context == longest) context /= 2;
  for (; contexts.size() < kMostContexts && context >= kShortest; context /= 2) {
    contexts.insert(contexts.begin(), context);
  }
  return contexts;
}

AxisSpec context_axis(const std::vector<double>& contexts) {
  AxisSpec axis{
      .title = "context, tokens", .low = contexts.front(), .high = contexts.back(), .log = true};
  for (const double context : contexts) {
    // The model's own length close to a power of two: one of the two labels has room.
    const bool crowded = context != contexts.back() && context * 1.4 > contexts.back();
    if (!crowded) axis.ticks.push_back({context, token_length(context)});
  }
  return axis;
}

struct Format {
  const char* name;
  int style;
};
constexpr Format kFormats[] = {{"INT2", 0}, {"FP8", 1}, {"BF16", 2}};

// Bytes of a request in each format, in the order of kFormats. Local layers hold no more than their
// windows, and those are in BF16 beside INT2, too.
double bytes_of(const ReportData& data, const MethodFigures& m, size_t format, double context) {
  const double bits = format == 0 ? m.bits_at(context).value_or(NAN) : format == 1 ? 8 : 16;
  return *data.elements_per_token * bits / 8 * context +
         data.local_bytes(context) * (format == 1 ? 0.5 : 1);
}

std::string drawn(const ReportData& data, const MethodFigures& m, LineChart chart,
                  const std::string& title, const std::string& caption,
                  double (*value)(double bytes)) {
  const std::vector<double> contexts = drawn_contexts(model_length(data));
  std::vector<double> values;
  for (size_t format = 0; format < std::size(kFormats); ++format) {
    Series series{.name = kFormats[format].name, .style = kFormats[format].style};
    for (const double context : contexts) {
      series.points.emplace_back(context, value(bytes_of(data, m, format, context)));
      values.push_back(series.points.back().second);
    }
    chart.series.push_back(std::move(series));
  }
  chart.title = title;
  chart.x = context_axis(contexts);
  chart.y = axis_over(values, true, std::move(chart.y.title));
  return figure_html(title, draw(chart), caption);
}

bool can_be_drawn(const ReportData& data, const MethodFigures& m) {
  return is_finite(data.elements_per_token) && *data.elements_per_token > 0 &&
         model_length(data) >= 2 * kShortest && is_finite(m.bits_at(model_length(data)));
}

}  // namespace

double model_length(const ReportData& data) {
  return is_finite(data.max_positions) && *data.max_positions > 0 ? *data.max_positions : 131072;
}

std::string request_memory_figure(const ReportData& data, const MethodFigures& m) {
  if (!can_be_drawn(data, m)) return "";
  LineChart chart{.id = "request-memory",
                  .description = "GiB of one request's keys and values against its context",
                  .y = {.title = "GiB"}};
  return drawn(data, m, std::move(chart), "What one request takes",
               "Keys and values of one request, up to all that the model serves. INT2: the method "
               "judged above, its BF16 windows, scales and zeros included.",
               [](double bytes) { return bytes / kGiB; });
}

std::string request_count_figure(const ReportData& data, const MethodFigures& m) {
  if (!can_be_drawn(data, m)) return "";
  LineChart chart{.id = "request-count",
                  .description = "Requests that fit against their context",
                  .y = {.title = "requests"}};
  return drawn(data, m, std::move(chart),
               fmt::format("Requests that fit into {:.0f} GiB of cache", kRoom),
               "Whole requests of that context; none is drawn where not even one fits. "
               "oscar-bundle plan counts them for a GPU and the weights on it.",
               [](double bytes) {
                 const double requests = std::floor(kRoom * kGiB / bytes);
                 return requests >= 1 ? requests : NAN;
               });
}

}  // namespace oscar
