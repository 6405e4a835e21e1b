// What a wrong command line is told: unknown words first, with the nearest known one.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace oscar::app {

// The word of `known` that `word` is most likely a slip of: a few letters off, or its beginning.
// "" when none is near.
std::string nearest_word(const std::string& word, const std::vector<std::string>& known);

// What to say of the first word of a failed command line that the program does not know; "" when
// it knows them all. Call it after program.parse() has thrown: a word that is missing is often one
// that stands behind a misspelt option.
std::string unknown_word(const CLI::App& program);

}  // namespace oscar::app
