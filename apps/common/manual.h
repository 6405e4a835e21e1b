// Man page and completion of a program, made from its options.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace oscar::app {

// In roff, section 1. `version` stands in its footer.
std::string man_page(const CLI::App& program, const std::string& version);

// Completes commands, options and the values of those that have a fixed set; files elsewhere.
std::string bash_completion(const CLI::App& program);

}  // namespace oscar::app
