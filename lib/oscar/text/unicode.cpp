// Unicode as tokenizers use it.
#include "oscar/text/unicode.h"

#include <fmt/format.h>
#include <utf8proc.h>
#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {

// UTF-8 and what Unicode says about characters. The one owner of utf8proc.

namespace {

struct Sequence {
  size_t length;  // of the whole sequence, or of its longest well-formed beginning (at least 1)
  bool valid;
};

// Table 3-7 of the Unicode standard: the second byte's range depends on the first.
Sequence sequence_at(std::string_view text, size_t offset) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[offset + i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {1, true};
  size_t length = 0;
  uint8_t low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false};
  }
  for (size_t i = 1; i < length; ++i) {
    if (offset + i >= text.size() || byte(i) < low || byte(i) > high) return {i, false};
    low = 0x80;
    high = 0xBF;
  }
  return {length, true};
}

// Text below U+0300 is its own form C (no lead byte from 0xCC on), ASCII its own in every form.
bool is_trivially_normal(std::string_view text, NormalForm form) {
  const uint8_t limit = form == NormalForm::kNfc ? 0xCC : 0x80;
  return std::all_of(text.begin(), text.end(),
                     [=](char c) { return static_cast<uint8_t>(c) < limit; });
}

struct Range {
  utf8proc_int32_t first, last;
};

// The `tokenizers` library normalises with the tables of Unicode 9: marks assigned since then are
// starters to it, never sorted nor skipped by composition. Ids must be those the model was trained
// on, so they are starters here too. Found by comparing both on every character of Unicode 14
// (tests/parity/test_tokenizer.py does so again).
constexpr Range kMarksSinceUnicode9[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
    {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
    {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
    {0x10EAB, 0x10EAC}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
    {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x1193D, 0x1193E},
    {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47},
    {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
    {0x16FF0, 0x16FF1}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}};

// Characters with a compatibility decomposition since then (same comparison, same test).
constexpr Range kCompatibilitySinceUnicode9[] = {{0x32FF, 0x32FF},   {0xA7F2, 0xA7F4},
                                                 {0xAB69, 0xAB69},   {0x10781, 0x107BA},
                                                 {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9}};

// Punctuation since Unicode 8, which the library's table does not have (same again).
constexpr Range kPunctuationSinceUnicode8[] = {
    {0x61D, 0x61D},     {0x9FD, 0x9FD},     {0xA76, 0xA76},     {0xC77, 0xC77},
    {0xC84, 0xC84},     {0x1B7D, 0x1B7E},   {0x2E43, 0x2E4F},   {0x2E52, 0x2E5D},
    {0x10EAD, 0x10EAD}, {0x10F55, 0x10F59}, {0x10F86, 0x10F89}, {0x1144B, 0x1144F},
    {0x1145A, 0x1145B}, {0x1145D, 0x1145D}, {0x11660, 0x1166C}, {0x116B9, 0x116B9},
    {0x1183B, 0x1183B}, {0x11944, 0x11946}, {0x119E2, 0x119E2}, {0x11A3F, 0x11A46},
    {0x11A9A, 0x11A9C}, {0x11A9E, 0x11AA2}, {0x11C41, 0x11C45}, {0x11C70, 0x11C71},
    {0x11EF7, 0x11EF8}, {0x11FFF, 0x11FFF}, {0x12FF1, 0x12FF2}, {0x16E97, 0x16E9A},
    {0x16FE2, 0x16FE2}, {0x1E95E, 0x1E95F}};
// Punctuation then, a symbol and a mark now.
constexpr Range kPunctuationOfUnicode8[] = {{0x166D, 0x166D}, {0x111C9, 0x111C9}};

template <size_t kSize>
bool is_within(const Range (&ranges)[kSize], utf8proc_int32_t code_point) {
  const auto range =
      std::lower_bound(std::begin(ranges), std::end(ranges), code_point,
                       [](const Range& r, utf8proc_int32_t c) { return r.last < c; });
  return range != std::end(ranges) && code_point >= range->first;
}

bool is_mark_since_unicode_9(utf8proc_int32_t code_point) {
  return is_within(kMarksSinceUnicode9, code_point);
}

// U+11935 U+11930 became U+11938 in Unicode 13: not composed (nor decomposed) by older tables.
constexpr utf8proc_int32_t kNewComposite = 0x11938, kNewCompositeEnd = 0x11930;

// Code points that nothing before them composes with, though utf8proc might.
bool ends_composition(utf8proc_int32_t code_point) {
  return code_point == kNewCompositeEnd || is_mark_since_unicode_9(code_point);
}

int combining_class(utf8proc_int32_t code_point) {
  const int known = utf8proc_get_property(code_point)->combining_class;
  return known != 0 && is_mark_since_unicode_9(code_point) ? 0 : known;
}

void append_decomposition(char32_t character, bool compatibility,
                          std::vector<utf8proc_int32_t>& out) {
  constexpr int kMaxParts = 18;  // of U+FDFA
  const auto code_point = static_cast<utf8proc_int32_t>(character);
  if (code_point == kNewComposite) return out.push_back(kNewComposite);
  if (is_within(kCompatibilitySinceUnicode9, code_point)) compatibility = false;
  utf8proc_int32_t parts[kMaxParts];
  int boundary = 0;
  const int kind = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE | (compatibility ? UTF8PROC_COMPAT : 0);
  const auto count = utf8proc_decompose_char(code_point, parts, kMaxParts,
                                             static_cast<utf8proc_option_t>(kind), &boundary);
  if (count < 0 || count > kMaxParts) {
    throw Error({.what = "Unicode normalisation failed",
                 .where = fmt::format("U+{:04X}", static_cast<uint32_t>(character))});
  }
  out.insert(out.end(), parts, parts + count);
}

// Canonical ordering. utf8proc's own sorts by insertion, quadratic in a long run of marks.
void order_marks(std::vector<utf8proc_int32_t>& code_points) {
  for (auto begin = code_points.begin(); begin != code_points.end();) {
    if (combining_class(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(begin, code_points.end(),
                                  [](utf8proc_int32_t c) { return combining_class(c) == 0; });
    std::stable_sort(begin, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    begin = end;
  }
}

void append_composed(utf8proc_int32_t* code_points, std::ptrdiff_t size, std::string& out) {
  const auto count =
      utf8proc_normalize_utf32(code_points, static_cast<utf8proc_ssize_t>(size),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  if (count < 0) throw Error({.what = "Unicode normalisation failed"});
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    append_code_point(static_cast<char32_t>(code_points[i]), out);
  }
}

}  // namespace

size_t first_invalid_utf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    uint64_t eight = 0;
    if (offset + 8 <= text.size()) {
      std::memcpy(&eight, text.data() + offset, 8);
      if ((eight & 0x8080808080808080ULL) == 0) {
        offset += 8;
        continue;
      }
    }
    const Sequence sequence = sequence_at(text, offset);
    if (!sequence.valid) return offset;
    offset += sequence.length;
  }
  return kAllValid;
}

void require_valid_utf8(std::string_view text, const std::string& where) {
  const size_t offset = first_invalid_utf8(text);
  if (offset == kAllValid) return;
  throw Error({.what = "text is not valid UTF-8",
               .where = fmt::format("{}, byte {}", where, offset),
               .found = fmt::format("byte 0x{:02x}", static_cast<uint8_t>(text[offset])),
               .hint = "convert the text to UTF-8 first, for example with iconv"});
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t offset = 0; offset < bytes.size();) {
    const Sequence sequence = sequence_at(bytes, offset);
    if (sequence.valid) {
      text.append(bytes.substr(offset, sequence.length));
    } else {
      text += "\xEF\xBF\xBD";
    }
    offset += sequence.length;
  }
  return text;
}

char32_t next_code_point(std::string_view text, size_t& offset) {
  const auto lead = static_cast<uint8_t>(text[offset++]);
  if (lead < 0x80) return lead;
  const int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  char32_t code_point = lead & (0x3F >> more);
  for (int i = 0; i < more; ++i) {
    code_point = (code_point << 6) | (static_cast<uint8_t>(text[offset++]) & 0x3F);
  }
  return code_point;
}

void append_code_point(char32_t code_point, std::string& text) {
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
    return;
  }
  const int more = code_point < 0x800 ? 1 : code_point < 0x10000 ? 2 : 3;
  constexpr uint8_t kLead[] = {0, 0xC0, 0xE0, 0xF0};
  text += static_cast<char>(kLead[more] | (code_point >> (6 * more)));
  for (int i = more - 1; i >= 0; --i) {
    text += static_cast<char>(0x80 | ((code_point >> (6 * i)) & 0x3F));
  }
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t previous_begin(std::string_view text, size_t offset) {
  do {
    --offset;
  } while ((static_cast<uint8_t>(text[offset]) & 0xC0) == 0x80);
  return offset;
}

size_t white_space_begin(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t begin = previous_begin(text, end);
    size_t offset = begin;
    if (!is_white_space(next_code_point(text, offset))) break;
    end = begin;
  }
  return end;
}

size_t white_space_end(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    size_t offset = begin;
    if (!is_white_space(next_code_point(text, offset))) break;
    begin = offset;
  }
  return begin;
}

bool is_number(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9';
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(char32_t c) {
  if (c < 0x80) return c < 0x7F && c > ' ' && std::isalnum(static_cast<int>(c)) == 0;
  const auto code_point = static_cast<utf8proc_int32_t>(c);
  if (is_within(kPunctuationOfUnicode8, code_point)) return true;
  const auto category = utf8proc_category(code_point);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO &&
         !is_within(kPunctuationSinceUnicode8, code_point);
}

std::string lowercase(std::string_view text) {
  constexpr char32_t kCapitalIWithDot = 0x130;  // the one whose lower case is two code points
  std::string lower;
  lower.reserve(text.size());
  for (size_t offset = 0; offset < text.size();) {
    const char32_t c = next_code_point(text, offset);
    if (c < 0x80) {
      lower += static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    } else if (c == kCapitalIWithDot) {
      lower += "i\u0307";
    } else {
      append_code_point(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))),
                        lower);
    }
  }
  return lower;
}

std::string normalize_unicode(std::string_view text, NormalForm form) {
  if (is_trivially_normal(text, form)) return std::string(text);
  const bool compatibility = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  std::vector<utf8proc_int32_t> code_points;
  code_points.reserve(text.size());
  for (size_t offset = 0; offset < text.size();) {
    append_decomposition(next_code_point(text, offset), compatibility, code_points);
  }
  order_marks(code_points);
  std::string normal;
  normal.reserve(text.size());
  if (form == NormalForm::kNfd || form == NormalForm::kNfkd) {
    for (const auto c : code_points) append_code_point(static_cast<char32_t>(c), normal);
    return normal;
  }
  // In parts, because utf8proc would compose across what ends composition here.
  for (auto begin = code_points.begin(); begin != code_points.end();) {
    const auto end = std::find_if(begin + 1, code_points.end(), ends_composition);
    append_composed(&*begin, end - begin, normal);
    begin = end;
  }
  return normal;
}

}  // namespace oscar
