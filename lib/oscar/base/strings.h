// Text and numbers: printed and parsed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace oscar {

// How numbers are written for people: one way for each kind of figure.

// A figure: absent, or a double that may be not finite (JSON has null for it).
using Figure = std::optional<double>;

bool is_finite(const Figure& x);

// "–" for an absent figure and "not finite" for NaN and infinities, in all of these.
std::string figure(const Figure& x, int digits = 3);  // significant digits: 8.94, 6,950, 2.1×10⁻⁷
std::string percent(const Figure& x, int decimals = 1);  // 0.954 -> 95.4%
std::string signed_percent(const Figure& x);             // 0.009 -> +0.9%; 799 -> 800×
// "+0.9% [+0.1%, +1.7%]", all three in the unit of the largest; without a finite interval the mean.
std::string signed_percent(const Figure& mean, const Figure& low, const Figure& high);
std::string count(const Figure& x);         // 121,066
std::string token_length(const Figure& x);  // 131072 -> 128K, 3968 -> 3,968
std::string times(const Figure& x);         // 11.2 -> 11 times, 2.34 -> 2.3 times

// 64 -> 64th, 101 -> 101st; n >= 0.
std::string ordinal(int64_t n);

// Mean and 95% interval with the digits that the interval's width warrants: "0.0090 [0.0084,
// 0.0096]"; without the interval when an end is absent or not finite.
std::string with_interval(const Figure& mean, const Figure& low, const Figure& high);

// Counts as people write them.

// "64K" (K is 1024, M and G likewise), "1.5M", "1e4", "100" as a whole number; nullopt for anything
// else, and for more than an int64 holds.
std::optional<int64_t> parse_count(const std::string& text);

// Slips of known words.

// The word of `known` that `word` is most likely a slip of: a few letters off, or its beginning.
// "" when none is near.
std::string nearest_word(const std::string& word, const std::vector<std::string>& known);

// Remarks about layers, and lines of 80 columns.

// Remarks of the form "layer N<words>", those that say the same but for numbers joined into one:
// "layers 0 to 35<words>", or, where their numbers differ, with one of them as the example. Others
// stay as they are. In the order in which each was said first.
std::vector<std::string> joined_by_layer(const std::vector<std::string>& remarks);

// Appends "label       words", the words behind `indent` columns and wrapped below themselves.
void add_line(std::string& text, const std::string& label, const std::string& words,
              size_t indent = 12);

}  // namespace oscar
