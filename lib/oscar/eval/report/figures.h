// The figures of the page.
#pragma once

#include <string>
#include <vector>

#include "oscar/eval/report/report_data.h"

namespace oscar {

// The page's figures, each from one part of the report.

// A method and the style of its lines: 0 for the judged one.
struct Charted {
  const MethodFigures* method = nullptr;
  int style = 0;
};

// INT2 methods that are drawn: no variants, at most kSeriesStyles of them, the judged one always.
std::vector<Charted> charted_methods(const ReportData& data);

// HTML of one <figure>, or "" when the report has nothing to draw.
std::string divergence_figure(const ReportData& data);
std::string bits_figure(const ReportData& data);
std::string percentile_figure(const ReportData& data);
std::string position_figure(const ReportData& data);
std::string output_error_figure(const ReportData& data);
std::string head_error_figure(const ReportData& data);       // of the judged method
std::string sensitivity_figure(const ReportData& data);      // of variants NAME@layer:N
std::string key_row_figure(const ReportData& data);          // as the model has it
std::string transformed_row_figure(const ReportData& data);  // the same of the judged method
std::string spectrum_figure(const ReportData& data, bool keys);
std::string channel_profile_figure(const ReportData& data);
std::string channel_peak_figure(const ReportData& data);
// Tokens that bits per value are quoted for: of the longest text that was measured, as divergence
// is; without a text of the longest prompt.
double quoted_length(const ReportData& data);
// Tokens that memory is quoted for: all that the model serves, 128K when the report does not say.
double model_length(const ReportData& data);
// GiB of a request, and requests that fit, against context, for INT2 as `m` has it, FP8 and BF16.
std::string request_memory_figure(const ReportData& data, const MethodFigures& m);
std::string request_count_figure(const ReportData& data, const MethodFigures& m);
// One small map per method, BF16 first.
std::vector<std::string> needle_figures(const ReportData& data);

}  // namespace oscar
