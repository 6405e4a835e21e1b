// Sums of counts that come from files, where each alone may be as large as its type allows.
#pragma once

#include <cstdint>
#include <string>

#include "oscar/base/error.h"

namespace oscar {

// a + b; throws Error, naming `where`, when that is more than an int64 holds.
inline int64_t add_counts(int64_t a, int64_t b, const std::string& where) {
  int64_t sum = 0;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  throw Error({.what = "counts are too large to be added",
               .where = where,
               .found = std::to_string(a) + " + " + std::to_string(b),
               .hint = "a file is damaged or hostile; make it again"});
}

}  // namespace oscar
