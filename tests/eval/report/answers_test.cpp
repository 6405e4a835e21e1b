// Answers of a file: strict to read, of their bundle alone, and text wherever they are shown.
#include "oscar/eval/report/answers.h"

#include <gtest/gtest.h>

#include "eval/report/sample.h"
#include "oscar/base/error.h"
#include "oscar/eval/report/page.h"

namespace oscar {
namespace {

using report_sample::has;

Json sample(const std::string& text = "An answer.") {
  Json json = {{"schema", "oscar-answers-1"},
               {"bundle_serving_sha256", "c0ffee"},
               {"device", "cpu"},
               {"most_tokens", 160},
               {"exact_tokens", 320},
               {"turns", Json::array()}};
  for (int i = 0; i < 5; ++i) {
    json["turns"].push_back({{"question", fmt::format("Question {}?", i)},
                             {"tokens_before", 1000 * i},
                             {"bf16", text},
                             {"int2", text + " Or not."},
                             {"same", i == 2}});
  }
  return json;
}

std::string answers_refusal(const Json& json) {
  try {
    read_answers(json, "a.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Answers, AreShownAllAndBesideEachOther) {
  const Answers answers = read_answers(sample(), "a.json");
  const std::string page = render_html_report(report_sample::report(), &answers);
  EXPECT_EQ(report_sample::malformed(page), "");
  EXPECT_TRUE(has(page, "<h2>Sample answers</h2>"));
  EXPECT_TRUE(has(page, "5 turns of one chat, all of them, unselected."));
  EXPECT_TRUE(has(page, "1 pair is the same to the last token"));
  EXPECT_EQ(report_sample::occurrences(page, "<p>An answer.</p>"), 5u);
  EXPECT_EQ(report_sample::occurrences(page, "<p>An answer. Or not.</p>"), 5u);
  EXPECT_EQ(report_sample::occurrences(page, "both are the same"), 1u);
  const std::string card = answers_markdown(answers);
  for (const char* part :
       {"### 5. Question 4?", "4,000 tokens before the answer", "> An answer.\n"}) {
    EXPECT_TRUE(has(card, part)) << part;
  }
  EXPECT_FALSE(has(render_html_report(report_sample::report()), "Sample answers"));
}

TEST(Answers, StayText) {
  const std::string attack = "</p><script>alert(1)</script>\n# title\n[a](http://b) `c` \xff";
  const Answers answers = read_answers(sample(attack), "a.json");
  const std::string page = render_html_report(report_sample::report(), &answers);
  EXPECT_EQ(report_sample::malformed(page), "");
  EXPECT_FALSE(has(page, "<script"));
  const std::string card = answers_markdown(answers);
  EXPECT_FALSE(has(card, "<script"));
  EXPECT_FALSE(has(card, "[a]("));
  EXPECT_FALSE(has(card, "\n# title"));
  EXPECT_FALSE(has(card, "> # title"));
  EXPECT_TRUE(has(card, "> \\# title"));
}

TEST(Answers, OfAnotherBundleAreRefused) {
  Json json = sample();
  json["bundle_serving_sha256"] = "other";
  const Answers answers = read_answers(json, "a.json");
  EXPECT_THROW(render_html_report(report_sample::report(), &answers), Error);
  Json served = report_sample::report();
  served["bundle"]["serving_sha256"] = "other";
  EXPECT_TRUE(has(render_html_report(served, &answers), "Sample answers"));
  served["bundle"] = nullptr;
  EXPECT_THROW(render_html_report(served, &answers), Error);
}

TEST(Answers, AreReadStrictly) {
  EXPECT_EQ(answers_refusal(sample()), "");
  const Json whole = sample(), turn = whole["turns"][1];
  for (const auto& [key, value] : whole.items()) {
    Json json = sample();
    json.erase(key);
    EXPECT_TRUE(has(answers_refusal(json), "a.json: " + key)) << key;
    json[key] = Json::array({nullptr});
    EXPECT_TRUE(has(answers_refusal(json), "a.json: ")) << key;
  }
  for (const auto& [key, value] : turn.items()) {
    Json json = sample();
    json["turns"][1].erase(key);
    EXPECT_TRUE(has(answers_refusal(json), "a.json: turn 2: " + key)) << key;
    json["turns"][1][key] = Json::object();
    EXPECT_TRUE(has(answers_refusal(json), "a.json: turn 2: " + key)) << key;
  }
  Json json = sample();
  json["more"] = 1;
  EXPECT_TRUE(has(answers_refusal(json), "6 keys and no others"));
  json = sample();
  json["turns"] = Json::array();
  EXPECT_TRUE(has(answers_refusal(json), "1 to 1000 entries"));
  json = sample();
  json["turns"][0]["tokens_before"] = -1;
  EXPECT_TRUE(has(answers_refusal(json), "a whole number"));
  json = sample(std::string(70000, 'a'));
  EXPECT_TRUE(has(answers_refusal(json), "65536 bytes"));
  json = sample();
  json["schema"] = "oscar-answers-2";
  EXPECT_TRUE(has(answers_refusal(json), "oscar-answers-1"));
  for (const Json& wrong : {Json(nullptr), Json::array(), Json("text")}) {
    EXPECT_TRUE(has(answers_refusal(wrong), "a.json")) << wrong.dump();
  }
}

}  // namespace
}  // namespace oscar
