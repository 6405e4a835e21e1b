#include "oscar/eval/report/page.h"

#include <gtest/gtest.h>

#include "eval/report/sample.h"
#include "oscar/base/error.h"
#include "oscar/eval/report/report_data.h"

namespace oscar {

// The page as a whole: structure, missing parts, hostile texts, and figures that are not finite.

namespace {

using report_sample::has;
using report_sample::malformed;
using report_sample::method;
using report_sample::occurrences;
using report_sample::report;

TEST(HtmlReport, TheCheckOfMarkupFindsWhatIsWrong) {
  EXPECT_EQ(malformed("<!DOCTYPE html>\n<a b=\"1\"><c/>x &amp; y</a>"), "");
  EXPECT_NE(malformed("<a><b></a></b>"), "");
  EXPECT_NE(malformed("<a>"), "");
  EXPECT_NE(malformed("<a>x & y</a>"), "");
  EXPECT_NE(malformed("<a b=1></a>"), "");
  EXPECT_NE(malformed("<a>\x01</a>"), "");
}

TEST(HtmlReport, AWholeReportHasEverySectionAndIsWellFormed) {
  const std::string page = render_html_report(report());
  EXPECT_EQ(malformed(page), "");
  for (const char* title :
       {"Methods side by side", "Divergence from BF16", "Needles in long prompts", "Layer by layer",
        "Inside the bundle", "Memory", "How it was run", "How to read it", "Not measured here"}) {
    EXPECT_TRUE(has(page, title)) << title;
  }
  EXPECT_FALSE(has(page, "Left out"));
  // KL, KL against bits, percentiles, errors, two of a key row, two spectra, two of channels, two
  // of memory, four needle maps.
  EXPECT_EQ(occurrences(page, "<svg "), 16u);
  EXPECT_EQ(occurrences(page, "<svg "), occurrences(page, "role=\"img\""));
  EXPECT_EQ(occurrences(page, "<svg "), occurrences(page, "<desc "));
}

TEST(HtmlReport, SaysWhatIsNotKnownOfTheCalibrationText) {
  Json unknown = report();
  unknown["bundle"]["overlap"] = {{"known", false}};
  EXPECT_TRUE(has(render_html_report(unknown), "not known"));
  unknown["bundle"]["overlap"] = {{"known", true}, {"share", 0.0}};
  EXPECT_FALSE(has(render_html_report(unknown), "not known"));
}

TEST(HtmlReport, AsksForNothingOutsideItself) {
  const std::string page = render_html_report(report());
  for (const char* part : {"<script", "src=", "href=", "url(", "@import", "@font-face", "onload"}) {
    EXPECT_FALSE(has(page, part)) << part;
  }
  EXPECT_TRUE(has(page, "default-src 'none'"));
  EXPECT_EQ(occurrences(page, "http"), 2u) << "the policy's http-equiv and the XML namespace";
}

TEST(HtmlReport, EqualReportsGiveEqualBytesAlsoThroughAFile) {
  const Json original = report();
  EXPECT_EQ(render_html_report(original), render_html_report(original));
  EXPECT_EQ(render_html_report(original), render_html_report(parse_json(original.dump(2), "copy")));
}

TEST(HtmlReport, NotANumberReadsTheSameInMemoryAndThroughAFile) {
  Json r = report();
  r["methods"]["bundle"]["kl"]["mean"] = NAN;
  r["methods"]["bundle"]["ppl"]["mean"] = INFINITY;
  r["methods"]["bundle"]["nll_increase"] = {{"mean", INFINITY}, {"low", NAN}, {"high", INFINITY}};
  r["methods"]["bundle"]["output_nmse"][1] = NAN;
  r["methods"]["identity"]["kl"]["percentiles"]["99"] = INFINITY;
  r["kl_floor"] = NAN;
  const std::string page = render_html_report(r);
  EXPECT_EQ(malformed(page), "");
  EXPECT_TRUE(has(page, "not finite"));
  EXPECT_TRUE(has(page, "loses too much")) << "a perplexity that is not finite is no success";
  for (const char* part : {"nan", "NaN", "inf ", "inf\"", "-inf"}) {
    EXPECT_FALSE(has(page, std::string(">") + part)) << part;
    EXPECT_FALSE(has(page, std::string("=\"") + part)) << part;
  }
  EXPECT_EQ(page, render_html_report(parse_json(r.dump(), "copy")));
}

TEST(HtmlReport, TextsOfOthersStayText) {
  const std::string attack =
      "</title><script>alert(1)</script>\"' onload=\"x\" & \x01\xff\xe2\x80\xae";
  Json r = report();
  r["model"]["name"] = attack;
  r["model"]["architecture"] = attack;
  r["bundle"]["file"] = attack;
  r["corpus"]["sources"][0]["name"] = attack;
  r["device"] = attack;
  r["mode"] = attack;
  r["command"] = attack;
  r["tool"]["version"] = attack;
  r["methods"][attack] = method(0.02, 4, 300);
  r["methods"][attack]["summary"] = attack;
  r["methods"][attack]["niah"]["kinds"][attack] = report_sample::rate(1, 2);
  r["methods"][attack + "@k"] = method(0.02, 4, 300);
  r["methods"][attack + "@layer:1"] = method(0.02, 4, 300);
  r["methods"][attack + "@layer:2"] = method(0.03, 4, 300);
  const std::string page = render_html_report(r);
  EXPECT_EQ(malformed(page), "");
  EXPECT_FALSE(has(page, "<script"));
  EXPECT_FALSE(has(page, "\" onload=\""));
  EXPECT_FALSE(has(page, "\xff"));
  EXPECT_FALSE(has(page, "\xe2\x80\xae")) << "marks that turn the writing direction";
  EXPECT_TRUE(has(page, "&lt;script&gt;alert(1)"));
}

TEST(HtmlReport, ValuesOfTheWrongTypeCountAsAbsent) {
  for (const char* key : {"model", "bundle", "corpus", "tokens", "needle", "spectra", "channels",
                          "quantizer", "kl_floor", "command", "seed", "longest_sequence"}) {
    for (const Json& wrong :
         {Json(nullptr), Json("text"), Json(Json::array({1, "x"})), Json(-1e300),
          Json(Json::object({{"layers", {1, nullptr}}, {"sources", {3}}}))}) {
      Json r = report();
      r[key] = wrong;
      EXPECT_EQ(malformed(render_html_report(r)), "") << key << " " << wrong.dump();
    }
  }
  for (const char* key : {"bpe", "ppl", "kl", "top1", "niah", "output_nmse", "nll_increase"}) {
    for (const Json& wrong : {Json(nullptr), Json("text"), Json(Json::array({1, "x"})), Json(7)}) {
      Json r = report();
      r["methods"]["bundle"][key] = wrong;
      EXPECT_EQ(malformed(render_html_report(r)), "") << key << " " << wrong.dump();
    }
  }
  Json r = report();
  r["methods"]["oscar"] = "text";
  EXPECT_EQ(malformed(render_html_report(r)), "");
}

TEST(HtmlReport, SectionsWithoutDataAreLeftOutWithAReason) {
  Json r = report();
  for (const char* key : {"needle", "spectra", "channels"}) r.erase(key);
  r["bundle"] = nullptr;
  for (auto& [name, m] : r["methods"].items()) m.erase("niah");
  const std::string page = render_html_report(r);
  EXPECT_EQ(malformed(page), "");
  EXPECT_FALSE(has(page, "<h2>Needles"));
  EXPECT_FALSE(has(page, "<h2>Inside the bundle"));
  EXPECT_TRUE(has(page, "the run had no needle tasks (--tasks niah)"));
  EXPECT_TRUE(has(page, "the run had no bundle (--bundle)"));
  EXPECT_TRUE(has(page, "Retrieval from long prompts (--tasks niah)"));
}

TEST(HtmlReport, NeedlesAloneMakeAPage) {
  Json r = report();
  for (const char* key :
       {"tokens", "sequences", "first_position", "longest_sequence", "kl_floor"}) {
    r.erase(key);
  }
  for (auto& [name, m] : r["methods"].items()) {
    for (const char* key : {"nll", "ppl", "kl", "top1", "nll_increase", "output_nmse"})
      m.erase(key);
  }
  r["methods"]["bundle"]["bpe"]["3968"] = 3.36;
  const std::string page = render_html_report(r);
  EXPECT_EQ(malformed(page), "");
  EXPECT_TRUE(has(page, "Bits per value at 3,968")) << "of the longest prompt";
  EXPECT_TRUE(has(page, "<h2>Needles"));
  EXPECT_FALSE(has(page, "<h2>Divergence"));
}

TEST(HtmlReport, NeedleCellsThatFoundMoreThanWasAskedAreLeftOut) {
  Json r = report();
  Json& cells = r["methods"]["bundle"]["niah"]["cells"];
  const size_t shown = occurrences(render_html_report(r), " passed</title>");
  ASSERT_GT(shown, cells.size());
  cells[0]["passed"] = 1e30;
  cells[1]["passed"] = -1;
  const std::string page = render_html_report(r);
  EXPECT_EQ(malformed(page), "");
  EXPECT_EQ(occurrences(page, " passed</title>"), shown - 2);
}

TEST(HtmlReport, ErrorsOfAnySizeHaveAShade) {
  Json r = report();
  Json& heads = r["methods"]["bundle"]["output_nmse_heads"];
  for (const size_t count : {2, 40}) {
    heads = Json::array();
    for (int layer = 0; layer < 2; ++layer) {
      heads.push_back(std::vector<double>(count, layer == 0 ? 1e-200 : 1e200));
    }
    const std::string page = render_html_report(r);
    EXPECT_EQ(malformed(page), "");
    EXPECT_TRUE(has(page, "head by head"));
    EXPECT_FALSE(has(page, "class=\"h-")) << count << " heads";
  }
}

TEST(HtmlReport, OneMethodAloneAndBf16AloneMakeAPage) {
  Json one = report();
  for (const char* name : {"exact", "identity", "oscar"}) one["methods"].erase(name);
  EXPECT_EQ(malformed(render_html_report(one)), "");
  EXPECT_TRUE(has(render_html_report(one), "Published OSCAR on the same text (--compare oscar"));
  one["methods"].erase("bundle");
  const std::string page = render_html_report(one);
  EXPECT_EQ(malformed(page), "");
  EXPECT_TRUE(has(page, "nothing to judge"));
}

TEST(HtmlReport, ManyLayersAndManyMethodsStaySmall) {
  Json r = report(64);
  const Json bundle = r["methods"]["bundle"];
  r["methods"].erase("bundle");
  for (int i = 0; i < 16; ++i)
    r["methods"][fmt::format("method-{}", i)] = method(0.02 + i, 64, 300);
  r["methods"]["bundle"] = bundle;
  for (int l = 0; l < 64; ++l) {
    r["methods"][fmt::format("bundle@layer:{}", l)] = method(0.001 * (1 + l % 7), 64, 380);
  }
  const std::string page = render_html_report(r);
  EXPECT_EQ(malformed(page), "");
  EXPECT_LT(page.size(), 300u << 10);
  EXPECT_TRUE(has(page, "What one layer at 2 bits costs"));
  EXPECT_TRUE(has(page, "11 more methods are in the table only"));
}

TEST(HtmlReport, RefusesWhatIsNoReport) {
  for (const Json& wrong : {Json(nullptr), Json(Json::array()), Json(Json::object()),
                            Json{{"schema", "oscar-eval-2"}}, Json{{"schema", "oscar-eval-1"}}}) {
    EXPECT_THROW(render_html_report(wrong), Error) << wrong.dump();
  }
}

TEST(HtmlReport, AKeyRowIsDrawnWithAndWithoutItsTransform) {
  const std::string page = render_html_report(report());
  EXPECT_TRUE(has(page, "Layer 1, KV head 0, the one with the largest outlier channel (12 times"));
  // By hand: (0.1^2 + 0.2^2 + 0.4^2) / (81 + 0.21) = 0.0026, and 0.25 / 6 = 0.0417.
  EXPECT_TRUE(has(page, "squared error 0.3% of the square"));
  EXPECT_TRUE(has(page, "squared error 4.2% of the square"));
  EXPECT_EQ(occurrences(page, "class=\"dots "), 2u);

  Json r = report();
  r["methods"].erase("identity");
  const std::string alone = render_html_report(r);
  EXPECT_TRUE(has(alone, "A key row as the model has it"));
  EXPECT_FALSE(has(alone, "without a transform"));
  EXPECT_EQ(occurrences(alone, "class=\"dots "), 1u);

  r["methods"]["bundle"]["key_row"]["read_back"] = {1.0};  // of another length
  EXPECT_FALSE(has(render_html_report(r), "The same row after the transform"));
  r.erase("key_row");
  EXPECT_FALSE(has(render_html_report(r), "One key row"));
}

TEST(HtmlReport, ErrorsByHeadAreAMapOfAnySize) {
  const auto page_of = [](int layers, int heads) {
    Json r = report(layers);
    for (int l = 0; l < layers; ++l) {
      Json row = Json::array();
      for (int h = 0; h < heads; ++h) row.push_back(0.001 * (1 + l) * (1 + h));
      r["methods"]["bundle"]["output_nmse_heads"].push_back(row);
    }
    return render_html_report(r);
  };
  const std::string few = page_of(4, 2), many = page_of(48, 40), most = page_of(128, 64);
  for (const std::string& page : {few, many, most}) EXPECT_EQ(malformed(page), "");
  EXPECT_TRUE(has(few, "from 0.10 to 0.80. Largest in layer 3, head 1: 0.80%."));
  EXPECT_TRUE(has(few, "layer 2, KV head 1: 0.60%"));
  EXPECT_TRUE(has(many, "Largest in layer 47, head 39"));
  EXPECT_TRUE(has(many, "<path class=\"h6\""));
  EXPECT_LT(many.size() - few.size(), 60u << 10);
  EXPECT_FALSE(has(most, "head by head")) << "more cells than can be told apart";
}

TEST(HtmlReport, KlAgainstBitsHasAllMethodsAndBf16) {
  const std::string page = render_html_report(report());
  const size_t begin = page.find("aria-labelledby=\"bits-t");
  ASSERT_NE(begin, std::string::npos);
  const std::string svg = page.substr(begin, page.find("</svg>", begin) - begin);
  for (const char* name : {"identity", "oscar", "bundle", "bf16"}) {
    EXPECT_TRUE(has(svg, fmt::format("<title>{}</title>", name))) << name;
    EXPECT_TRUE(has(svg, fmt::format(">{}</text>", name))) << name;
  }
  EXPECT_FALSE(has(svg, "exact")) << "16 bits that are no cache";
}

TEST(HtmlReport, IntervalsOfANegativeMeanAreInOrder) {
  Json r = report();
  r["methods"]["exact"]["kl"]["mean"] = -2e-10;
  r["methods"]["exact"]["kl"]["se"] = 1e-10;
  EXPECT_TRUE(has(render_html_report(r), "−2.0×10⁻¹⁰ <span class=\"iv\">[−2.0×10⁻¹⁰, "));
}

TEST(HtmlReport, MemoryIsQuotedAndDrawnForTheModelsOwnContext) {
  Json r = report();
  r["model"]["max_positions"] = 12288;
  const std::string page = render_html_report(r);
  // By hand: (16 x 320 + 2.25 x 11,968) / 12,288 = 2.608; 16 / 2.608 = 6.1.
  EXPECT_TRUE(has(page, "At 12K tokens, all that the model serves, the cache takes 2.61 bits"));
  EXPECT_TRUE(has(page, "6.1 times less memory"));
  EXPECT_TRUE(has(page, "of BF16, at 12K tokens"));
  EXPECT_FALSE(has(page, "128K"));
  EXPECT_TRUE(has(page, "What one request takes"));
  EXPECT_TRUE(has(page, "Requests that fit into 16 GiB of cache"));
  EXPECT_EQ(malformed(page), "");
}

TEST(HtmlReport, BitsBetweenReportedLengthsFollowFromTwoOfThem) {
  MethodFigures m;
  EXPECT_FALSE(m.bits_at(4096).has_value());
  m.bits = {{8192, (16 * 320 + 2.25 * 7872) / 8192}, {131072, (16 * 320 + 2.25 * 130752) / 131072}};
  EXPECT_NEAR(*m.bits_at(32768), (16 * 320 + 2.25 * 32448) / 32768, 1e-12);
  EXPECT_NEAR(*m.bits_at(1 << 20), (16 * 320 + 2.25 * ((1 << 20) - 320)) / (1 << 20), 1e-12);
  EXPECT_EQ(*m.bits_at(100), 16);
}

}  // namespace

// How texts of a page are escaped and shortened.

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
