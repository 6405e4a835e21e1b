// The page: sections, style, HTML.
#include "oscar/eval/report/page.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/eval/report/charts.h"
#include "oscar/eval/report/figures.h"
#include "oscar/eval/report/report_data.h"
#include "oscar/eval/report/verdict.h"

namespace oscar {

// Tables with full header semantics that turn into cards on a narrow screen.

struct HtmlTable {
  std::string caption = {};                         // HTML
  std::vector<std::string> head = {};               // plain text
  std::vector<std::vector<std::string>> rows = {};  // HTML, the first cell heads its row
  std::vector<size_t> marked = {};                  // rows of the judged method
  bool words = false;                               // cells of text, set flush left
};

// Roles are spelled out because cards are laid out without table boxes, and browsers then drop the
// table for screen readers.
std::string draw(const HtmlTable& table);

// The page's style sheet.

// CSS without '<' and '&', so that it may stand in well-formed XML.
std::string_view report_style();

// The page's sections as HTML. An empty text means that the report has nothing for a section.

std::string verdict_section(const ReportData& data, const Verdict& verdict);
std::string method_section(const ReportData& data, const Verdict& verdict);
std::string divergence_section(const ReportData& data);
std::string needle_section(const ReportData& data, const Verdict& verdict);
std::string layer_section(const ReportData& data);
std::string key_row_section(const ReportData& data);
std::string bundle_section(const ReportData& data);
std::string memory_section(const ReportData& data, const Verdict& verdict);
std::string variant_section(const ReportData& data, const Verdict& verdict);
std::string fact_section(const ReportData& data);

// A strict UTF-8 reader, one code point at a time, and what each may become.

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct CodePoint {
  char32_t value = 0;
  size_t bytes = 1;
  bool valid = false;
};

CodePoint decode(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return {first, 1, true};
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || at + length > text.size()) return {};
  char32_t value = first & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(at + i) & 0x3F);
  }
  constexpr char32_t kFirstOfLength[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < kFirstOfLength[length] || value > 0x10FFFF || surrogate) return {};
  return {value, length, true};
}

// Not allowed in XML, or able to make a page show something other than what it says.
bool unwelcome(char32_t c) {
  const bool control = (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7F && c < 0xA0);
  const bool direction = (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069) ||
                         c == 0x200E || c == 0x200F || c == 0x061C;
  return control || direction || c == 0xFFFE || c == 0xFFFF;
}

}  // namespace

std::string without_controls(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = decode(text, i);
    out += !c.valid || unwelcome(c.value) ? kReplacement : text.substr(i, c.bytes);
    i += c.bytes;
  }
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : without_controls(text)) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string shortened(const std::string& text, size_t characters) {
  std::string kept;
  size_t starts = 0;
  for (size_t i = text.size(); i > 0; --i) {
    const bool continues = (static_cast<unsigned char>(text[i - 1]) & 0xC0) == 0x80;
    if (continues) continue;
    if (++starts == characters) kept = text.substr(i - 1);
  }
  return starts <= characters ? text : "…" + kept.substr(decode(kept, 0).bytes);
}

// HTML first, as Markdown lets it through, then Markdown's own characters.

std::string escape_markdown(std::string_view text) {
  std::string out;
  for (const char c : without_controls(text)) {
    if (std::string_view("&<>").find(c) != std::string_view::npos) {
      out += escape_html(std::string_view(&c, 1));
      continue;
    }
    if (std::string_view("\\`*_[]|#!~").find(c) != std::string_view::npos) out += '\\';
    out += c == '\n' || c == '\t' ? ' ' : c;
  }
  return out;
}

std::string markdown_code(std::string_view text) {
  std::string out;
  for (const char c : without_controls(text)) {
    out += std::string_view("\n\t`|").find(c) != std::string_view::npos ? '?' : c;
  }
  return "`" + out + "`";
}

// One function: rows to markup.

std::string draw(const HtmlTable& table) {
  std::string html =
      fmt::format("<table class=\"stack{}\" role=\"table\">\n<caption>{}</caption>\n",
                  table.words ? " words" : "", table.caption);
  html += "<thead role=\"rowgroup\"><tr role=\"row\">";
  for (const std::string& name : table.head) {
    html += fmt::format("<th scope=\"col\" role=\"columnheader\">{}</th>", escape_html(name));
  }
  html += "</tr></thead>\n<tbody role=\"rowgroup\">\n";
  for (size_t r = 0; r < table.rows.size(); ++r) {
    const bool marked = std::ranges::find(table.marked, r) != table.marked.end();
    html += fmt::format("<tr role=\"row\"{}>", marked ? " class=\"judged\"" : "");
    for (size_t c = 0; c < table.rows[r].size(); ++c) {
      html += c == 0 ? fmt::format("<th scope=\"row\" role=\"rowheader\">{}</th>", table.rows[r][c])
                     : fmt::format("<td role=\"cell\" data-label=\"{}\">{}</td>",
                                   escape_html(table.head[c]), table.rows[r][c]);
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table>\n";
}

// Colours for light, dark and paper; type; tables that become cards on a narrow screen.

std::string_view report_style() {
  static constexpr std::string_view css = R"css(
:root{color-scheme:light dark;--paper:#fcfbf8;--ink:#1d2125;--soft:#575e66;--rule:#dedad1;--hair:#ebe8e1;
--wash:#f5f2eb;--good:#0b6b62;--care:#8a5a00;--bad:#a32c22;
--c0:#0b6b62;--c1:#b3471d;--c2:#3a5a9b;--c3:#806400;--c4:#8c3f7e;--c5:#56652b;--c6:#a03a50;--c7:#4b5157;--c8:#6a6f75;
--h0:#f4ece0;--h1:#dde8e1;--h2:#bad8cf;--h3:#8dc1b5;--h4:#2b7a70;--h5:#17665d;--h6:#084d46;--hl:#1d2125;--hd:#ffffff;
--r0:#b9aa7d;--r1:#8fae8b;--r2:#54968d;--r3:#2a6f80;--r4:#233f66}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15181b;--ink:#e7e6e2;--soft:#a5acb3;--rule:#3a4046;
--hair:#292e33;--wash:#1c2024;--good:#62cbbb;--care:#e3b04f;--bad:#f28b7d;
--c0:#62cbbb;--c1:#f19a70;--c2:#93b3f2;--c3:#d9ba52;--c4:#dc96cf;--c5:#abc06d;--c6:#f28fa1;--c7:#bfc5ca;--c8:#9aa1a8;
--h0:#2c2722;--h1:#23302e;--h2:#1e403b;--h3:#1b524b;--h4:#3b9f92;--h5:#5bbdae;--h6:#93dfd3;--hl:#e7e6e2;--hd:#07110f;
--r0:#75683f;--r1:#6f8c62;--r2:#5fae9f;--r3:#86c9d8;--r4:#cfe3ff}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:1.0625rem/1.6 "Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Charter,Georgia,"DejaVu Serif",serif}
main{max-width:62rem;margin:0 auto;padding:3.5rem 1.75rem 4rem}
h1,h2,h3{font-weight:600;line-height:1.2;letter-spacing:-.01em;text-wrap:balance}
h1{font-size:2.1rem;margin:.3rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.4rem;margin:0 0 .5rem}
p{margin:0 0 .9rem;max-width:42rem}
.ui,table,dl,figcaption,.kicker,.tiles,svg text,footer,.left-out{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
.kicker{font-size:.8rem;letter-spacing:.07em;text-transform:uppercase;color:var(--soft);margin:0}
.under{color:var(--soft);font-size:1rem;overflow-wrap:anywhere}
section{margin-top:3.25rem;padding-top:1.5rem;border-top:1px solid var(--rule)}
.lead{max-width:46rem}
.verdict{margin-top:2.25rem;padding:0 0 0 1.35rem;border:0;border-left:4px solid var(--soft)}
.verdict h2{font-size:1.65rem;margin-bottom:.7rem}
.verdict.close{border-color:var(--good)}.verdict.care{border-color:var(--care)}.verdict.lost{border-color:var(--bad)}
.stand{white-space:nowrap;font-weight:600}
.stand.close{color:var(--good)}.stand.care{color:var(--care)}.stand.lost{color:var(--bad)}.stand.unknown{color:var(--soft);font-weight:400}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1.5rem 0;margin:2.25rem 0 0;padding:1.35rem 0;border:solid var(--rule);border-width:1px 0}
.tiles div{padding:0 1.1rem;border-left:1px solid var(--hair)}
.tiles div:first-child{padding-left:0;border-left:0}
.tiles dt{font-size:.8rem;color:var(--soft);line-height:1.35}
.tiles dd{margin:.15rem 0 0;font-size:1.6rem;font-weight:600;letter-spacing:-.02em;line-height:1.2}
.tiles dd small{display:block;font-size:.8rem;font-weight:400;letter-spacing:0;color:var(--soft);margin-top:.3rem;line-height:1.4}
table{width:100%;border-collapse:collapse;font-size:.875rem;line-height:1.45;margin:1.25rem 0 0}
caption{text-align:left;color:var(--soft);padding:0 0 .6rem;font-size:.84rem;max-width:46rem}
th,td{text-align:right;padding:.55rem 0 .55rem 1.1rem;border-bottom:1px solid var(--hair);vertical-align:top;font-weight:400}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);border-bottom:1px solid var(--rule);vertical-align:bottom;font-size:.8rem;line-height:1.3}
tbody th{font-weight:600;overflow-wrap:anywhere;min-width:8rem}
tbody th small,td small{display:block;font-weight:400;color:var(--soft);font-size:.8rem}
tr.judged th,tr.judged td{background:var(--wash)}
tr.judged th{box-shadow:inset 3px 0 var(--good);padding-left:.7rem}
table.words td{text-align:left}
table.words th{text-align:left}
.iv{color:var(--soft);white-space:nowrap}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:2rem 3rem;margin-top:1.5rem;align-items:start}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--map)),1fr));gap:1.6rem 1.4rem;margin-top:1.5rem}
figure{margin:0;break-inside:avoid;min-width:0}
figcaption{font-size:.84rem;line-height:1.5;color:var(--soft);margin-top:.5rem}
figure h3{font:600 .95rem/1.35 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;letter-spacing:0;margin:0 0 .6rem;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--ink)}
svg .tick,svg .axis-title{fill:var(--soft);font-size:11.5px}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .value{font-size:11.5px}
svg .grid{stroke:var(--hair)}svg .axis{stroke:var(--soft)}svg .level{stroke:var(--soft);stroke-dasharray:2 3}
svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
svg .interval{stroke-width:1.6}
svg .m{stroke:var(--paper);stroke-width:1}
.line.s0{stroke:var(--c0);stroke-width:2.6}.line.s1{stroke:var(--c1);stroke-dasharray:7 3}.line.s2{stroke:var(--c2);stroke-dasharray:2 3}.line.s3{stroke:var(--c3);stroke-dasharray:9 3 2 3}
.line.s4{stroke:var(--c4)}.line.s5{stroke:var(--c5);stroke-dasharray:5 2}.line.s6{stroke:var(--c6);stroke-dasharray:1.5 2.5}.line.s7{stroke:var(--c7);stroke-dasharray:11 4}
.interval.s0,.dots.s0{stroke:var(--c0)}.interval.s1,.dots.s1{stroke:var(--c1)}.interval.s2,.dots.s2{stroke:var(--c2)}.interval.s3,.dots.s3{stroke:var(--c3)}.interval.s4,.dots.s4{stroke:var(--c4)}.interval.s5,.dots.s5{stroke:var(--c5)}.interval.s6,.dots.s6{stroke:var(--c6)}.interval.s7,.dots.s7{stroke:var(--c7)}.interval.s8,.dots.s8{stroke:var(--c8)}
.m.s0{fill:var(--c0)}.m.s1{fill:var(--c1)}.m.s2{fill:var(--c2)}.m.s3{fill:var(--c3)}.m.s4{fill:var(--c4)}.m.s5{fill:var(--c5)}.m.s6{fill:var(--c6)}.m.s7{fill:var(--c7)}.m.s8{fill:var(--c8)}
svg .t0{fill:var(--c0);font-weight:600}svg .t1{fill:var(--c1)}svg .t2{fill:var(--c2)}svg .t3{fill:var(--c3)}svg .t4{fill:var(--c4)}svg .t5{fill:var(--c5)}svg .t6{fill:var(--c6)}svg .t7{fill:var(--c7)}svg .t8{fill:var(--c8)}
.line.s8{stroke:var(--c8)}svg .line.thin{stroke-width:1.1}
svg .leader{stroke:var(--rule)}svg .dots{fill:none;stroke-width:3.4;stroke-linecap:round}
.line.r0{stroke:var(--r0)}.line.r1{stroke:var(--r1)}.line.r2{stroke:var(--r2)}.line.r3{stroke:var(--r3)}.line.r4{stroke:var(--r4)}
.line.r0,.line.r1,.line.r2,.line.r3,.line.r4{stroke-width:1.2}
.h0 rect{fill:var(--h0)}.h1 rect{fill:var(--h1)}.h2 rect{fill:var(--h2)}.h3 rect{fill:var(--h3)}.h4 rect{fill:var(--h4)}.h5 rect{fill:var(--h5)}.h6 rect{fill:var(--h6)}
path.h0{fill:var(--h0)}path.h1{fill:var(--h1)}path.h2{fill:var(--h2)}path.h3{fill:var(--h3)}path.h4{fill:var(--h4)}path.h5{fill:var(--h5)}path.h6{fill:var(--h6)}
svg .h0 text,svg .h1 text,svg .h2 text,svg .h3 text{fill:var(--hl)}svg .h4 text,svg .h5 text,svg .h6 text{fill:var(--hd)}
.ramps{white-space:nowrap}
.ramp{display:inline-block;width:1.6em;height:.35em;vertical-align:middle;margin:0 .1em}
.ramp.r0{background:var(--r0)}.ramp.r1{background:var(--r1)}.ramp.r2{background:var(--r2)}.ramp.r3{background:var(--r3)}.ramp.r4{background:var(--r4)}
ul{margin:.3rem 0 0;padding-left:1.15rem;max-width:46rem}
li{margin:.2rem 0}
.notes{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem 3rem;margin-top:2rem}
.notes h3{font-size:1.05rem;margin:0 0 .3rem}
.notes li,.left-out{font-size:.95rem}
dl.facts{display:grid;grid-template-columns:11rem minmax(0,1fr);gap:.45rem 1.25rem;font-size:.875rem;margin:1.1rem 0 0}
dl.facts dt{color:var(--soft)}
dl.facts dd{margin:0;overflow-wrap:anywhere}
dl.terms{display:grid;grid-template-columns:11rem minmax(0,1fr);gap:.6rem 1.25rem;font-size:.9rem;line-height:1.5;margin:1.1rem 0 0}
dl.terms dt{font-weight:600}dl.terms dd{margin:0;max-width:42rem}
pre{font:.82rem/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--wash);padding:.85rem 1rem;margin:1.1rem 0 0;white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.9em ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.turn{border-top:1px solid var(--hair);padding:.7rem 0}
.turn summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}.turn summary small{font-weight:400;color:var(--soft);font-size:.8rem}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem 3rem;margin-top:.6rem}
.pair h3{font-size:.9rem;color:var(--soft);margin:0 0 .2rem}
.pair p{margin:0;font-size:.95rem;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere}
footer{margin-top:3.25rem;padding-top:1rem;border-top:1px solid var(--rule);font-size:.8rem;color:var(--soft)}
@media (max-width:44rem){
main{padding:1.75rem 1rem 3rem}
h1{font-size:1.6rem}.verdict h2{font-size:1.35rem}.verdict{padding-left:1rem}
section{margin-top:2.5rem}
.figures,.notes,.pair{grid-template-columns:minmax(0,1fr);gap:2.25rem}.pair{gap:1rem}
.notes{gap:1.4rem}
.maps{grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--map)*.92),1fr));gap:1.4rem 1rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:1.3rem 0}
.tiles div{padding:0 .9rem}.tiles div:nth-child(odd){padding-left:0;border-left:0}
.tiles dd{font-size:1.35rem}
dl.facts,dl.terms{grid-template-columns:minmax(0,1fr);gap:.1rem}
dl.facts dd,dl.terms dd{margin-bottom:.7rem}
table.stack,table.stack tbody,table.stack caption{display:block}
table.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table.stack tr{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.5rem 1rem;padding:.85rem 0;border-bottom:1px solid var(--rule)}
table.stack th,table.stack td,table.stack tr.judged td{display:block;text-align:left;padding:0;border:0;background:none}
table.stack tbody th{grid-column:1/-1;font-size:.95rem}
table.stack td::before{content:attr(data-label);display:block;color:var(--soft);font-size:.75rem;line-height:1.35}
table.stack td:empty{display:none}
table.stack tr.judged th{box-shadow:none;padding:0;background:none}
table.stack tr.judged{background:var(--wash);box-shadow:inset 3px 0 var(--good);margin:0 -.6rem;padding:.85rem .6rem .85rem .9rem}
.iv{white-space:normal}
table.words tr{grid-template-columns:minmax(0,1fr)}
}
@media print{
:root{color-scheme:light}
body{background:#fff;font-size:10pt;line-height:1.45;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:none;padding:0}
h1{font-size:18pt}h2{font-size:13pt;break-after:avoid}.verdict h2{font-size:14pt}
section{margin-top:1.6rem;padding-top:.9rem}
p,ul{max-width:none}
tr,figure,.tiles,.verdict,.notes{break-inside:avoid}
.lead,caption,thead{break-after:avoid}
.tiles{grid-template-columns:repeat(auto-fit,minmax(6.5rem,1fr))}
table,dl.facts,dl.terms,pre,figcaption{font-size:8.5pt}
.figures{gap:1.2rem 2rem}
@page{margin:16mm 15mm}
}
)css";
  return css;
}

// Sections made of tables and figures.

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

std::string with_marked_interval(const std::string& text) {
  const size_t at = text.find('[');
  if (at == std::string::npos) return text;
  return text.substr(0, at) + "<span class=\"iv\">" + text.substr(at) + "</span>";
}

std::string interval_html(const Span95& span) {
  return with_marked_interval(escape_html(with_interval(span.mean, span.low, span.high)));
}

std::string increase_html(const MethodFigures& m) {
  if (m.reference) return "";
  const auto ratio = [](const Figure& x) { return x ? Figure(std::expm1(*x)) : Figure(); };
  return with_marked_interval(signed_percent(ratio(m.nll_increase.mean), ratio(m.nll_increase.low),
                                             ratio(m.nll_increase.high)));
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
  bool generated = false;
  for (const MethodFigures& m : data.methods) {
    if (!m.needles) continue;
    generated = generated || m.needles->generated;
    for (const auto& [kind, rate] : m.needles->kinds) kinds.insert(kind);
  }
  HtmlTable table{.caption = "Pass rate by kind of task.", .head = {"Method"}};
  for (const std::string& kind : kinds) table.head.push_back(kind);
  table.head.emplace_back("All");
  if (generated) table.head.emplace_back("Generated");
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
    if (generated) row.push_back(m.needles->generated ? rate_html(*m.needles->generated) : "–");
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
    const double mib = value / (1024 * 1024);
    return mib < 10 * 1024 ? figure(mib) + " MiB" : figure(mib / 1024) + " GiB";
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
      "clip:K/V other clipping, window:SINK/RECENT other BF16 windows, bits:K/V codes of other "
      "widths, common another project's codec with the windows of this run and every layer coded.";
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

// The order of the page, its head, and what it says about what is not there.

namespace {

// Nothing but this page's own style may act: a report quotes names that others chose.
constexpr const char* kPolicy = "default-src 'none'; style-src 'unsafe-inline'";

std::string head(const ReportData& data) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<meta name=\"color-scheme\" content=\"light dark\"/>\n"
      "<title>INT2 cache of {}</title>\n<style>{}</style>\n</head>\n",
      kPolicy, escape_html(data.model), report_style());
}

std::string masthead(const ReportData& data) {
  std::string under = data.has_bundle ? fmt::format("Bundle {}", data.bundle) : "Without a bundle";
  if (!data.device.empty()) under += fmt::format(" · measured on {}", data.device);
  if (!data.mode.empty()) under += fmt::format(" · mode {}", data.mode);
  return fmt::format(
      "<header>\n<p class=\"kicker\">OSCAR Toolkit · evaluation of a 2-bit KV cache</p>\n"
      "<h1>{}</h1>\n<p class=\"under\">{}</p>\n</header>\n",
      escape_html(data.model.empty() ? "Unnamed model" : data.model), escape_html(under));
}

// Before anything that could be taken for a result.
std::string partial_notice(const ReportData& data) {
  if (data.partial.empty()) return "";
  return fmt::format(
      "<section class=\"partial\">\n<h2>Partial</h2>\n<p class=\"lead\">The run was stopped; "
      "everything below is of what it had counted: {}.</p>\n</section>\n",
      escape_html(data.partial));
}

std::string terms() {
  return R"(<section>
<h2>How to read it</h2>
<dl class="terms">
<dt>Perplexity</dt><dd>exp of the mean negative log-likelihood of the text: how many tokens the model hesitates between. Lower is better.</dd>
<dt>KL divergence</dt><dd>Kullback-Leibler divergence of the predicted distribution from that of BF16, in nats per token. 0 means the same predictions.</dd>
<dt>Same top token</dt><dd>Share of tokens on which both put the same token first.</dd>
<dt>Bits per value</dt><dd>Of a cached number, with scales, zero points and the exact first and last tokens; it falls towards 2.25 as the context grows in the default format.</dd>
<dt>Intervals</dt><dd>95%. Means: from the spread between sequences or stretches of text. Increases: paired bootstrap. Pass rates: Wilson. Two methods whose intervals overlap are not told apart by this run.</dd>
</dl>
</section>
)";
}

}  // namespace

std::string render_html_report(const Json& report, const Answers* answers) {
  const ReportData data = read_report(report);
  if (answers != nullptr) require_answers_of(*answers, data.serving_sha256);
  const Verdict verdict = judge(data);
  std::string left_out;
  // A section, or a line that says why there is none.
  const auto or_reason = [&](const std::string& html, const char* name, const char* reason) {
    if (html.empty()) left_out += fmt::format("<li>{}: {}</li>\n", name, reason);
    return html;
  };
  std::string body = masthead(data) + partial_notice(data) + verdict_section(data, verdict) +
                     method_section(data, verdict);
  body += or_reason(divergence_section(data), "Divergence from BF16",
                    data.has_text ? "no method at 2 bits was compared."
                                  : "the run did not measure text (--tasks ppl).");
  body += or_reason(needle_section(data, verdict), "Needles in long prompts",
                    "the run had no needle tasks (--tasks niah).");
  if (answers != nullptr) body += answers_html(*answers);
  body += or_reason(layer_section(data), "Layer by layer",
                    "the report holds no errors of attention outputs.");
  body += key_row_section(data);
  body += or_reason(bundle_section(data), "Inside the bundle",
                    data.has_bundle ? "the report holds neither spectra nor channels of the bundle."
                                    : "the run had no bundle (--bundle).");
  if (data.has_bundle && data.channels.empty() && !data.spectra.empty()) {
    left_out += "<li>Outlier channels: the bundle carries no statistics.</li>\n";
  }
  body += or_reason(memory_section(data, verdict), "Memory", "no method at 2 bits was compared.");
  body += variant_section(data, verdict) + fact_section(data) + terms();
  if (!left_out.empty()) {
    body += fmt::format(
        "<section>\n<h2>Left out</h2>\n<ul class=\"left-out\">\n{}</ul>\n</section>\n", left_out);
  }
  return head(data) + "<body>\n<main>\n" + body +
         "<footer>Made from the JSON report of oscar-eval; equal reports give equal "
         "pages.</footer>\n"
         "</main>\n</body>\n</html>\n";
}

}  // namespace oscar
