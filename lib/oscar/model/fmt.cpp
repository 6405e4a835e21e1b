// The fmt whose headers torch brings along, compiled once. They lie ahead of the system's in the
// include path of everything that uses torch; header-only, formatting took half of the time and
// most of the object of each source that prints one number.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE

namespace detail {

// What fmt/format.h declares `extern template`; the rest are plain functions.
template FMT_API auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;

}  // namespace detail
FMT_END_NAMESPACE
