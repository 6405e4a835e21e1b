// The page's style sheet.
#pragma once

#include <string_view>

namespace oscar {

// CSS without '<' and '&', so that it may stand in well-formed XML.
std::string_view report_style();

}  // namespace oscar
