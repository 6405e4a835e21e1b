// The page: sections, style, HTML.
#pragma once

#include <string>
#include <string_view>

#include "oscar/base/json.h"
#include "oscar/eval/report/answers.h"

namespace oscar {

// Text of unknown origin made safe for HTML and SVG.

// `text` with U+FFFD for bytes that are no UTF-8, for control characters but line breaks and tabs,
// and for marks that turn the writing direction.
std::string without_controls(std::string_view text);

// The same for element content and for attributes in double quotes: markup characters become
// entities.
std::string escape_html(std::string_view text);

// At most `characters` code points of `text` (unescaped): the start gives way to an ellipsis,
// because variants of a method differ at the end.
std::string shortened(const std::string& text, size_t characters);

// Text of unknown origin made safe for Markdown.

// `text` on one line, in tables too, without_controls: nothing in it acts as markup or HTML.
std::string escape_markdown(std::string_view text);

// The same inside backticks, where nothing can be escaped: what would end them becomes '?'.
std::string markdown_code(std::string_view text);

// The HTML page of an evaluation: one file without scripts, fonts or anything from the network.

// A page made of nothing but `report` (lib/oscar/eval/SCHEMA.md) and, where there are some, of
// `answers` with the bundle of the report: equal reports and answers give equal bytes.
// It is well-formed XML, holds its style and its pictures inline, and forbids itself scripts and
// requests by a content security policy. Texts of the report are escaped; sections whose data are
// missing are left out and named with the reason. Throws Error when `report` is not one,
// or `answers` are of another bundle.
std::string render_html_report(const Json& report, const Answers* answers = nullptr);

}  // namespace oscar
