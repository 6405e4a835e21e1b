// JSON reports of oscar-eval: the page is well-formed and runs nothing, the card comes out.
#include "bundle/sample.h"
#include "eval/report/sample.h"
#include "fuzz_case.h"
#include "oscar/eval/report/card.h"
#include "oscar/eval/report/page.h"

namespace oscar::fuzz {

// The page's style, texts and pictures, and the report as values.
const MemoryBound kMemoryBound{.fixed = size_t{4} << 20, .per_byte = 2048};

void read_untrusted(std::string_view bytes) {
  static const Bundle bundle = [] {
    Bundle made = sample::rotation_bundle(TransformKind::kBalanced);
    made.content_sha256 = "c0ffee";
    made.model.weights_fingerprint = "f00d";
    made.quantizer.quant_group_size = 128;
    return made;
  }();
  const Json report = parse_json(bytes, "report.json");
  accepted([&] {
    const BundleEvaluation evaluation = evaluation_of(bundle, report, "report.json");
    must("the card", [&] {
      return model_card(bundle, {.bundle_file = "sample.h5",
                                 .evaluations = {evaluation},
                                 .licence = {},
                                 .base_model = {},
                                 .exports = {}});
    });
  });
  const std::string page = render_html_report(report);
  const std::string problem = report_sample::malformed(page);
  require(problem.empty(), ("the page is malformed: " + problem).c_str());
  require(page.find("<script") == std::string::npos, "the page has a script");
}

}  // namespace oscar::fuzz
