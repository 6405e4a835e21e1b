// Remarks about layers, and lines of 80 columns.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace oscar {

// Remarks of the form "layer N<words>", those that say the same but for numbers joined into one:
// "layers 0 to 35<words>", or, where their numbers differ, with one of them as the example. Others
// stay as they are. In the order in which each was said first.
std::vector<std::string> joined_by_layer(const std::vector<std::string>& remarks);

// Appends "label       words", the words behind `indent` columns and wrapped below themselves.
void add_line(std::string& text, const std::string& label, const std::string& words,
              size_t indent = 12);

}  // namespace oscar
