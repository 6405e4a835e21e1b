// Mapped files that are cut short while they are in use: reading behind their new end raises
// SIGBUS.
#pragma once

#include <cstddef>

namespace oscar {

// From now on SIGBUS in a named map ends the program with the name of the file and exit code 1, in
// place of a crash without a word.
void install_cut_file_handler();

// `path` must live until the map is forgotten. Of more than 1024 maps some have no name.
void name_map(const std::byte* begin, size_t bytes, const char* path);
void forget_map(const std::byte* begin);

}  // namespace oscar
