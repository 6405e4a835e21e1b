// One function: rows to markup.
#include "oscar/report/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "oscar/report/html.h"

namespace oscar {

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

}  // namespace oscar
