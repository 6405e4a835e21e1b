// One key row: as the model has it, as the judged method's transform leaves it, and from 2 bits.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/report/chart.h"
#include "oscar/report/figure_parts.h"
#include "oscar/report/figures.h"
#include "oscar/report/verdict.h"

namespace oscar {
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

}  // namespace oscar
