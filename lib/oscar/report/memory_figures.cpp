// Pictures of memory: what a request takes, and how many fit, by context.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/report/chart.h"
#include "oscar/report/figure_parts.h"
#include "oscar/report/figures.h"

namespace oscar {
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
