// How much of the same work a test repeats where a tool makes all of it many times slower.
#pragma once

#include <cstdlib>

namespace oscar_test {

#ifdef __has_feature
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// Under ThreadSanitizer, and where OSCAR_TEST_SANITIZER is set: scripts/sanitize_kernels.sh sets it
// for racecheck.
inline bool slowed() { return kThreadSanitizer || std::getenv("OSCAR_TEST_SANITIZER") != nullptr; }

// `all`, or `enough` where the test is slowed: of a size with which the test takes every path that
// it takes with `all`.
template <typename T>
T unless_slowed(T all, T enough) {
  return slowed() ? enough : all;
}

}  // namespace oscar_test
