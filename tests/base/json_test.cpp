// JSON that would exhaust the stack is refused, and what the parser says is put in plain words.
#include "oscar/base/json.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <ctime>

#include "oscar/base/error.h"

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

TEST(JsonText, AKeyThatOccursTwiceIsRefusedWhereverItIs) {
  for (const char* text : {R"({"a": 1, "b": 2, "a": 1})", R"({"x": [{"a": 1, "a": 2}]})",
                           R"({"a": 1, "\u0061": 2})"}) {
    const std::string said = refusal(text);
    EXPECT_NE(said.find("a JSON key occurs twice"), std::string::npos) << said;
    EXPECT_NE(said.find("found:    a"), std::string::npos) << said;
  }
  EXPECT_EQ(refusal(R"({"a": {"a": {"a": 1}}, "b": {"a": 1}})"), "accepted");
}

TEST(JsonText, ValuesAndTheOrderOfKeysAreThoseOfTheText) {
  const std::string text =
      R"({"z":[1,-2,3.5,18446744073709551615,true,false,null,""],"a":{},"m":[[],{"é":"\\"}]})";
  EXPECT_EQ(parse_json(text, "a").dump(), Json::parse(text).dump());
  EXPECT_EQ(parse_json(" 7 ", "a").dump(), "7");
  for (const char* wrong : {"", "{", "[1,]", "{\"a\"}", "1 2", "[1e999]", "nul", "\"\xff\""}) {
    EXPECT_NE(refusal(wrong), "accepted") << wrong;
  }
}

// Seconds of this thread.
double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

TEST(JsonText, TimeGrowsWithTheTextAndNotWithTheSquareOfItsKeys) {
  const auto seconds = [](int keys) {
    std::string text = "{";
    for (int i = 0; i < keys; ++i) text += fmt::format("{}\"key {}\":{}", i > 0 ? "," : "", i, i);
    text += "}";
    const double start = cpu_seconds();
    EXPECT_EQ(parse_json(text, "a").size(), static_cast<size_t>(keys));
    return cpu_seconds() - start;
  };
  const double few = seconds(20000), many = seconds(200000);
  printf("20,000 keys %.3f s, 200,000 keys %.3f s\n", few, many);
  EXPECT_LT(many, 40 * few + 0.1);  // a square would take 100 times as long: 40 s
}

TEST(JsonText, NamesThatAreNoUtf8CanBeWritten) {
  EXPECT_EQ(json_text(Json{{"output", "a\xff.h5"}}), "{\"output\":\"a\xef\xbf\xbd.h5\"}");
}

}  // namespace
