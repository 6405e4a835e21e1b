// A matrix of fits and texts, layer by layer.
#include "oscar/inspect/coverage.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/base/numbers.h"
#include "oscar/base/printable.h"
#include "oscar/base/text_lines.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/refit.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fitted_layers.h"
#include "oscar/fit/predicted_loss.h"

namespace oscar {
namespace {

constexpr const char* kJoined = "joined";
constexpr Side kSides[] = {Side::kKey, Side::kValue};

// [fits][scored]: sums over heads and layers, and the largest mean of one layer.
struct SideMatrix {
  std::vector<std::vector<double>> sum, worst;
  int64_t heads = 0;

  explicit SideMatrix(size_t files)
      : sum(files + 1, std::vector<double>(files)), worst(files + 1, std::vector<double>(files)) {}
};

void check_files(const std::vector<Bundle>& files, const std::vector<std::string>& names) {
  for (size_t i = 0; i < files.size(); ++i) {
    require_statistics(files[i], names[i]);
    require_same_model(files[0], files[i], names[0], names[i]);
  }
}

// One layer: fits of each file and of all, scored on each file.
void add_layer(const std::vector<Bundle>& files, size_t layer, const FitOptions& options,
               const Rope& rope, SideMatrix* sides) {
  std::vector<LayerTransforms> fits;
  std::vector<LayerMoments> moments;
  LayerStatistics joined = files[0].statistics[layer];
  for (size_t i = 0; i < files.size(); ++i) {
    const LayerStatistics& sums = files[i].statistics[layer];
    fits.push_back(fit_layer(sums, options, rope));
    moments.push_back(scoring_moments(sums, options, rope));
    if (i > 0) add_statistics(joined, sums);
  }
  fits.push_back(fit_layer(joined, options, rope));
  for (const Side side : kSides) {
    SideMatrix& matrix = sides[static_cast<size_t>(side)];
    for (size_t scored = 0; scored < files.size(); ++scored) {
      const auto own = predicted_losses(side_of(fits[scored], side), side, moments[scored]);
      for (size_t fit = 0; fit < fits.size(); ++fit) {
        const auto ratios = loss_ratios(side_of(fits[fit], side), side, moments[scored], own);
        const double sum = std::accumulate(ratios.begin(), ratios.end(), 0.0);
        matrix.sum[fit][scored] += sum;
        double& worst = matrix.worst[fit][scored];
        worst = std::max(worst, sum / static_cast<double>(own.size()));
      }
    }
    matrix.heads += joined.geometry.num_kv_heads;
  }
}

double largest_loss(const Json& result, size_t fit, size_t scored) {
  return std::max(result["key"][fit][scored].get<double>(),
                  result["value"][fit][scored].get<double>()) -
         1;
}

Json warnings_of(const Json& result, const std::vector<Bundle>& files,
                 const std::vector<std::string>& names) {
  Json warnings = Json::array();
  bool any = false;
  for (size_t fit = 0; fit < names.size(); ++fit) {
    std::string badly;
    for (size_t scored = 0; scored < names.size(); ++scored) {
      const double loss = largest_loss(result, fit, scored);
      if (loss <= kPoorCoverage) continue;
      badly +=
          fmt::format("{}{} by {}", badly.empty() ? "" : ", ", names[scored], percent(loss, 0));
    }
    if (badly.empty()) continue;
    any = true;
    warnings.push_back(
        fmt::format("a fit on {} alone raises the predicted loss on {}", names[fit], badly));
  }
  if (any) {
    double most = 0;
    for (size_t scored = 0; scored < names.size(); ++scored) {
      most = std::max(most, largest_loss(result, names.size(), scored));
    }
    warnings.push_back(
        fmt::format("calibrate on all of these texts joined (or add what is collected with "
                    "oscar-bundle merge): that raises it by {} at most",
                    percent(most, 0)));
  }
  for (size_t i = 0; i < files.size(); ++i) {
    if (!needs_more_text(files[i].convergence)) continue;
    warnings.push_back(
        fmt::format("{} holds too little text of its own kind: chance is part of its row and "
                    "column",
                    names[i]));
  }
  return warnings;
}

void add_matrix(std::string& text, const char* title, const Json& matrix) {
  constexpr size_t kLabel = 10, kWidth = 8, kColumns = 80;
  constexpr size_t kPerBlock = (kColumns - kLabel) / kWidth;
  const size_t files = matrix.front().size();
  for (size_t first = 0; first < files; first += kPerBlock) {
    const size_t end = std::min(files, first + kPerBlock);
    text += fmt::format("\n{:<{}}", first == 0 ? title : "", kLabel);
    for (size_t scored = first; scored < end; ++scored) {
      text += fmt::format("{:>{}}", scored + 1, kWidth);
    }
    for (size_t fit = 0; fit <= files; ++fit) {
      text += fmt::format("\n{:<{}}", fit == files ? kJoined : std::to_string(fit + 1), kLabel);
      for (size_t scored = first; scored < end; ++scored) {
        text += fmt::format("{:>{}.3f}", matrix[fit][scored].get<double>(), kWidth);
      }
    }
    text += "\n";
  }
}

}  // namespace

Json coverage(const std::vector<Bundle>& files, const std::vector<std::string>& names) {
  check_files(files, names);
  FitOptions run;
  run.center = true;
  for (const Bundle& file : files) {
    run.position_span = std::max(run.position_span, file.position_span);
  }
  const FitOptions options = judging_fit(run);
  const Rope rope = recorded_rope(files[0], names[0]);
  SideMatrix sides[] = {SideMatrix(files.size()), SideMatrix(files.size())};
  for (size_t layer = 0; layer < files[0].statistics.size(); ++layer) {
    // One that is never quantized in any file.
    const bool quantized = std::any_of(files.begin(), files.end(), [layer](const Bundle& file) {
      return file.statistics[layer].geometry.quantized;
    });
    if (quantized) add_layer(files, layer, options, rope, sides);
  }
  Json result = {{"files", Json::array()},
                 {"position_span", run.position_span},
                 {"poor_coverage", kPoorCoverage}};
  for (size_t i = 0; i < files.size(); ++i) {
    result["files"].push_back(
        {{"name", names[i]}, {"tokens", first_fitted(files[i].statistics, names[i]).count_kv}});
  }
  for (const Side side : kSides) {
    SideMatrix& matrix = sides[static_cast<size_t>(side)];
    if (matrix.heads == 0) {
      throw Error({.what = "no layer of this model is quantized: there is nothing to compare",
                   .where = names[0]});
    }
    for (auto& row : matrix.sum) {
      for (double& entry : row) entry /= static_cast<double>(matrix.heads);
    }
    const std::string name = side == Side::kKey ? "key" : "value";
    result[name] = matrix.sum;
    result[name + "_worst_layer"] = matrix.worst;
  }
  result["warnings"] = warnings_of(result, files, names);
  return result;
}

std::string coverage_text(const Json& coverage) {
  std::string text;
  const Json& files = coverage["files"];
  for (size_t i = 0; i < files.size(); ++i) {
    add_line(text, std::to_string(i + 1),
             fmt::format("{} ({} tokens)", printable(files[i]["name"].get<std::string>()),
                         count(files[i]["tokens"].get<double>())));
  }
  add_matrix(text, "keys", coverage["key"]);
  add_matrix(text, "values", coverage["value"]);
  text +=
      "\nPredicted loss of a fit on the row's text, on the column's text, over that of\n"
      "the column's own fit. 1.000 loses nothing; joined is a fit on all texts.\n";
  return text;
}

}  // namespace oscar
