#include "oscar/base/strings.h"

#include <gtest/gtest.h>
#include <cmath>

#include "oscar/base/error.h"

namespace oscar {

// How figures are written.

namespace {

TEST(Numbers, KeepThreeSignificantDigitsOverAllSizes) {
  EXPECT_EQ(figure(8.9431), "8.94");
  EXPECT_EQ(figure(0.00902), "0.00902");
  EXPECT_EQ(figure(6946.2), "6,946");
  EXPECT_EQ(figure(-0.5), "−0.500");
  EXPECT_EQ(figure(0.0), "0");
  EXPECT_EQ(figure(2.13e-7), "2.1×10⁻⁷");
  EXPECT_EQ(figure(-3e12, 1), "−3×10¹²");
}

TEST(Numbers, SayWhenAFigureIsAbsentOrNotFinite) {
  for (const auto& text : {figure(Figure()), percent(Figure()), count(Figure())})
    EXPECT_EQ(text, "–");
  for (const double x : {NAN, INFINITY, -INFINITY}) {
    for (const auto& text : {figure(x), percent(x), signed_percent(x), count(x), token_length(x),
                             times(x), with_interval(x, 0.0, 1.0)}) {
      EXPECT_EQ(text, "not finite");
    }
  }
}

TEST(Numbers, WriteSharesLengthsAndCounts) {
  EXPECT_EQ(percent(0.9541), "95.4%");
  EXPECT_EQ(percent(0.94, 0), "94%");
  EXPECT_EQ(signed_percent(0.0089), "+0.9%");
  EXPECT_EQ(signed_percent(-0.0002), "0.0%") << "no minus before a zero";
  EXPECT_EQ(signed_percent(779.0), "780×") << "and not 77,900%";
  EXPECT_EQ(signed_percent(0.009, 0.001, 0.017), "+0.9% [+0.1%, +1.7%]");
  EXPECT_EQ(signed_percent(9.5, 8.0, 12.0), "10.5× [9.00×, 13.0×]") << "one unit for all three";
  EXPECT_EQ(signed_percent(0.009, NAN, 0.017), "+0.9%");
  EXPECT_EQ(figure(1e-4, 1), "10⁻⁴");
  EXPECT_EQ(count(121066.0), "121,066");
  EXPECT_EQ(token_length(131072.0), "128K");
  EXPECT_EQ(token_length(3968.0), "3,968");
  EXPECT_EQ(times(11.23), "11 times");
  EXPECT_EQ(times(2.34), "2.3 times");
  EXPECT_EQ(ordinal(64) + ordinal(1) + ordinal(512) + ordinal(103) + ordinal(111) + ordinal(0),
            "64th1st512th103rd111th0th");
}

TEST(Numbers, RoundAnIntervalToWhatItsWidthWarrants) {
  EXPECT_EQ(with_interval(0.00902, 0.00843, 0.00961), "0.00902 [0.00843, 0.00961]");
  EXPECT_EQ(with_interval(6.661, 6.561, 6.761), "6.66 [6.56, 6.76]");
  EXPECT_EQ(with_interval(6946.0, 6500.0, 7400.0), "6,946 [6,500, 7,400]");
  EXPECT_EQ(with_interval(0.5, Figure(), Figure()), "0.500");
  EXPECT_EQ(with_interval(0.5, 0.5, NAN), "0.500");
}

}  // namespace
}  // namespace oscar

// Counts as people write them, and words that are none.

namespace {

using namespace oscar;

TEST(ParseCount, TakesDigitsUnitsAndPowersOfTen) {
  EXPECT_EQ(parse_count("100"), 100);
  EXPECT_EQ(parse_count("-3"), -3);
  EXPECT_EQ(parse_count("64K"), 65536);
  EXPECT_EQ(parse_count("1.5m"), 3 << 19);
  EXPECT_EQ(parse_count("2G"), int64_t{2} << 30);
  EXPECT_EQ(parse_count("1e4"), 10000);
  EXPECT_EQ(parse_count("9223372036854775807"), INT64_MAX);  // to the last digit
}

TEST(ParseCount, RefusesWhatIsNoWholeNumberOrTooLarge) {
  for (const char* text : {"", "x", "1.5", "1e", "1-2", "64KB", "64 K", "0x10", "inf", "nan",
                           "1e400", "1e19", "9223372036854775808"}) {
    EXPECT_EQ(parse_count(text), std::nullopt) << text;
  }
}

}  // namespace

// Text from files can't act on a terminal, and a long one says little more than a short one.

namespace {

using namespace oscar;

TEST(Printable, ControlsDirectionsAndInvisibleCharactersAreWrittenOut) {
  EXPECT_EQ(printable("\x1b]0;title\x07 a\r\nb\tc\x7f"), "\\x1b]0;title\\x07 a\\x0d\\nb\\tc\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\u009b31m");  // the one-character form of ESC [
  EXPECT_EQ(printable("a\xe2\x80\xae"
                      "b\xe2\x81\xa6\xef\xbb\xbf\xf3\xa0\x81\x81"),
            "a\\u202eb\\u2066\\ufeff\\ue0041");
  EXPECT_EQ(printable("Größe, 名前, \xf0\x9f\x98\x80, \\n"), "Größe, 名前, \xf0\x9f\x98\x80, \\n");
}

TEST(Printable, BytesThatAreNoUtf8AreWrittenOut) {
  EXPECT_EQ(printable("a\xff\xc3"), "a\\xff\\xc3");
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(printable("\xe4\xb8"), "\\xe4\\xb8");                    // cut off
}

TEST(Printable, OfALongTextBothEndsAreShown) {
  std::string name = "begin/";
  for (int i = 0; i < 1000000; ++i) name += "\xe5\x90\x8d";
  name += "/end";
  const std::string shown = printable(name);
  EXPECT_LT(shown.size(), kShownBytes + 40);
  EXPECT_TRUE(shown.starts_with("begin/\xe5\x90\x8d")) << shown.substr(0, 40);
  EXPECT_TRUE(shown.ends_with("\xe5\x90\x8d/end"));
  EXPECT_NE(shown.find("bytes ...]"), std::string::npos);
  EXPECT_EQ(shown.find("\\x"), std::string::npos) << "a character was cut apart";
  EXPECT_EQ(printable("abc", 3), "abc");
}

TEST(Printable, ErrorsQuoteFilesThatWayAndKeepTheirOwnLines) {
  const Error error({.what = "unknown key '\x1b[2J'",
                     .where = "a\nb",
                     .found = std::string(20 << 20, 'x'),
                     .hint = "do this\nthen that"});
  const std::string text = error.what();
  EXPECT_EQ(text.substr(0, text.find("  found")), "unknown key '\\x1b[2J'\n  where:    a\\nb\n");
  EXPECT_LT(text.size(), 2000u);
  EXPECT_TRUE(text.ends_with("hint:     do this\nthen that"));
  EXPECT_EQ(error.info().where, "a\nb");
}

TEST(JoinedByLayer, OneCauseIsOneLineWithItsLayers) {
  std::vector<std::string> remarks = {"the text is short"};
  for (int layer = 0; layer < 36; ++layer) {
    remarks.push_back("layer " + std::to_string(layer) + ": 64 tokens are few");
    for (int head = 0; head < 2; ++head) {
      remarks.push_back("layer " + std::to_string(layer) + ", keys, head " + std::to_string(head) +
                        ": rank 3");
    }
  }
  remarks.emplace_back("layer 7: something else");
  remarks.emplace_back("layers");
  EXPECT_EQ(joined_by_layer(remarks),
            (std::vector<std::string>{
                "the text is short", "layers 0 to 35: 64 tokens are few",
                "layers 0 to 35, 72 times, for example layer 0, keys, head 0: rank 3",
                "layer 7: something else", "layers"}));
  EXPECT_EQ(joined_by_layer({"layer 3: a", "layer 9: a", "layer 4: a"}),
            (std::vector<std::string>{"layers 3 to 4, 9: a"}));
}

// Slips of known words.

TEST(NearestWord, IsAFewLettersOffOrBegunAlike) {
  const std::vector<std::string> known = {"hadamard", "hadamard-clip", "q8_0", "bundle"};
  EXPECT_EQ(nearest_word("hadamrad", known), "hadamard");
  EXPECT_EQ(nearest_word("hadamardclip", known), "hadamard-clip");
  EXPECT_EQ(nearest_word("bund", known), "bundle") << "its beginning";
  EXPECT_EQ(nearest_word("q8", known), "") << "too short to tell";
  EXPECT_EQ(nearest_word("something", known), "");
  EXPECT_EQ(nearest_word(std::string(1000, 'h'), known), "");
}

}  // namespace
