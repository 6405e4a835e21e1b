// Parsing of CORPUS arguments: paths, weights and self:N.
#include <cmath>
#include <cstdlib>

#include "oscar/base/parse_count.h"
#include "oscar/base/usage_error.h"
#include "oscar/data/corpus.h"

namespace oscar {
namespace {

constexpr const char* kSyntax = "PATH[:WEIGHT][,PATH[:WEIGHT]...], or self:N alone";

[[noreturn]] void malformed(const std::string& what, const std::string& part) {
  throw UsageError({.what = what, .where = "CORPUS '" + part + "'", .expected = kSyntax});
}

double parse_weight(const std::string& text, const std::string& part) {
  char* end = nullptr;
  const double weight = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(weight) || weight <= 0) {
    malformed("corpus weight '" + text + "' is not a positive number", part);
  }
  return weight;
}

CorpusPart parse_part(const std::string& text, const std::string& argument) {
  if (text.empty()) malformed("empty part of a corpus argument", argument);
  CorpusPart part;
  std::string rest = text;
  const bool is_self = text.rfind("self:", 0) == 0;
  if (is_self) rest = text.substr(5);
  const size_t colon = rest.rfind(':');
  const size_t slash = rest.rfind('/');
  if (colon != std::string::npos && (slash == std::string::npos || colon > slash)) {
    part.weight = parse_weight(rest.substr(colon + 1), text);
    part.has_weight = true;
    rest.resize(colon);
  }
  if (!is_self) {
    if (rest.empty()) malformed("empty part of a corpus argument", argument);
    part.path = rest;
    return part;
  }
  constexpr int64_t kMost = int64_t{1} << 40;
  part.self_tokens = parse_count(rest).value_or(0);
  if (part.self_tokens <= 0 || part.self_tokens > kMost) {
    malformed("self:N needs a positive number of tokens", text);
  }
  return part;
}

}  // namespace

std::vector<CorpusPart> parse_corpus_argument(const std::string& argument) {
  std::vector<CorpusPart> parts;
  for (size_t begin = 0; begin <= argument.size();) {
    const size_t comma = std::min(argument.find(',', begin), argument.size());
    parts.push_back(parse_part(argument.substr(begin, comma - begin), argument));
    begin = comma + 1;
  }
  for (const CorpusPart& part : parts) {
    if (part.has_weight != parts.front().has_weight) {
      malformed("give every part of a corpus a weight, or none", argument);
    }
  }
  return parts;
}

}  // namespace oscar
