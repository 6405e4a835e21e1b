// The page's sections as HTML. An empty text means that the report has nothing for a section.
#pragma once

#include <string>

#include "oscar/report/report_data.h"
#include "oscar/report/verdict.h"

namespace oscar {

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

}  // namespace oscar
