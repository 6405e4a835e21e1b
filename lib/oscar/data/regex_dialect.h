// Oniguruma patterns, as tokenizer.json holds them, rewritten for PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

// The same language for PCRE2 in UTF mode with Unicode properties. Only constructs that mean the
// same in both (or can be spelled out, as \s is) pass; any other throws Error naming the construct
// and `where`. Case-insensitive groups hold only letters and signs, because multi-letter case
// folding differs.
std::string pattern_for_pcre2(std::string_view pattern, const std::string& where);

}  // namespace oscar
