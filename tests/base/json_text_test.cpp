// JSON that would exhaust the stack is refused, and what the parser says is put in plain words.
#include "oscar/base/json_text.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace {

using namespace oscar;

std::string refusal(const std::string& text) {
  try {
    parse_json(text, "a.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

std::string nested(int depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(JsonText, ValuesNestedTooDeeplyAreRefusedBeforeTheStackIsExhausted) {
  EXPECT_EQ(refusal(nested(kMaxJsonDepth)), "accepted");
  for (const int depth : {kMaxJsonDepth + 1, 500000}) {
    EXPECT_NE(refusal("{\"a\": " + nested(depth) + "}").find("nested too deeply"),
              std::string::npos);
    EXPECT_NE(refusal(std::string(depth, '[')).find("a.json, byte 256"), std::string::npos);
  }
}

TEST(JsonText, BracketsInsideStringsAndBesideEachOtherDoNotCount) {
  const std::string brackets(2 * kMaxJsonDepth, '[');
  EXPECT_EQ(refusal(R"({"a": ")" + brackets + R"(", "b": "\"\\)" + brackets + R"("})"), "accepted");
  std::string flat = "[";
  for (int i = 0; i < 2 * kMaxJsonDepth; ++i) flat += "[],{},";
  EXPECT_EQ(refusal(flat + "1]"), "accepted");
}

TEST(JsonText, ProblemsNameTheLineOnlyWhereThereAreSeveral) {
  const std::string one = refusal("{\"text\": oops}"), two = refusal("{\"text\":\n oops}");
  EXPECT_NE(one.find("found:    parse error at column 10:"), std::string::npos) << one;
  EXPECT_NE(two.find("found:    parse error at line 2, column 2:"), std::string::npos) << two;
}

}  // namespace
