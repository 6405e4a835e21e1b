// Model cards: the figures of the evaluation and no others, and whose licence and bundle they are.
#include "oscar/eval/report/card.h"

#include <gtest/gtest.h>

#include "bundle/plain_bundle.h"
#include "bundle/rotated_bundle.h"
#include "eval/report/sample.h"
#include "io/gguf_bytes.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/bundle/edit.h"

namespace oscar {
namespace {

using oscar_test::GgufBuilder;
using oscar_test::TemporaryFolder;
using oscar_test::write_file;
using report_sample::has;

Bundle sample_bundle() {
  Bundle bundle = plain::rotated_bundle(true);
  bundle.model.weights_fingerprint = "weights";
  bundle.content_sha256 = "content";
  bundle.preset = "best";
  bundle.method = "balanced";
  bundle.tool_version = "0.1.0";
  bundle.tool_commit = "bbb";
  bundle.fitted_by = "0.0.9 (aaa)";
  bundle.corpus.sources = {{.name = "a|b.jsonl", .sha256 = "abc"}};
  bundle.corpus.tokens = 12345;
  bundle.convergence = {{"enough", true}};
  return bundle;
}

// Of that bundle.
Json sample_report() {
  Json json = report_sample::report();
  json["bundle"] = {{"file", "x.h5"}, {"content_sha256", "content"}};
  json["model"]["weights_fingerprint"] = "weights";
  json["quantizer"] = {{"bits", 2},
                       {"sink", 64},
                       {"recent", 256},
                       {"quant_group_size", plain::kHeadDim},
                       {"metadata_dtype", "fp32"}};
  return json;
}

std::string refusal(const Json& json) {
  try {
    evaluation_of(sample_bundle(), json, "r.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

CardRequest request_with(const Json& json) {
  return {.bundle_file = "x.h5",
          .evaluations = {evaluation_of(sample_bundle(), json, "r.json")},
          .licence = {},
          .base_model = "",
          .exports = {}};
}

TEST(Card, HasFrontMatterFiguresServingAndHowItWasMade) {
  CardRequest request = request_with(sample_report());
  request.licence = StatedLicence{.id = "apache-2.0", .name = "", .link = "", .place = "README.md"};
  request.base_model = "org/m";
  const std::string card = model_card(sample_bundle(), request);
  EXPECT_TRUE(card.starts_with("---\nlicense: apache-2.0\nbase_model: org/m\nlibrary_name: "));
  for (const char* part :
       {"- kv-cache\n", "# A 2-bit KV cache for m\n", "| **this bundle** |",
        "VLLM_OSCAR_BUNDLE=x.h5 vllm serve org/m", "oscar_int2.transformers.apply(model, \"x.h5\")",
        "12,345", "a\\|b.jsonl", "`weights`", "`content`", "whose `README.md` states `apache-2.0`",
        "fitted by | OSCAR Toolkit 0.0.9 (aaa)", "written by | OSCAR Toolkit 0.1.0 (bbb)",
        "Device: ", "Not in this evaluation: Speed", "r.json"}) {
    EXPECT_TRUE(has(card, part)) << part << "\n" << card;
  }
  EXPECT_EQ(card, model_card(sample_bundle(), request));
}

TEST(Card, SaysWhatTheFileCannotRepeatAndWhatWasMeasured) {
  Json json = sample_report(), without = json;
  ASSERT_EQ(without["methods"].erase("oscar"), 1);
  const std::string said = "- `oscar` in it: fitted from the calibration's statistics";
  const std::string other = "- Measured on the content `content`";
  Bundle bundle = sample_bundle();
  const CardRequest request = request_with(json);
  EXPECT_TRUE(has(model_card(bundle, request), said));
  EXPECT_FALSE(has(model_card(bundle, request_with(without)), said));
  EXPECT_FALSE(has(model_card(bundle, request), other));
  bundle.content_sha256 = "another";
  EXPECT_TRUE(has(model_card(bundle, request), other));
}

TEST(Card, WithoutAnEvaluationGivesNoFigure) {
  const std::string card = model_card(
      sample_bundle(),
      {.bundle_file = "x.h5", .evaluations = {}, .licence = {}, .base_model = "", .exports = {}});
  EXPECT_TRUE(has(card, "Not measured: no evaluation was stored"));
  EXPECT_TRUE(has(card, "state no licence"));
  EXPECT_FALSE(has(card, "license:"));
  EXPECT_FALSE(has(card, "base_model"));
  EXPECT_FALSE(has(card, "perplexity"));
}

TEST(Card, GivesTheFiguresOfTheReportToTheDigit) {
  Json json = sample_report();
  json["methods"]["bundle"]["kl"] = {{"mean", 0.012345}, {"se", 0.0001}};
  json["methods"]["bundle"]["top1"] = {{"mean", 0.91234}, {"se", 0.001}};
  const std::string card = model_card(sample_bundle(), request_with(json));
  EXPECT_TRUE(has(card, "0.01235 [0.01215, 0.01254]")) << card;
  EXPECT_TRUE(has(card, "91.2%"));
}

TEST(Card, LetsNoTextOfAReportActAsMarkup) {
  Json json = sample_report();
  json["device"] = "<script>x</script> | [a](http://b)\n# c";
  json["command"] = "oscar-eval `x`\n| y";
  const std::string card = model_card(sample_bundle(), request_with(json));
  EXPECT_FALSE(has(card, "<script>"));
  EXPECT_FALSE(has(card, "[a](http"));
  EXPECT_FALSE(has(card, "\n# c"));
  EXPECT_TRUE(has(card, "`oscar-eval ?x??? y`"));
}

TEST(Card, CautionsOfTextThatIsSharedOrNotEnoughOnEitherSide) {
  Json json = sample_report();
  EXPECT_FALSE(has(model_card(sample_bundle(), request_with(json)), "Caution"));
  json["bundle"]["overlap"] = {{"share", 0.37}, {"low", 0.33}, {"high", 0.41}, {"ngram", 13}};
  EXPECT_TRUE(has(model_card(sample_bundle(), request_with(json)),
                  "\n> **Caution** (`shared-text`): 37% of the evaluation's 13-grams"));
  json = sample_report();
  json["resampling_units"] = 7;
  EXPECT_TRUE(
      has(model_card(sample_bundle(), request_with(json)),
          "\n> **Caution** (`few-tokens`): the evaluation counts 7,552 tokens in 7 pieces of "
          "at most 512 tokens (2 sequences), too few"));
  json = sample_report();
  json["methods"]["bf16"]["ppl"] = {{"mean", 300.0}, {"se", 0.0}};
  EXPECT_TRUE(has(model_card(sample_bundle(), request_with(json)),
                  "\n> **Caution** (`predicts-nothing`): the model itself predicts nothing: BF16"));
  Bundle bundle = sample_bundle();
  bundle.convergence = {{"problem", "the text is one batch"}};
  EXPECT_TRUE(has(model_card(bundle, request_with(sample_report())),
                  "could not be judged: the text is one batch"));
  bundle.convergence = nullptr;  // merged, imported, or of another engine
  EXPECT_TRUE(has(model_card(bundle, request_with(sample_report())),
                  "\n> **Caution** (`little-text`): the calibration text of x.h5 could not be "
                  "judged: the file keeps no verdict on it."));
  bundle.convergence = {{"enough", false}, {"fall_per_doubling", 0.03}};
  EXPECT_TRUE(has(model_card(bundle, request_with(sample_report())),
                  "\n> **Caution** (`little-text`): the calibration text of "));
}

TEST(Card, SaysOfWhichPiecesItsIntervalsAre) {
  Json json = sample_report();
  EXPECT_TRUE(
      has(model_card(sample_bundle(), request_with(json)),
          "- Intervals take as independent: 16 pieces of at most 512 tokens (2 sequences)\n"));
  json["sequences"] = json["resampling_units"] = 16;
  EXPECT_FALSE(has(model_card(sample_bundle(), request_with(json)), "independent"));
}

TEST(Card, NamesExportsOfItsOwnBundleAlone) {
  CardRequest request = request_with(sample_report());
  request.exports = {
      {"exports/mlx",
       {{"format", "mlx"},
        {"variant", "portable"},
        {"relative_error", 3.5},
        {"created_from", {{"content_sha256", "content"}, {"weights_fingerprint", "weights"}}}}}};
  const std::string card = model_card(sample_bundle(), request);
  EXPECT_TRUE(has(card,
                  "| [mlx](exports/mlx) | the portable variant, one rotation a layer; "
                  "predicted error of the attention output 3.5 times that"))
      << card;
  request.exports[0].manifest["created_from"]["content_sha256"] = "other";
  EXPECT_THROW(model_card(sample_bundle(), request), Error);
  request.exports[0].manifest = Json::array();
  EXPECT_THROW(model_card(sample_bundle(), request), Error);
}

TEST(Card, ShowsAnswersOfItsOwnBundleAlone) {
  CardRequest request = request_with(sample_report());
  request.answers = Answers{.file = "a.json",
                            .serving_sha256 = serving_sha256(sample_bundle()),
                            .device = "cpu",
                            .most_tokens = 8,
                            .exact_tokens = 320,
                            .turns = {{"What?", "This.", "That.", 36, false}}};
  const std::string card = model_card(sample_bundle(), request);
  EXPECT_TRUE(has(card, "## Sample answers"));
  EXPECT_TRUE(has(card, "BF16:\n\n> This.\n\n2 bits:\n\n> That.\n"));
  request.answers->serving_sha256 = "other";
  EXPECT_THROW(model_card(sample_bundle(), request), Error);
}

TEST(Card, RefusesABaseModelThatIsNoNameOfTheHub) {
  CardRequest request = request_with(sample_report());
  for (const char* name : {"m", "a/b/c", "/b", "a/", "a/b c", "a/b\nlicense: mit", "ü/b"}) {
    request.base_model = name;
    EXPECT_THROW(model_card(sample_bundle(), request), Error) << name;
  }
}

TEST(BundleEvaluation, IsRefusedWhenItIsOfAnotherBundleModelOrCache) {
  EXPECT_EQ(refusal(sample_report()), "");
  Json json = sample_report();
  json["bundle"]["content_sha256"] = "other";
  EXPECT_TRUE(has(refusal(json), "of another bundle"));
  json["bundle"]["serving_sha256"] = serving_sha256(sample_bundle());  // of a file with more in it
  EXPECT_EQ(refusal(json), "");
  json["bundle"] = nullptr;
  EXPECT_TRUE(has(refusal(json), "a report without a bundle"));

  json = sample_report();
  json["model"]["weights_fingerprint"] = "others";
  EXPECT_TRUE(has(refusal(json), "of other weights"));
  Bundle nameless = sample_bundle();  // oscar-eval compared its samples
  nameless.model.weights_fingerprint.clear();
  json["bundle"]["content_sha256"] = nameless.content_sha256;
  EXPECT_NO_THROW(evaluation_of(nameless, json, "report.json"));
  json = sample_report();
  json["quantizer"]["sink"] = 128;
  EXPECT_TRUE(has(refusal(json), "sink 128"));
  json = sample_report();
  json["methods"].erase("bundle");
  EXPECT_TRUE(has(refusal(json), "did not measure the bundle"));
  json = sample_report();
  json["partial"] = {{"text", {{"tokens", 512}, {"of", 4096}}}};
  EXPECT_TRUE(has(refusal(json), "stopped before its end"));
  EXPECT_TRUE(has(refusal(json), "--resume"));
  EXPECT_TRUE(has(refusal(Json{{"schema", "x"}}), "r.json"));
  EXPECT_TRUE(has(refusal(Json::array()), "r.json"));
}

TEST(BundleEvaluation, IsRefusedWhenItsFiguresContradictEachOther) {
  Json json = sample_report();
  Json& method = json["methods"]["bundle"];
  method["kl"] = {{"mean", 0.02}, {"se", 0.001}, {"by_position", {0.01, 0.03}}};
  method["nll_increase"] = {{"mean", 0.02}, {"low", 0.01}, {"high", 0.03}};
  EXPECT_EQ(refusal(json), "");
  method["kl"]["mean"] = 0.001;
  EXPECT_TRUE(has(refusal(json), "kl of bundle within 0.01 to 0.03"));
  method["kl"]["mean"] = 0.02;
  method["nll_increase"]["mean"] = 0.04;
  EXPECT_TRUE(has(refusal(json), "nll_increase of bundle within"));
}

TEST(StatedLicence, IsReadFromFrontMatterAndGgufKeys) {
  TemporaryFolder folder;
  const auto stated = [&](const std::string& readme) {
    write_file(folder.path() / "README.md", readme);
    return read_licence(folder.path());
  };
  EXPECT_FALSE(read_licence(folder.path()));
  const auto plain =
      stated("---\nlanguage:\n- en\nlicense: \"apache-2.0\"\n---\n# x\nlicense: mit\n");
  ASSERT_TRUE(plain);
  EXPECT_EQ(plain->id, "apache-2.0");
  const auto own = stated(
      "---\r\nlicense: other\r\nlicense_name: qwen\r\nlicense_link: https://a.b/c\r\n---\r\n");
  ASSERT_TRUE(own);
  EXPECT_EQ(own->name + " " + own->link, "qwen https://a.b/c");
  for (const char* readme :
       {"", "license: mit\n", "---\nlicense: mit\n", "---\nlicense:\n- mit\n---\n",
        "---\nlicense: a b\n---\n", "---\n license: mit\n---\n", "---\nlicense: '\n---\n"}) {
    EXPECT_FALSE(stated(readme)) << readme;
  }
  const auto gguf = folder.path() / "m.gguf";
  write_file(gguf, GgufBuilder().text("general.license", "mit").bytes());
  EXPECT_EQ(read_licence(gguf)->id, "mit");
  write_file(gguf, GgufBuilder().text("general.license", "m\nit").bytes());
  EXPECT_FALSE(read_licence(gguf));
}

}  // namespace
}  // namespace oscar
