// How texts of a page are escaped and shortened.
#include "oscar/report/html.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

TEST(Html, EscapesMarkupAndReplacesWhatIsNoText) {
  EXPECT_EQ(escape_html("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&#39;");
  EXPECT_EQ(escape_html("\xc3\xa9 \xf0\x9f\x98\x80"), "\xc3\xa9 \xf0\x9f\x98\x80");
  const std::string bad = "\xEF\xBF\xBD";
  for (const char* text :
       {"\xff", "\xc3", "\xc0\xaf" /* overlong */, "\xed\xa0\x80" /* surrogate */, "\x01", "\x7f",
        "\xe2\x80\xae" /* turns the direction */}) {
    EXPECT_EQ(escape_html(text).substr(0, 3), bad) << text;
  }
}

TEST(Html, ShortensAtTheStartBetweenCharacters) {
  EXPECT_EQ(shortened("bundle", 6), "bundle");
  EXPECT_EQ(shortened("oscar-released@clip:0/0", 10), "…@clip:0/0");
  EXPECT_EQ(shortened("ééééé", 3), "…éé");
  EXPECT_EQ(shortened("\x80\x80\x80", 1), "\x80\x80\x80");
}

}  // namespace
}  // namespace oscar
