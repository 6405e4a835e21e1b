// UTF-8 at its borders, and normalisation where tables of different age disagree.
#include "oscar/text/unicode.h"

#include <gtest/gtest.h>

#include "oscar/text/regex.h"

namespace {

using namespace oscar;

TEST(Utf8, FindsTheFirstIllFormedByte) {
  EXPECT_EQ(first_invalid_utf8(""), kAllValid);
  EXPECT_EQ(first_invalid_utf8("\x7f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff"), kAllValid);
  EXPECT_EQ(first_invalid_utf8("a\x80"), 1u);
  EXPECT_EQ(first_invalid_utf8("\xc1\xbf"), 0u);             // overlong
  EXPECT_EQ(first_invalid_utf8("\xe0\x9f\xbf"), 0u);         // overlong
  EXPECT_EQ(first_invalid_utf8("\xed\xa0\x80"), 0u);         // surrogate
  EXPECT_EQ(first_invalid_utf8("\xf4\x90\x80\x80"), 0u);     // above U+10FFFF
  EXPECT_EQ(first_invalid_utf8("\xf0\x8f\xbf\xbf"), 0u);     // overlong
  EXPECT_EQ(first_invalid_utf8("0123456789\xe2\x82"), 10u);  // cut off
}

TEST(Utf8, ReplacesEachMaximalIllFormedPart) {
  // The example of the Unicode standard, table 3-11.
  EXPECT_EQ(replace_invalid_utf8("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFDA");
}

TEST(Utf8, CodePointsRoundTrip) {
  for (const char32_t c : {0x0u, 0x7Fu, 0x80u, 0x7FFu, 0x800u, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
    std::string text;
    append_code_point(c, text);
    size_t offset = 0;
    EXPECT_EQ(next_code_point(text, offset), c);
    EXPECT_EQ(offset, text.size());
  }
}

std::string normalize_nfc(std::string_view text) {
  return normalize_unicode(text, NormalForm::kNfc);
}

TEST(Nfc, ComposesOrdersAndExcludes) {
  EXPECT_EQ(normalize_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(normalize_nfc("a\u0323\u0302"), "\u1ead");
  EXPECT_EQ(normalize_nfc("a\u0302\u0323"), "\u1ead");
  EXPECT_EQ(normalize_nfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(normalize_nfc("\u0958"), "\u0915\u093c");  // composition exclusion
  EXPECT_EQ(normalize_nfc("\u212b"), "\u00c5");
  EXPECT_EQ(normalize_nfc(std::string_view("a\0b\u0301", 5)), std::string_view("a\0b\u0301", 5));
}

TEST(Nfc, LeavesMarksNewerThanUnicode9WhereTheyStand) {
  EXPECT_EQ(normalize_nfc("a\u1df6\u0316"), "a\u1df6\u0316");
  EXPECT_EQ(normalize_nfc("a\u0c3c\u0301"), "a\u0c3c\u0301");
  EXPECT_EQ(normalize_nfc("\U00011935\U00011930"), "\U00011935\U00011930");
  EXPECT_EQ(normalize_nfc("\U00011938"), "\U00011938");
}

TEST(Nfc, LongRunsOfMarksAreNotQuadratic) {
  std::string text = "a", sorted = "a";
  for (int i = 0; i < 200000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0316";
  const std::string normal = normalize_nfc(text);
  EXPECT_EQ(normal.size(), 2u + 2u * (200000u - 1u));  // one acute joins the letter
}

TEST(NormalForms, DifferByCompositionAndCompatibility) {
  const std::string text = "\u00e9\ufb01\u2460";  // e with acute, the ligature fi, 1 in a circle
  EXPECT_EQ(normalize_unicode(text, NormalForm::kNfc), text);
  EXPECT_EQ(normalize_unicode(text, NormalForm::kNfd), "e\u0301\ufb01\u2460");
  EXPECT_EQ(normalize_unicode(text, NormalForm::kNfkc), "\u00e9fi1");
  EXPECT_EQ(normalize_unicode(text, NormalForm::kNfkd), "e\u0301fi1");
  EXPECT_EQ(normalize_unicode("\ufdfa", NormalForm::kNfkd).size(), 33u);  // the longest of all
  EXPECT_EQ(normalize_unicode("\u32ff", NormalForm::kNfkc), "\u32ff");    // newer than Unicode 9
}

TEST(Properties, AreThoseOfTheLibrarysTables) {
  for (const uint32_t c : {0x30u, 0x669u, 0xBDu, 0x2167u, 0x1D7D8u}) EXPECT_TRUE(is_number(c)) << c;
  for (const uint32_t c : {0x0u, 0x61u, 0x20u, 0x2Bu, 0x4E00u}) EXPECT_FALSE(is_number(c)) << c;
  for (const uint32_t c : {0x21u, 0x2Bu, 0x7Eu, 0x2014u, 0x300Cu, 0x166Du, 0x111C9u}) {
    EXPECT_TRUE(is_punctuation(c)) << c;
  }
  // Among others a symbol, a control, and punctuation that is newer than Unicode 8.
  for (const uint32_t c : {0x0u, 0x61u, 0x31u, 0x20u, 0x20ACu, 0x7Fu, 0x2E43u}) {
    EXPECT_FALSE(is_punctuation(c)) << c;
  }
}

TEST(Properties, LowerCaseIsOfEachCodePointAlone) {
  EXPECT_EQ(lowercase("ABC\u00c4\u0130\u03a3 \u0391\u03a3"), "abc\u00e4i\u0307\u03c3 \u03b1\u03c3");
}

TEST(Dialect, WhiteSpaceIsUnicodesAndNotPcre2s) {
  const Regex space(pattern_for_pcre2("\\s", "test"), "test");
  const Regex not_space(pattern_for_pcre2("[^\\s]", "test"), "test");
  const Regex negated(pattern_for_pcre2("\\S", "test"), "test");
  for (char32_t c = 0; c < 0x3100; ++c) {
    std::string text;
    append_code_point(c, text);
    ASSERT_EQ(space.find(text, 0).has_value(), is_white_space(c)) << static_cast<uint32_t>(c);
    ASSERT_EQ(not_space.find(text, 0).has_value(), !is_white_space(c)) << static_cast<uint32_t>(c);
    ASSERT_EQ(negated.find(text, 0).has_value(), !is_white_space(c)) << static_cast<uint32_t>(c);
  }
  EXPECT_FALSE(space.find("\u180e", 0));
}

TEST(Dialect, ADollarIsTheEndOfALine) {
  const Regex regex(pattern_for_pcre2("\\s+$", "test"), "test");
  const auto first = regex.find("a  \nb \n ", 0);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->begin, 1u);
  EXPECT_EQ(first->end, 3u);
  const auto last = regex.find("a  \nb \n ", 4);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->begin, 5u);
  EXPECT_EQ(last->end, 8u);
  EXPECT_FALSE(regex.find(" a", 0));
}

TEST(Dialect, CaselessGroupsMatchBothCases) {
  const Regex regex(pattern_for_pcre2("(?i:'s|'ll)", "test"), "test");
  EXPECT_TRUE(regex.find("'S", 0));
  EXPECT_TRUE(regex.find("'lL", 0));
  EXPECT_TRUE(regex.find("'\u017f", 0));  // long s folds to s
  EXPECT_FALSE(regex.find("'x", 0));
}

}  // namespace
