// Counts as people write them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace oscar {

// "64K" (K is 1024, M and G likewise), "1.5M", "1e4", "100" as a whole number; nullopt for anything
// else, and for more than an int64 holds.
std::optional<int64_t> parse_count(const std::string& text);

}  // namespace oscar
