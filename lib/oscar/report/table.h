// Tables with full header semantics that turn into cards on a narrow screen.
#pragma once

#include <string>
#include <vector>

namespace oscar {

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

}  // namespace oscar
