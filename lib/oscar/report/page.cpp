// The order of the page, its head, and what it says about what is not there.
#include <fmt/format.h>

#include "oscar/report/html.h"
#include "oscar/report/html_report.h"
#include "oscar/report/sections.h"
#include "oscar/report/style.h"

namespace oscar {
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
