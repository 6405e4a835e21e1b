// Figures about the bundle: eigenvalue spectra, and channels before and after the transform.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/report/chart.h"
#include "oscar/report/figure_parts.h"
#include "oscar/report/figures.h"
#include "oscar/report/html.h"

namespace oscar {
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

}  // namespace oscar
