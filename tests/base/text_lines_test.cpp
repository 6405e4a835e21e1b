// Text from files can't act on a terminal, and a long one says little more than a short one.
#include "oscar/base/text_lines.h"
#include "oscar/base/printable.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"

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

}  // namespace
