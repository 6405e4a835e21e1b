// A bundle's model card: Markdown that is published beside it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/report/answers.h"
#include "oscar/report/bundle_evaluation.h"
#include "oscar/report/stated_licence.h"

namespace oscar {

// An export in a folder beside the card.
struct CardExport {
  std::string folder;  // relative to the card
  Json manifest;       // its oscar-export.json (exchange/manifest.h)
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
