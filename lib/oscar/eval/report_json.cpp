// The report as JSON and as a table.
#include "oscar/eval/report_json.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

#include "oscar/base/strings.h"
#include "oscar/cache/codec.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/evaluate.h"
#include "oscar/eval/report/report_data.h"

namespace oscar {

// Assembling the report.

namespace {

constexpr int64_t kQuotedLengths[] = {8192, 32768, 131072};
constexpr int64_t kMostBins = 16, kFewestOfBin = 256;  // of KL by position, and tokens in one
constexpr double kFloorFactor = 5;  // no ratio is quoted for a KL under this many floors

const std::vector<double>& percentile_levels() {
  static const std::vector<double> levels = {0.01, 0.05, 0.1, 0.2, 0.25, 0.3,  0.4,  0.5,   0.6,
                                             0.7,  0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999};
  return levels;
}

Json to_json(const Estimate& e) { return {{"mean", e.mean}, {"se", e.se}}; }
Json to_json(const PairedDifference& d) {
  return {{"mean", d.mean}, {"low", d.low}, {"high", d.high}};
}

// Share of the cache that a codec reaches: sides and layers that stay exact count 16 bits, local
// ones not at all. Of a tile that is still filling, half counts as exact.
double mixed_bits(const Method& method, int64_t length) {
  const int64_t recent =
      method.view.recent + (method.rival ? (method.view.demote_block - 1) / 2 : 0);
  const auto bits = [&](double of_row) {
    return bits_per_element(of_row, length, method.view.sink, recent);
  };
  double sum = -32.0 * method.num_local;
  for (const auto& layer : method.layers) {
    sum += layer && layer->int2_keys ? bits(method.key_bits) : 16.0;
    sum += layer && layer->int2_values ? bits(method.value_bits) : 16.0;
  }
  return sum /
         (2.0 * static_cast<double>(static_cast<int>(method.layers.size()) - method.num_local));
}

// What the method keeps exactly, and what a value of a coded row takes.
Json codec_json(const Method& method) {
  const auto is_coded = [](const auto& layer) { return layer != nullptr; };
  return {{"key_bits", method.key_bits},
          {"value_bits", method.value_bits},
          {"sink", method.view.sink},
          {"recent", method.view.recent},
          {"tile", method.view.demote_block},
          {"layers", std::ranges::count_if(method.layers, is_coded)}};
}

Json kl_json(const std::vector<double>& kl, const std::vector<int32_t>& units) {
  Json json = to_json(estimate(kl, units));
  const auto values = quantiles(kl, percentile_levels());
  for (size_t i = 0; i < values.size(); ++i) {
    json["percentiles"][fmt::format("{:g}", 100 * percentile_levels()[i])] = values[i];
  }
  json["max"] = *std::max_element(kl.begin(), kl.end());
  return json;
}

struct Passes {
  int64_t passed = 0, trials = 0;
};

Json rate_json(const Passes& p) {
  const auto [low, high] = wilson_interval(p.passed, p.trials);
  return {{"passed", p.passed},
          {"prompts", p.trials},
          {"rate", static_cast<double>(p.passed) / static_cast<double>(p.trials)},
          {"low", low},
          {"high", high}};
}

Json needle_json(const NeedleResults& results, size_t method) {
  const auto& outcomes = results.forced[method];
  Passes all;
  std::map<std::string, Passes> by_kind;
  std::map<std::pair<int64_t, double>, Passes> by_place;
  double margin = 0, squares = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const NeedlePrompt& prompt = results.prompts[i];
    for (Passes* p : {&all, &by_kind[prompt.kind], &by_place[{prompt.length, prompt.depth}]}) {
      ++p->trials;
      p->passed += outcomes[i].passes;
    }
    margin += outcomes[i].margin;
    squares += outcomes[i].margin * outcomes[i].margin;
  }
  const auto n = static_cast<double>(outcomes.size());
  const double variance = std::max(0.0, squares / n - margin / n * margin / n);
  Json json = rate_json(all);
  json["margin"] = {{"mean", margin / n}, {"se", n > 1 ? std::sqrt(variance / (n - 1)) : NAN}};
  for (const auto& [kind, passes] : by_kind) json["kinds"][kind] = rate_json(passes);
  json["cells"] = Json::array();
  for (const auto& [place, passes] : by_place) {
    json["cells"].push_back({{"length", place.first},
                             {"depth", place.second},
                             {"passed", passes.passed},
                             {"prompts", passes.trials}});
  }
  if (!results.generated.empty()) {
    Passes generated;
    for (const bool pass : results.generated[method]) {
      ++generated.trials;
      generated.passed += pass;
    }
    json["generated"] = rate_json(generated);
  }
  return json;
}

// Prompts that only the reference passes, only the method passes, and McNemar's probability.
Json against_reference(const NeedleResults& results, size_t method) {
  int64_t only_reference = 0, only_method = 0;
  for (size_t i = 0; i < results.prompts.size(); ++i) {
    const bool a = results.forced[0][i].passes, b = results.forced[method][i].passes;
    only_reference += a && !b;
    only_method += b && !a;
  }
  return {{"only_bf16", only_reference},
          {"only_method", only_method},
          {"p", mcnemar_exact(only_reference, only_method)}};
}

// Positions are counted in `bins` of equal width: the first position of one.
int64_t first_of_bin(const TextResults& results, int64_t bins, int64_t bin) {
  return results.first_position + (results.longest - results.first_position) * bin / bins;
}

// As many as are told apart by kFewestOfBin tokens each; the last ones have fewer where sequences
// differ in length.
int64_t position_bins(const TextResults& results, int64_t tokens) {
  const int64_t most = std::min(kMostBins, results.longest - results.first_position);
  return std::clamp<int64_t>(tokens / kFewestOfBin, 1, most);
}

// Scores lie sequence by sequence, positions ascending from first_position on.
std::vector<double> means_by_position(const std::vector<double>& values, const TextResults& results,
                                      int64_t bins) {
  std::vector<double> sums(static_cast<size_t>(bins), 0.0), counts = sums;
  size_t next = 0;
  for (const int64_t measured : results.measured) {
    size_t bin = 0;
    for (int64_t i = 0; i < measured; ++i) {
      while (results.first_position + i >=
             first_of_bin(results, bins, static_cast<int64_t>(bin) + 1)) {
        ++bin;
      }
      sums[bin] += values[next++];
      ++counts[bin];
    }
  }
  for (size_t bin = 0; bin < sums.size(); ++bin) sums[bin] /= counts[bin];
  return sums;
}

// By layer, and by layer and KV head; nothing of the reference, and 0 of layers without attention.
void add_output_errors(const OutputError& error, bool measured, Json& json) {
  json["output_nmse"] = Json::array();
  if (!measured) return;
  for (size_t l = 0; l < error.error.size(); ++l) {
    const auto total = [](const std::vector<double>& heads) {
      return std::accumulate(heads.begin(), heads.end(), 0.0);
    };
    const auto share = [](double of, double energy) { return energy != 0 ? of / energy : 0.0; };
    json["output_nmse"].push_back(share(total(error.error[l]), total(error.energy[l])));
    Json heads = Json::array();
    for (size_t h = 0; h < error.error[l].size(); ++h) {
      heads.push_back(share(error.error[l][h], error.energy[l][h]));
    }
    json["output_nmse_heads"].push_back(std::move(heads));
  }
}

}  // namespace

void describe_methods(const std::vector<Method>& methods, Json& report) {
  report["methods"] = Json::object();
  for (const Method& method : methods) {
    Json& json = report["methods"][method.name];
    json["summary"] = method.summary;
    if (method.rival) json["source"] = method.rival->source;
    if (!method.reference && !method.codec_off) json["codec"] = codec_json(method);
    for (const int64_t length : kQuotedLengths) {
      json["bpe"][std::to_string(length)] = mixed_bits(method, length);
    }
  }
}

namespace {

std::vector<int32_t> units_of(const TextResults& results) {
  if (!results.one_text) return make_units(results.measured);
  return make_units(
      {std::accumulate(results.measured.begin(), results.measured.end(), int64_t{0})});
}

}  // namespace

void add_text_results(const TextResults& results, const std::vector<Method>& methods,
                      std::optional<size_t> judged, uint64_t seed, Json& report) {
  const auto units = units_of(results);
  const TokenScores& reference = results.scores[0];
  report["tokens"] = units.size();
  report["sequences"] = results.measured.size();
  report["first_position"] = results.first_position;
  report["resampling_units"] = units.back() + 1;
  if (!results.one_text) report["repeated_share"] = results.repeated_share;
  const bool few = has_few_units(report);
  const auto paired = [&](const std::vector<double>& a, const std::vector<double>& b) {
    PairedDifference difference = paired_bootstrap(a, b, units, seed);
    if (few) difference.low = difference.high = NAN;
    return to_json(difference);
  };
  report["longest_sequence"] = results.longest;
  const int64_t bins = position_bins(results, static_cast<int64_t>(units.size()));
  if (bins > 1) {
    for (int64_t bin = 0; bin <= bins; ++bin) {
      report["positions"].push_back(first_of_bin(results, bins, bin));
    }
  }
  double floor = NAN;
  for (size_t m = 0; m < methods.size(); ++m) {
    if (methods[m].codec_off) floor = estimate(results.scores[m].kl, units).mean;
  }
  report["kl_floor"] = floor;
  for (size_t m = 0; m < methods.size(); ++m) {
    const TokenScores& scores = results.scores[m];
    Json& json = report["methods"][methods[m].name];
    const Estimate nll = estimate(scores.nll, units);
    json["bpe"][std::to_string(results.longest)] = mixed_bits(methods[m], results.longest);
    json["nll"] = to_json(nll);
    json["ppl"] = {{"mean", std::exp(nll.mean)}, {"se", std::exp(nll.mean) * nll.se}};
    json["nll_increase"] = paired(scores.nll, reference.nll);
    json["kl"] = kl_json(scores.kl, units);
    if (m > 0 && std::isfinite(floor)) {
      json["kl"]["above_floor"] = json["kl"]["mean"].get<double>() >= kFloorFactor * floor;
    }
    json["top1"] = to_json(estimate(scores.agrees, units));
    if (bins > 1) json["kl"]["by_position"] = means_by_position(scores.kl, results, bins);
    add_output_errors(results.output_errors[m], m > 0, json);
    if (m > 0 && judged && m != *judged) {
      Json difference = paired(scores.kl, results.scores[*judged].kl);
      difference["against"] = methods[*judged].name;
      json["kl_difference"] = std::move(difference);
    }
  }
}

void add_unit_results(const TextResults& results, const std::vector<Method>& methods,
                      Json& report) {
  const auto units = units_of(results);
  const auto count = static_cast<size_t>(units.back()) + 1;
  std::vector<int64_t> tokens(count, 0);
  for (const int32_t unit : units) ++tokens[unit];
  const auto means = [&](const std::vector<double>& values) {
    std::vector<double> out(count, 0.0);
    for (size_t i = 0; i < values.size(); ++i) out[units[i]] += values[i];
    for (size_t u = 0; u < count; ++u) out[u] /= static_cast<double>(tokens[u]);
    return out;
  };
  for (size_t m = 0; m < methods.size(); ++m) {
    report["methods"][methods[m].name]["units"] = {{"kl", means(results.scores[m].kl)},
                                                   {"nll", means(results.scores[m].nll)}};
  }
  report["unit_tokens"] = tokens;
}

void add_needle_results(const NeedleResults& results, const std::vector<Method>& methods,
                        Json& report) {
  Json& plan = report["needle"];
  std::map<int64_t, int64_t> lengths;
  std::map<std::string, int64_t> kinds;
  for (const NeedlePrompt& prompt : results.prompts) {
    ++lengths[prompt.length];
    ++kinds[prompt.kind];
  }
  plan["prompts"] = results.prompts.size();
  plan["chat_template"] = results.chat_template;
  for (const auto& [length, count] : lengths) plan["lengths"][std::to_string(length)] = count;
  for (const auto& [kind, count] : kinds) plan["kinds"][kind] = count;
  for (size_t m = 0; m < methods.size(); ++m) {
    Json& method = report["methods"][methods[m].name];
    for (const auto& [length, count] : lengths) {
      method["bpe"][std::to_string(length)] = mixed_bits(methods[m], length);
    }
    method["niah"] = needle_json(results, m);
    if (m > 0) method["niah"]["mcnemar"] = against_reference(results, m);
  }
}

// The report as text.

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

bool is_finite_number(const Json& value) {
  return value.is_number() && std::isfinite(value.get<double>());
}

// One resampling unit has no standard error.
std::string with_error(const Json& estimate) {
  const std::string mean = fmt::format("{:>8}", short_number(estimate["mean"]));
  const Json& error = estimate["se"];
  if (!is_finite_number(error)) return fmt::format("{:<17}", mean);
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

// The paired difference of perplexities, which two columns with errors of their own can't show. One
// resampling unit has no interval.
std::string increase_lines(const Json& report) {
  const auto share = [](const Json& nats) {
    if (!nats.is_number()) return std::string("-");
    const double points = 100 * std::expm1(nats.get<double>());
    return std::abs(points) < 1000 ? fmt::format("{:+.2f}%", points)
                                   : fmt::format("{:+.1e}%", points);
  };
  std::string out;
  bool intervals = false;
  for (const auto& [name, method] : report["methods"].items()) {
    if (name == "bf16" || !method.contains("nll_increase")) continue;
    const Json& d = method["nll_increase"];
    out += fmt::format("{:<23} {:>10}", fit_name(name, 23), share(d["mean"]));
    if (is_finite_number(d["low"]) && is_finite_number(d["high"])) {
      out += fmt::format(" [{}, {}]", share(d["low"]), share(d["high"]));
      intervals = true;
    }
    out += '\n';
  }
  if (out.empty()) return out;
  return (intervals ? "perplexity over bf16's  paired, 95% interval\n"
                    : "perplexity over bf16's  paired\n") +
         out;
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

// Of --needle-generate: prompts that each method answered rightly on its own; "" without them.
std::string generated_lines(const Json& report) {
  std::string counts, text;
  for (const auto& [name, method] : report["methods"].items()) {
    if (!method.contains("niah") || !method["niah"].contains("generated")) continue;
    const Json& rate = method["niah"]["generated"];
    counts += fmt::format("{}{} {} of {}", counts.empty() ? "" : ", ", name,
                          rate["passed"].get<int64_t>(), rate["prompts"].get<int64_t>());
  }
  if (!counts.empty()) add_line(text, "generated:", counts, 11);
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
  constexpr size_t kNarrow = 17, kWide = 32;  // beside all columns, and where needles have none
  size_t width = kNarrow;
  for (const auto& [name, method] : report["methods"].items()) width = std::max(width, name.size());
  width = needles ? kNarrow : std::min(width, kWide);
  std::string out = fmt::format("{:<{}} {:>5}", "method", width, "bits");
  if (text) out += fmt::format(" {:^17} {:^17} {:>6}", "perplexity", "KL to bf16", "top-1");
  if (needles) out += fmt::format(" {:>12}", "needles");
  out += fmt::format("\n{:-<{}}\n", "", (text && needles ? 80 : text ? 65 : 40) + width - kNarrow);
  for (const auto& [name, method] : report["methods"].items()) {
    out += fmt::format("{:<{}} {:>5.2f}", fit_name(name, width), width,
                       method["bpe"][length].get<double>());
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
    if (const std::string pieces = resampling_words(report); !pieces.empty()) {
      out += ", over\n" + pieces;
    }
  }
  if (needles) {
    out += fmt::format("\nneedles: {} prompts, 95% interval",
                       report["needle"]["prompts"].get<int64_t>());
  }
  const std::string engine = report.value("engine", "simulate");
  if (engine != "simulate") {
    out += fmt::format("\nengine {}: decoded token by token through a paged cache", engine);
  }
  return out + "\n" + generated_lines(report) + caution_lines(report) + partial_line(report);
}

}  // namespace oscar
