// The verdict: its limits, what makes it careful, and when a ratio may be quoted.
#include "oscar/eval/report/verdict.h"

#include <gtest/gtest.h>

#include "eval/report/sample.h"

namespace oscar {
namespace {

Verdict verdict_of(const Json& report) {
  static ReportData data;  // the verdict points into it
  data = read_report(report);
  return judge(data);
}

std::string all_sentences(const Verdict& verdict) {
  std::string text;
  for (const std::string& sentence : verdict.sentences) text += sentence + "\n";
  return text;
}

void set_increase(Json& report, double low, double mean, double high) {
  report["methods"]["bundle"]["nll_increase"] = {{"mean", mean}, {"low", low}, {"high", high}};
}

TEST(Verdict, AGoodBundleIsCloseAndTheWorstCheckDecides) {
  Json r = report_sample::report();
  EXPECT_EQ(verdict_of(r).standing, Standing::kClose);
  set_increase(r, 0.028, 0.03, 0.032);
  EXPECT_EQ(verdict_of(r).standing, Standing::kCare);
  r["methods"]["bundle"]["top1"]["mean"] = 0.6;
  EXPECT_EQ(verdict_of(r).standing, Standing::kLost);
}

TEST(Verdict, SharedTextAndLittleTextAreLinesThatKeepItFromBeingClose) {
  const Json good = report_sample::report();
  const size_t checks = verdict_of(good).checks.size();
  const auto of_bundle = [&good](const char* key, Json value) {
    Json r = good;
    r["bundle"][key] = std::move(value);
    return r;
  };
  const Json shared =
      of_bundle("overlap", {{"share", 0.37}, {"low", 0.33}, {"high", 0.41}, {"ngram", 13}});
  ASSERT_EQ(verdict_of(shared).checks.size(), checks + 1);
  EXPECT_EQ(verdict_of(shared).standing, Standing::kCare);
  EXPECT_NE(verdict_of(shared).checks.back().measured.find("37% of"), std::string::npos);
  EXPECT_NE(verdict_of(shared).checks.back().note.find("evaluate on other text."),
            std::string::npos);
  const Json little = of_bundle(
      "convergence", {{"enough", false}, {"fall_per_doubling", 0.03}, {"tokens_needed", 700000}});
  EXPECT_EQ(verdict_of(little).standing, Standing::kCare);
  EXPECT_NE(verdict_of(little).checks.back().measured.find("3.0% per doubling"), std::string::npos);
  EXPECT_NE(verdict_of(little).checks.back().note.find("about 700000 tokens"), std::string::npos);
  EXPECT_EQ(verdict_of(of_bundle("convergence", {{"enough", true}})).standing, Standing::kClose);
  const Json unknown = of_bundle("convergence", {{"problem", "the text is one batch"}});
  EXPECT_EQ(verdict_of(unknown).standing, Standing::kCare);
  EXPECT_EQ(verdict_of(unknown).checks.back().measured,
            "could not be judged: the text is one batch");
  const Json none = of_bundle("convergence", nullptr);
  EXPECT_EQ(verdict_of(none).standing, Standing::kCare);
  EXPECT_EQ(verdict_of(none).checks.back().measured,
            "could not be judged: the file keeps no verdict on it");
}

TEST(Verdict, FewTokensHaveNoIntervalAndKeepItFromBeingClose) {
  Json r = report_sample::report();
  r["tokens"] = 704;
  r["resampling_units"] = 2;
  const Verdict verdict = verdict_of(r);
  EXPECT_EQ(verdict.standing, Standing::kCare);
  EXPECT_EQ(verdict.checks.back().measured, "704 tokens");
  EXPECT_EQ(verdict.checks.back().limits, "at least 8 sequences or 4,096 tokens");
  EXPECT_NE(all_sentences(verdict).find("too few tokens to tell them apart"), std::string::npos);
  EXPECT_EQ(verdict.checks[0].measured.find('['), std::string::npos) << verdict.checks[0].measured;
}

TEST(Verdict, AModelThatGuessesKeepsItFromBeingClose) {
  Json r = report_sample::report();
  const size_t checks = verdict_of(r).checks.size();
  r["model"]["vocab_size"] = 49152;
  EXPECT_EQ(verdict_of(r).checks.size(), checks);
  r["methods"]["bf16"]["ppl"] = {{"mean", 49150.0}, {"se", 12.0}};  // rounded below
  EXPECT_EQ(verdict_of(r).standing, Standing::kCare);
  EXPECT_EQ(verdict_of(r).checks.back().note,
            "The model itself predicts nothing: BF16 perplexity 49,150, vocabulary 49,152.");
  r["methods"]["bf16"]["ppl"] = {{"mean", 300.0}, {"se", 0.0}};
  EXPECT_EQ(verdict_of(r).standing, Standing::kCare);
  EXPECT_EQ(verdict_of(r).checks.back().measured,
            "BF16 perplexity 300 on every piece of text, vocabulary 49,152");
  r["model"].erase("vocab_size");  // as in earlier reports
  EXPECT_EQ(verdict_of(r).standing, Standing::kCare);
  r["methods"]["bf16"]["ppl"] = {{"mean", 300.0}, {"se", nullptr}};  // of one piece
  EXPECT_EQ(verdict_of(r).checks.size(), checks);
}

TEST(Verdict, OfAModelWithoutALayerIn2BitsJudgesNothing) {
  Json r = report_sample::report();
  r["model"]["quantized_layers"] = 1;
  EXPECT_EQ(verdict_of(r).standing, Standing::kClose);
  r["model"]["quantized_layers"] = 0;
  const Verdict verdict = verdict_of(r);
  EXPECT_EQ(verdict.standing, Standing::kUnknown);
  EXPECT_EQ(verdict.judged, nullptr);
  EXPECT_EQ(verdict.headline, "No layer of this model is in 2 bits: every window stays in BF16.");
}

TEST(Verdict, APortableVariantThatCostsManyTimesTheLossIsNotToBeServed) {
  Json r = report_sample::report();
  const double own = r["methods"]["bundle"]["kl"]["mean"];
  r["methods"]["portable"] = report_sample::method(27 * own, 4, 228);
  const std::string last = verdict_of(r).sentences[verdict_of(r).sentences.size() - 2];
  EXPECT_NE(last.find("about 27 times the bundle's: do not serve it."), std::string::npos) << last;
  r["methods"]["portable"]["kl"]["mean"] = 2 * own;
  for (const std::string& sentence : verdict_of(r).sentences) {
    EXPECT_EQ(sentence.find("do not serve"), std::string::npos);
  }
}

TEST(Verdict, JudgesTheBundleElseTheFirstByNameElseTheLastMethodThatIsNoVariant) {
  Json r = report_sample::report();
  r["methods"]["bundle@k"] = report_sample::method(0.001, 4, 390);
  EXPECT_EQ(verdict_of(r).judged->name, "bundle");
  r["methods"].erase("bundle");
  EXPECT_EQ(verdict_of(r).judged->name, "oscar");
  r["methods"]["ours"] = report_sample::method(0.009, 4, 390);
  r["methods"]["second"] = report_sample::method(0.02, 4, 380);
  r["methods"]["random-clip"] = report_sample::method(0.4, 4, 100);
  r["bundles"] = {{"second", Json::object()}, {"ours", Json::object()}};
  EXPECT_EQ(verdict_of(r).judged->name, "ours");
}

TEST(Verdict, SaysWhenAnIntervalReachesOverALimit) {
  Json r = report_sample::report();
  set_increase(r, 0.005, 0.015, 0.025);
  EXPECT_NE(verdict_of(r).checks[0].note.find("over the limit"), std::string::npos);
  set_increase(r, 0.005, 0.006, 0.007);
  EXPECT_EQ(verdict_of(r).checks[0].note, "");
}

TEST(Verdict, AnIntervalThatIsNotKnownIsNotShown) {
  Json r = report_sample::report();
  set_increase(r, NAN, 0.005, NAN);
  const auto check = verdict_of(r).checks[0];
  EXPECT_EQ(check.measured.find('['), std::string::npos) << check.measured;
  EXPECT_NE(check.measured.find("(+0.5%)"), std::string::npos) << check.measured;
}

TEST(Verdict, LostNeedlesCountUnlessChanceExplainsThem) {
  Json r = report_sample::report();
  r["methods"]["bundle"]["niah"]["rate"] = 0.80;
  r["methods"]["bundle"]["niah"]["mcnemar"]["p"] = 1e-9;
  EXPECT_EQ(verdict_of(r).standing, Standing::kLost);
  r["methods"]["bundle"]["niah"]["mcnemar"]["p"] = 0.2;
  EXPECT_EQ(verdict_of(r).standing, Standing::kCare);
  EXPECT_NE(verdict_of(r).checks[2].note.find("chance"), std::string::npos);
}

TEST(Verdict, FewPromptsAndTasksThatBf16FailsProveNothing) {
  Json r = report_sample::report();
  for (const char* name : {"bf16", "bundle"}) r["methods"][name]["niah"]["prompts"] = 48;
  EXPECT_EQ(verdict_of(r).checks[2].standing, Standing::kCare);
  r["methods"]["bf16"]["niah"]["rate"] = 0.3;
  EXPECT_EQ(verdict_of(r).checks[2].standing, Standing::kUnknown);
  EXPECT_EQ(verdict_of(r).standing, Standing::kClose) << "decided by the other checks";
}

TEST(Verdict, QuotesARatioOnlyWhereTheDifferenceIsBeyondChanceAndTheFloor) {
  Json r = report_sample::report();
  EXPECT_NE(all_sentences(verdict_of(r)).find("11 times as much"), std::string::npos);
  r["methods"]["oscar"]["kl_difference"]["low"] = -0.01;
  EXPECT_NE(all_sentences(verdict_of(r)).find("not distinguishable"), std::string::npos);
  r = report_sample::report();
  r["methods"]["bundle"]["kl"]["above_floor"] = false;
  EXPECT_EQ(all_sentences(verdict_of(r)).find("as much"), std::string::npos);
  EXPECT_NE(all_sentences(verdict_of(r)).find("arithmetic alone"), std::string::npos);
}

TEST(Verdict, SaysWhatFp8WouldCost) {
  Json r = report_sample::report();
  EXPECT_EQ(verdict_of(r).beside_fp8, "");
  r["methods"]["fp8"] = report_sample::method(0.09, 4, 390);
  EXPECT_EQ(verdict_of(r).beside_fp8,
            "KL is 0.00900; an FP8 cache without scales has 0.0900 (10 times as much)");
}

TEST(Verdict, SaysWhatWasNotMeasured) {
  const auto list = [](const Verdict& v) {
    std::string text;
    for (const std::string& gap : v.not_measured) text += gap;
    return text;
  };
  Json r = report_sample::report();
  EXPECT_NE(list(verdict_of(r)).find("Positions beyond 4,096, of 131,072"), std::string::npos);
  EXPECT_NE(list(verdict_of(r)).find("--needle-generate"), std::string::npos);
  EXPECT_EQ(list(verdict_of(r)).find("--compare"), std::string::npos);
  r["methods"].erase("identity");
  r["methods"].erase("oscar");
  r["kl_floor"] = nullptr;
  for (const char* missing : {"--compare identity", "--compare oscar", "--compare exact"}) {
    EXPECT_NE(list(verdict_of(r)).find(missing), std::string::npos) << missing;
  }
}

}  // namespace
}  // namespace oscar
