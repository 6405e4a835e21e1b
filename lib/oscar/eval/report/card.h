// The model card of a bundle.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/measured.h"
#include "oscar/eval/report/answers.h"
#include "oscar/eval/report/report_data.h"

namespace oscar {

// A stored evaluation, and whether it is one of a given bundle.

struct BundleEvaluation {
  std::string file;  // its name, for people
  ReportData data;
  std::string tool;            // "0.1.0 (commit)", of the program that measured
  std::string content_sha256;  // of the bundle that was measured
  MeasuredKl kl;

  const MethodFigures& measured() const { return *data.find("bundle"); }
};

// Throws Error naming `file` and what differs unless `report` (eval/SCHEMA.md) is one of `bundle`:
// method "bundle" over the same content, or content that is served alike (serving_sha256), for the
// same weights, with the bundle's own row format and windows, and no figure outside its interval.
BundleEvaluation evaluation_of(const Bundle& bundle, const Json& report, const std::string& file);

// That of the report that is stored in the bundle, whose name is `file`; none where there is none,
// or where it is of another cache (left_out_evaluation of bundle/backend_plan.h).
std::optional<BundleEvaluation> stored_evaluation(const Bundle& bundle, const std::string& file);

// The licence that a checkpoint states of itself.

struct StatedLicence {
  std::string id = {};               // "apache-2.0", "other"
  std::string name = {}, link = {};  // of "other"; may be empty
  std::string place = {};            // where it stands: "README.md", "general.license"
};

// Of a Hugging Face folder the entries license, license_name and license_link of README.md's front
// matter, of a GGUF file general.license and general.license.name and .link, or else that of the
// README.md beside it. None where nothing is stated, or not in one plain word: a licence is never
// guessed. `model` is a Checkpoint's path.
std::optional<StatedLicence> read_licence(const std::filesystem::path& model);

// A bundle's model card: Markdown that is published beside it.

// An export in a folder beside the card.
struct CardExport {
  std::string folder;  // relative to the card
  Json manifest;       // its oscar-export.json (bundle/export.h)
};

struct CardRequest {
  std::string bundle_file;  // the name under which the card speaks of the bundle
  std::vector<BundleEvaluation> evaluations;
  std::optional<StatedLicence> licence;
  std::string base_model;  // ORG/NAME on Hugging Face; empty: not known
  std::vector<CardExport> exports;
  std::optional<Answers> answers = std::nullopt;
};

// Front matter of Hugging Face's hub (license, base_model, library_name, tags), then what the
// bundle is, the figures of the evaluations with device, text and tokens, sample answers, how it is
// served, how it was made and its limits. No figure but those of the evaluations. Texts of other
// files are escaped. Equal arguments give equal bytes. Throws Error for a statistics file, for an
// export or answers of another bundle, and for a base_model that is no ORG/NAME.
std::string model_card(const Bundle& bundle, const CardRequest& request);

}  // namespace oscar
