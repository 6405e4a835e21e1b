// Sections made of tables and figures.
#include "oscar/report/sections.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "oscar/report/chart.h"
#include "oscar/report/figures.h"
#include "oscar/report/html.h"
#include "oscar/report/table.h"

namespace oscar {
namespace {

std::string section(const char* title, const std::string& lead, const std::string& body) {
  return fmt::format("<section>\n<h2>{}</h2>\n{}{}</section>\n", title,
                     lead.empty() ? "" : fmt::format("<p class=\"lead\">{}</p>\n", lead), body);
}

std::string figures_grid(const std::vector<std::string>& figures, const char* css,
                         const std::string& style = "") {
  std::string html;
  for (const std::string& figure : figures) html += figure;
  return html.empty() ? "" : fmt::format("<div class=\"{}\"{}>\n{}</div>\n", css, style, html);
}

// "94% [92, 96]" with the interval in a softer colour.
std::string rate_html(const NeedleRate& rate) {
  if (!is_finite(rate.rate)) return percent(rate.rate, 0);
  return fmt::format("{} <span class=\"iv\">[{:.0f}, {:.0f}]</span>", percent(rate.rate, 0),
                     100 * rate.low.value_or(NAN), 100 * rate.high.value_or(NAN));
}

std::string interval_html(const Span95& span) {
  std::string text = escape_html(with_interval(span.mean, span.low, span.high));
  const size_t at = text.find('[');
  if (at == std::string::npos) return text;
  return text.substr(0, at) + "<span class=\"iv\">" + text.substr(at) + "</span>";
}

std::string increase_html(const MethodFigures& m) {
  if (m.reference) return "";
  const auto ratio = [](const Figure& x) { return x ? Figure(std::expm1(*x)) : Figure(); };
  std::string text = signed_percent(ratio(m.nll_increase.mean));
  if (is_finite(m.nll_increase.low) && is_finite(m.nll_increase.high)) {
    text += fmt::format(" <span class=\"iv\">[{}, {}]</span>",
                        signed_percent(ratio(m.nll_increase.low)),
                        signed_percent(ratio(m.nll_increase.high)));
  }
  return text;
}

std::string method_cell(const MethodFigures& m) {
  return fmt::format("{}<small>{}</small>", escape_html(m.name), escape_html(m.summary));
}

void add_text_head(HtmlTable& table) {
  table.head.insert(table.head.end(),
                    {"Perplexity", "Increase", "KL divergence, nats/token", "Same top token"});
}

void add_text_cells(const MethodFigures& m, std::vector<std::string>& row) {
  row.insert(row.end(),
             {figure(m.perplexity.mean), increase_html(m), m.reference ? "" : interval_html(m.kl),
              m.reference ? "" : percent(m.top1.mean)});
}

// The same text with separators inside.
HtmlTable separated_table(const ReportData& data, const MethodFigures* judged) {
  HtmlTable table{.head = {"Method"}};
  add_text_head(table);
  for (const MethodFigures& m : data.separated) {
    if (judged && m.name == judged->name) table.marked.push_back(table.rows.size());
    table.rows.push_back({escape_html(m.name)});
    add_text_cells(m, table.rows.back());
  }
  table.caption = fmt::format(
      "The same text with a token that ends documents or turns as every {} token: such tokens draw "
      "much attention, and calibration text may hardly have them.",
      ordinal(static_cast<int64_t>(data.separator_gap.value_or(0))));
  return table;
}

// Of which rows of that text the errors are.
HtmlTable row_class_table(const ReportData& data) {
  HtmlTable table{.head = {"Share of", "Separators", "Other sinks", "Other rows"}};
  const auto add = [&](const std::string& name, const RowClassFigures& shares) {
    table.rows.push_back({name, percent(shares[0]), percent(shares[1]), percent(shares[2])});
  };
  add("2-bit rows", data.row_share);
  add("attention to them", data.attention_share);
  for (const RowClassErrors& errors : data.row_errors) {
    if (errors.method.find('@') != std::string::npos) continue;  // of one side or layer
    add(escape_html(errors.method) + ": error of keys", errors.key);
    add(escape_html(errors.method) + ": error of values", errors.value);
  }
  table.caption =
      "Which rows of that text draw the attention, and which the error comes from, weighted by the "
      "attention that they receive. Sinks: keys that receive ten times the mean or more.";
  return table;
}

HtmlTable method_table(const ReportData& data, const MethodFigures* judged, bool variants) {
  HtmlTable table{.head = {"Method"}};
  if (data.has_text) add_text_head(table);
  const double length = quoted_length(data);
  if (length > 0) table.head.push_back(fmt::format("Bits per value at {}", token_length(length)));
  if (data.has_needles) table.head.emplace_back("Needles");
  for (const MethodFigures& m : data.methods) {
    if (m.variant != variants) continue;
    if (&m == judged) table.marked.push_back(table.rows.size());
    std::vector<std::string> row = {method_cell(m)};
    if (data.has_text) add_text_cells(m, row);
    if (length > 0) row.push_back(figure(m.bits_at(length)));
    if (data.has_needles) row.push_back(m.needles ? rate_html(m.needles->all) : "–");
    table.rows.push_back(std::move(row));
  }
  return table;
}

const char* standing_word(Standing standing) {
  switch (standing) {
    case Standing::kClose:
      return "✓ close";
    case Standing::kCare:
      return "△ with care";
    case Standing::kLost:
      return "✕ lost";
    case Standing::kUnknown:
      break;
  }
  return "– not decided";
}

const char* standing_class(Standing standing) {
  constexpr const char* names[] = {"close", "care", "lost", "unknown"};
  return names[static_cast<size_t>(standing)];
}

std::string tile(const char* label, const std::string& value, const std::string& note) {
  return fmt::format("<div><dt>{}</dt><dd>{}{}</dd></div>\n", label, value,
                     note.empty() ? "" : fmt::format("<small>{}</small>", note));
}

std::string tiles(const ReportData& data, const MethodFigures& m) {
  std::string html;
  const MethodFigures* const reference = data.find("bf16");
  if (m.has_text) {
    if (reference) {
      html += tile("Perplexity", figure(m.perplexity.mean),
                   fmt::format("BF16 {} ({})", figure(reference->perplexity.mean),
                               signed_percent(is_finite(m.nll_increase.mean)
                                                  ? Figure(std::expm1(*m.nll_increase.mean))
                                                  : m.nll_increase.mean)));
    }
    const MethodFigures* const published = published_method(data);
    html += tile("KL divergence", figure(m.kl.mean),
                 published ? fmt::format("published OSCAR {}", figure(published->kl.mean))
                           : "nats per token");
    html += tile("Same top token", percent(m.top1.mean), "as BF16");
  }
  if (m.needles) {
    html += tile("Needles found", percent(m.needles->all.rate, 0),
                 reference && reference->needles
                     ? fmt::format("BF16 {}", percent(reference->needles->all.rate, 0))
                     : "");
  }
  const double length = model_length(data);
  if (const Figure bits = m.bits_at(length); is_finite(bits) && *bits > 0) {
    html += tile("Cache memory", fmt::format("1/{}", figure(16 / *bits, 2)),
                 fmt::format("of BF16, at {} tokens", token_length(length)));
  }
  return html.empty() ? "" : "<dl class=\"tiles\">\n" + html + "</dl>\n";
}

}  // namespace

std::string verdict_section(const ReportData& data, const Verdict& verdict) {
  std::string html = fmt::format("<section class=\"verdict {}\">\n<h2>{}</h2>\n",
                                 standing_class(verdict.standing), escape_html(verdict.headline));
  for (const std::string& sentence : verdict.sentences) {
    html += fmt::format("<p>{}</p>\n", escape_html(sentence));
  }
  html += "</section>\n";
  if (verdict.judged) html += tiles(data, *verdict.judged);
  if (!verdict.checks.empty()) {
    HtmlTable table{.caption =
                        "What the verdict rests on: the worst line decides. The limits are "
                        "this page’s convention, not a standard. [ ] is a 95% interval.",
                    .head = {"Check", "Measured", "Limits", "Standing"},
                    .words = true};
    for (const Check& check : verdict.checks) {
      const std::string note =
          check.note.empty() ? "" : fmt::format("<small>{}</small>", escape_html(check.note));
      table.rows.push_back(
          {escape_html(check.what), escape_html(check.measured) + note, escape_html(check.limits),
           fmt::format("<span class=\"stand {}\">{}</span>", standing_class(check.standing),
                       standing_word(check.standing))});
    }
    html += draw(table);
  }
  html += "<div class=\"notes\"><div><h3>Not measured here</h3><ul>";
  for (const std::string& gap : verdict.not_measured) {
    html += fmt::format("<li>{}</li>", escape_html(gap));
  }
  return html + "</ul></div></div>\n";
}

std::string method_section(const ReportData& data, const Verdict& verdict) {
  HtmlTable table = method_table(data, verdict.judged, false);
  std::string lead = "All methods read the same tokens";
  if (data.has_text) {
    lead += fmt::format(
        ": {} predicted tokens, from position {} on, where the 2-bit region begins to "
        "be read",
        count(data.tokens), count(data.first_position));
  }
  table.caption = verdict.judged ? "The marked row is the one judged above. [ ] is a 95% interval."
                                 : "[ ] is a 95% interval.";
  std::string body = draw(table);
  if (!data.separated.empty()) body += draw(separated_table(data, verdict.judged));
  if (!data.row_errors.empty()) body += draw(row_class_table(data));
  return section("Methods side by side", escape_html(lead + "."), body);
}

std::string divergence_section(const ReportData& data) {
  const std::string body = figures_grid(
      {divergence_figure(data), bits_figure(data), percentile_figure(data), position_figure(data)},
      "figures");
  if (body.empty()) return "";
  return section(
      "Divergence from BF16",
      "KL divergence compares the whole predicted distribution, token by token, and shows "
      "damage that perplexity averages away.",
      body);
}

std::string needle_section(const ReportData& data, const Verdict& verdict) {
  const std::string maps = figures_grid(
      needle_figures(data), "maps",
      fmt::format(" style=\"--map:{:.0f}px\"", heat_map_width(data.needle_lengths.size())));
  if (maps.empty()) return "";
  std::string lead = fmt::format(
      "Facts are hidden in a text of exact length and asked for at its end. Cells show the share "
      "of "
      "prompts answered in full, in percent, by prompt length and by the depth of the first asked "
      "fact; {} prompts per method.",
      count(data.needle_prompts));
  if (verdict.judged) {
    std::string bits;
    for (const double length : data.needle_lengths) {
      const Figure value = verdict.judged->bits_at(length);
      if (!is_finite(value)) continue;
      bits +=
          fmt::format("{}{} at {}", bits.empty() ? "" : ", ", figure(value), token_length(length));
    }
    if (!bits.empty()) {
      lead += fmt::format(" Bits per value at these lengths ({}): {}.", verdict.judged->name, bits);
    }
  }
  std::set<std::string> kinds;
  for (const MethodFigures& m : data.methods) {
    if (!m.needles) continue;
    for (const auto& [kind, rate] : m.needles->kinds) kinds.insert(kind);
  }
  HtmlTable table{.caption = "Pass rate by kind of task.", .head = {"Method"}};
  for (const std::string& kind : kinds) table.head.push_back(kind);
  table.head.emplace_back("All");
  table.head.emplace_back("Lost / won against BF16");
  for (const MethodFigures& m : data.methods) {
    if (!m.needles || m.variant) continue;
    if (&m == verdict.judged) table.marked.push_back(table.rows.size());
    std::vector<std::string> row = {escape_html(m.name)};
    for (const std::string& kind : kinds) {
      const auto found =
          std::ranges::find(m.needles->kinds, kind, &std::pair<std::string, NeedleRate>::first);
      row.push_back(found == m.needles->kinds.end() ? "–" : rate_html(found->second));
    }
    row.push_back(rate_html(m.needles->all));
    row.push_back(m.needles->only_bf16
                      ? fmt::format("{} / {} <span class=\"iv\">p = {}</span>",
                                    count(m.needles->only_bf16), count(m.needles->only_method),
                                    figure(m.needles->mcnemar_p, 2))
                      : "");
    table.rows.push_back(std::move(row));
  }
  return section("Needles in long prompts", escape_html(lead), maps + draw(table));
}

std::string layer_section(const ReportData& data) {
  const std::string body = figures_grid(
      {output_error_figure(data), head_error_figure(data), sensitivity_figure(data)}, "figures");
  if (body.empty()) return "";
  return section("Layer by layer",
                 "Where the error enters, and how it grows on its way through the model.", body);
}

std::string key_row_section(const ReportData& data) {
  const std::string body =
      figures_grid({key_row_figure(data), transformed_row_figure(data)}, "figures");
  if (body.empty()) return "";
  return section("One key row, before and after",
                 "A key of this text on its way into the cache: 2 bits have four levels between "
                 "the ends of a row, and a few large channels leave the others one or two of them.",
                 body);
}

std::string bundle_section(const ReportData& data) {
  const std::string body = figures_grid({spectrum_figure(data, true), spectrum_figure(data, false),
                                         channel_profile_figure(data), channel_peak_figure(data)},
                                        "figures");
  if (body.empty()) return "";
  return section(
      "Inside the bundle",
      "What the transforms were fitted to, and what they do to outlier channels: a few "
      "large channels would set the range of a whole row and leave the others no levels.",
      body);
}

std::string memory_section(const ReportData& data, const Verdict& verdict) {
  if (!verdict.judged || verdict.judged->bits.empty()) return "";
  HtmlTable table{
      .caption = fmt::format("Method {}. Scale, zero and the BF16 windows are included.{}",
                             escape_html(verdict.judged->name),
                             data.local_bytes(1) > 0
                                 ? " Bits and bytes per token are of layers that attend to all "
                                   "tokens; windows of local layers, in BF16, are in whole caches."
                                 : ""),
      .head = {"Context", "Bits per value", "Times less than BF16"}};
  const bool bytes = is_finite(data.elements_per_token);
  if (bytes)
    table.head.insert(table.head.end(),
                      {"Bytes per token", "Whole cache, BF16", "Whole cache, INT2"});
  const auto binary = [](double value) {
    constexpr double kMiB = 1024 * 1024, kGiB = 1024 * kMiB;
    return value < 10 * kGiB ? figure(value / kMiB) + " MiB" : figure(value / kGiB) + " GiB";
  };
  std::map<double, double> rows(verdict.judged->bits.begin(), verdict.judged->bits.end());
  const Figure own = verdict.judged->bits_at(model_length(data));
  if (is_finite(own)) rows.emplace(model_length(data), *own);
  if (is_finite(data.max_positions)) {  // no lengths that the model does not serve
    rows.erase(rows.upper_bound(*data.max_positions), rows.end());
  }
  for (const auto& [length, bits] : rows) {
    std::vector<std::string> row = {token_length(length) + " tokens", figure(bits),
                                    figure(Figure(16 / bits), 3)};
    if (bytes) {
      const double elements = *data.elements_per_token;
      const double local = data.local_bytes(length);
      row.insert(row.end(), {count(elements * bits / 8), binary(2 * elements * length + local),
                             binary(elements * bits / 8 * length + local)});
    }
    table.rows.push_back(std::move(row));
  }
  const std::string pictures = figures_grid(
      {request_memory_figure(data, *verdict.judged), request_count_figure(data, *verdict.judged)},
      "figures");
  return section("Memory", "", pictures + draw(table));
}

std::string variant_section(const ReportData& data, const Verdict& verdict) {
  HtmlTable table = method_table(data, verdict.judged, true);
  if (table.rows.empty()) return "";
  table.caption =
      "Name@variant: k keys only, v values only, layer:N a single layer at 2 bits, "
      "clip:K/V other clipping, window:SINK/RECENT other BF16 windows.";
  return section("Variants", "", draw(table));
}

std::string fact_section(const ReportData& data) {
  std::string body = "<dl class=\"facts\">\n";
  for (const auto& [label, value] : data.facts) {
    body += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escape_html(label), escape_html(value));
  }
  body += "</dl>\n";
  if (!data.command.empty()) body += fmt::format("<pre>{}</pre>\n", escape_html(data.command));
  return section("How it was run", "", body);
}

}  // namespace oscar
