// Needle prompts: exact lengths, facts where they were asked for, answers that follow from them.
#include "oscar/eval/needles.h"

#include <gtest/gtest.h>
#include <set>

#include "oscar/base/error.h"

namespace {

const std::filesystem::path kDatasets = std::filesystem::path(OSCAR_SOURCE_DIR) / "datasets";

const oscar::NeedleBook& book() {
  static const auto loaded = oscar::read_needle_book(kDatasets / "needle");
  return loaded;
}
const oscar::Tokenizer& tokenizer() {
  static const auto loaded = oscar::Tokenizer::from_file(kDatasets / "tiny-gqa" / "tokenizer.json");
  return loaded;
}
std::vector<int32_t> haystack() {
  std::string text;
  for (int i = 0; i < 800; ++i) text += "Line " + std::to_string(i) + " of a plain text.\n";
  return tokenizer().encode(text, false);
}

oscar::NeedleText plain(const std::vector<int32_t>& text) { return {&tokenizer(), &text}; }

TEST(NeedleTasks, EveryAnswerIsFoundInTheAskedFacts) {
  std::mt19937_64 random(1);
  for (const std::string& kind : book().kind_names()) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto task = sample_task(book(), kind, random);
      std::string asked;
      for (size_t i = 0; i < task.facts.size(); ++i) {
        EXPECT_EQ(task.facts[i].find('{'), std::string::npos);
        if (task.asked[i]) asked += task.facts[i];
      }
      // Every word with a digit, and every word of a verbatim note, stands in an asked fact.
      std::string word;
      for (const char c : task.answer + " ") {
        if (isalnum(static_cast<unsigned char>(c))) {
          word += c;
          continue;
        }
        if (!word.empty() && (isdigit(static_cast<unsigned char>(word[0])) || kind == "verbatim")) {
          EXPECT_NE(asked.find(word), std::string::npos) << kind << ": " << task.answer;
        }
        word.clear();
      }
      EXPECT_EQ(task.question.find('{'), std::string::npos);
      EXPECT_FALSE(task.answer.empty());
    }
  }
}

TEST(NeedleTasks, AChainIsAnsweredFromItsLastKeyToTheNumber) {
  std::mt19937_64 random(4);
  const auto task = sample_task(book(), "tracking", random);
  std::vector<std::string> asked;
  for (size_t i = 0; i < task.facts.size(); ++i) {
    if (task.asked[i]) asked.push_back(task.facts[i]);
  }
  ASSERT_EQ(asked.size(), 3u);
  std::string expected;
  for (auto fact = asked.rbegin(); fact != asked.rend(); ++fact) {
    const size_t equals = fact->find(" = ");
    expected += (expected.empty() ? " " : " = ") + fact->substr(equals + 3);
    expected.pop_back();  // the line's end
  }
  EXPECT_EQ(task.answer, expected);
}

TEST(NeedleTasks, PromptsHaveExactlyTheLengthAndTheNeedleItsDepth) {
  const auto text = haystack();
  std::mt19937_64 random(2);
  for (const std::string& kind : book().kind_names()) {
    for (const double depth : {0.0, 0.5, 1.0}) {
      const auto p = make_needle_prompt(book(), kind, 900, depth, plain(text), random);
      EXPECT_EQ(p.prompt.size(), 900u) << kind;
      EXPECT_FALSE(p.answer.empty());
    }
  }
  const auto p = make_needle_prompt(book(), "single", 1000, 0.5, plain(text), random);
  const auto before = tokenizer().decode(p.prompt, false).find("The secret number of");
  const auto whole = tokenizer().decode(p.prompt, false).size();
  EXPECT_NEAR(static_cast<double>(before) / static_cast<double>(whole), 0.5, 0.06);
}

TEST(NeedleTasks, APlanCoversEveryCombinationAndIsReproducible) {
  oscar::NeedlePlan plan;
  plan.kinds = {"single", "multikey"};
  plan.lengths = {300, 500};
  plan.depths = {0.0, 1.0};
  plan.prompts = 16;
  const auto text = haystack();
  const auto prompts = make_needle_prompts(book(), plan, plain(text));
  const auto again = make_needle_prompts(book(), plan, plain(text));
  std::multiset<std::tuple<std::string, int64_t, double>> seen;
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(prompts[i].prompt, again[i].prompt);
    EXPECT_GE(prompts[i].length, prompts[i > 0 ? i - 1 : 0].length);
    seen.insert({prompts[i].kind, prompts[i].length, prompts[i].depth});
  }
  for (const auto& combination : seen) EXPECT_EQ(seen.count(combination), 2u);
}

TEST(NeedleTasks, ImpossibleLengthsAndUnknownKindsAreRefused) {
  const auto text = haystack();
  std::mt19937_64 random(2);
  EXPECT_THROW(make_needle_prompt(book(), "single", 20, 0, plain(text), random), oscar::Error);
  EXPECT_THROW(make_needle_prompt(book(), "single", 1 << 20, 0, plain(text), random), oscar::Error);
  EXPECT_THROW(make_needle_prompt(book(), "hay", 500, 0, plain(text), random), oscar::Error);
}

TEST(NeedleTasks, AChatTemplateHoldsTheTextAndTheAssistantBeginsTheAnswer) {
  const auto text = haystack();
  oscar::NeedleText chat = plain(text);
  chat.chat = {"<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"};
  std::mt19937_64 random(7);
  for (const std::string& kind : book().kind_names()) {
    const auto p = make_needle_prompt(book(), kind, 900, 0.5, chat, random);
    EXPECT_EQ(p.prompt.size(), 900u) << kind;
    const std::string written = tokenizer().decode(p.prompt, false);
    EXPECT_EQ(written.rfind("<|im_start|>user\n", 0), 0u) << written.substr(0, 40);
    const size_t turn = written.rfind("<|im_end|>\n<|im_start|>assistant\n");
    ASSERT_NE(turn, std::string::npos) << kind;
    // A question with a mark is the user's; what the answer continues is the assistant's.
    const std::string answer_begins = written.substr(turn + 33);
    EXPECT_EQ(answer_begins.find('?'), std::string::npos) << kind;
    EXPECT_EQ(answer_begins.empty(), kind == "verbatim") << answer_begins;
  }
}

}  // namespace
