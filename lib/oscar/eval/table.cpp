// The report as text.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/base/numbers.h"
#include "oscar/base/text_lines.h"
#include "oscar/eval/evaluate.h"
#include "oscar/report/cautions.h"

namespace oscar {
namespace {

// Below this a difference of scores is the rounding of float32 logits, and may be negative.
constexpr double kRounding = 1e-8;

// Four significant digits, without an exponent where a reader would not expect one.
std::string short_number(const Json& value) {
  if (!value.is_number()) return "-";
  const auto x = value.get<double>();
  if (std::abs(x) < kRounding) return "0.0000";
  if (std::abs(x) < 1e-4 || std::abs(x) >= 1e5) return fmt::format("{:.1e}", x);
  const int digits = std::abs(x) >= 1000 ? 0 : std::abs(x) >= 100 ? 1 : std::abs(x) >= 10 ? 2 : 3;
  return fmt::format("{:.{}f}", x, std::abs(x) < 1 ? 4 : digits);
}

// One chunk has no standard error.
std::string with_error(const Json& estimate) {
  const std::string mean = fmt::format("{:>8}", short_number(estimate["mean"]));
  const Json& error = estimate["se"];
  if (!error.is_number() || !std::isfinite(error.get<double>())) return fmt::format("{:<17}", mean);
  return fmt::format("{} ±{:<7}", mean, short_number(error));
}

std::string text_cells(const Json& method) {
  return fmt::format(" {} {} {:>5.1f}%", with_error(method["ppl"]), with_error(method["kl"]),
                     100 * method["top1"]["mean"].get<double>());
}

// The start of a long name gives way to its variant, which tells rows apart.
std::string fit_name(const std::string& name, size_t width) {
  if (name.size() <= width) return name;
  return fmt::format("…{}", std::string_view(name).substr(name.size() - width + 1));
}

// Of which rows the errors are, a line a method.
std::string row_class_lines(const Json& rows) {
  constexpr const char* kClasses[] = {"separators", "sinks", "others"};
  const auto line = [&](const std::string& name, const Json& left, const Json& right) {
    std::string text = fmt::format("{:<23}", fit_name(name, 23));
    for (const char* of : kClasses) {
      text += fmt::format(" {:>5.1f}% / {:>5.1f}%", 100 * left[of].get<double>(),
                          100 * right[of].get<double>());
    }
    return text + "\n";
  };
  std::string out = fmt::format("{:<23} {:>15} {:>15} {:>15}\n", "2-bit rows with them",
                                kClasses[0], kClasses[1], kClasses[2]);
  out += line("rows / attention", rows["rows"], rows["attention"]);
  if (!rows.contains("methods")) return out;
  out += "error of keys / values\n";
  for (const auto& [name, errors] : rows["methods"].items()) {
    out += line("  " + name, errors["key_error"], errors["value_error"]);
  }
  return out;
}

std::string needle_cell(const Json& method) {
  if (!method.contains("niah")) return "";
  const Json& niah = method["niah"];
  return fmt::format(" {:>3.0f}% [{:.0f},{:.0f}]", 100 * niah["rate"].get<double>(),
                     100 * niah["low"].get<double>(), 100 * niah["high"].get<double>());
}

// The length that the table's bits per element are for: the longest that was measured.
std::string quoted_length(const Json& report) {
  int64_t longest = report.value("longest_sequence", int64_t{0});
  if (report.contains("needle") && longest == 0) {
    for (const auto& [length, count] : report["needle"]["lengths"].items()) {
      longest = std::max(longest, static_cast<int64_t>(std::stoll(length)));
    }
  }
  return std::to_string(longest > 0 ? longest : 32768);
}

// The paired difference of perplexities, which two columns with errors of their own can't show.
std::string increase_lines(const Json& report) {
  const auto share = [](const Json& nats) {
    if (!nats.is_number()) return std::string("-");
    const double points = 100 * std::expm1(nats.get<double>());
    return std::abs(points) < 1000 ? fmt::format("{:+.2f}%", points)
                                   : fmt::format("{:+.1e}%", points);
  };
  std::string out;
  for (const auto& [name, method] : report["methods"].items()) {
    if (name == "bf16" || !method.contains("nll_increase")) continue;
    const Json& d = method["nll_increase"];
    out += fmt::format("{:<23} {:>10} [{}, {}]\n", fit_name(name, 23), share(d["mean"]),
                       share(d["low"]), share(d["high"]));
  }
  return out.empty() ? out : "perplexity over bf16's  paired, 95% interval\n" + out;
}

// What a stopped run has counted; "" for a whole one.
std::string partial_line(const Json& report) {
  if (!report.contains("partial")) return "";
  std::string parts;
  for (const auto& [task, part] : report["partial"].items()) {
    const std::string unit = part.begin().key();
    parts += fmt::format("{}{} of {} {} ({})", parts.empty() ? "" : ", ", part[unit].get<int64_t>(),
                         part["of"].get<int64_t>(), unit, task);
  }
  std::string text;
  add_line(text, "PARTIAL:", "the run was stopped; counted: " + parts, 9);
  return text;
}

std::string caution_lines(const Json& report) {
  std::string text;
  for (const Caution& caution : cautions_of(report)) {
    add_line(text, "CAUTION:", caution.sentence, 9);
  }
  return text;
}

}  // namespace

std::string format_table(const Json& report) {
  const bool text = report.contains("tokens"), needles = report.contains("needle");
  const std::string length = quoted_length(report);
  std::string out = fmt::format("{:<17} {:>5}", "method", "bits");
  if (text) out += fmt::format(" {:^17} {:^17} {:>6}", "perplexity", "KL to bf16", "top-1");
  if (needles) out += fmt::format(" {:>12}", "needles");
  out += fmt::format("\n{:-<{}}\n", "", text && needles ? 80 : text ? 65 : 40);
  for (const auto& [name, method] : report["methods"].items()) {
    out += fmt::format("{:<17} {:>5.2f}", fit_name(name, 17), method["bpe"][length].get<double>());
    if (text) out += text_cells(method);
    out += needle_cell(method) + "\n";
  }
  if (text) out += increase_lines(report);
  if (report.contains("separators")) {
    const Json& separated = report["separators"];
    out += fmt::format("with a separator as every {} token\n",
                       ordinal(separated["gap"].get<int64_t>()));
    for (const auto& [name, method] : separated["methods"].items()) {
      out += fmt::format("{:<23}{}\n", fit_name(name, 23), text_cells(method));
    }
  }
  if (report.contains("separators") && report["separators"].contains("rows")) {
    out += row_class_lines(report["separators"]["rows"]);
  }
  out += fmt::format("bits: per cached element, at {} tokens", length);
  if (text) {
    out += fmt::format("; {} tokens from position {} on,\nmode {}, offset {}; ± standard error",
                       report["tokens"].get<int64_t>(), report["first_position"].get<int64_t>(),
                       report["mode"].get<std::string>(), report["position_offset"].get<int64_t>());
  }
  if (needles) {
    out += fmt::format("\nneedles: {} prompts, 95% interval",
                       report["needle"]["prompts"].get<int64_t>());
  }
  const std::string engine = report.value("engine", "simulate");
  if (engine != "simulate") {
    out += fmt::format("\nengine {}: decoded token by token through a paged cache", engine);
  }
  return out + "\n" + caution_lines(report) + partial_line(report);
}

}  // namespace oscar
