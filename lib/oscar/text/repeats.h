// How much of a text repeats itself.
#pragma once

#include <cstdint>
#include <vector>

namespace oscar {

inline constexpr int kRepeatedTokens = 64;

// Share of the stretches of kRepeatedTokens tokens, within sequences, that an earlier one equals.
// Of more than a million tokens it is estimated from stretches sampled by their hash, so that
// copies count wherever they begin.
double repeated_share(const std::vector<std::vector<int32_t>>& sequences);

// Shares of an evaluation's text above this are cautioned of. Copies say nothing new: with n of N
// pieces left, intervals are too narrow by sqrt(N / n), which is an eighth at this share.
inline constexpr double kNotableRepeats = 0.2;

}  // namespace oscar
