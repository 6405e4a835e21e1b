// How well texts stand for each other, and pictures of a bundle.
#include "oscar/bundle/coverage.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/merge.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/head_fit.h"

namespace oscar {

// A matrix of fits and texts, layer by layer.

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
    text += '\n';
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

// Shares of eigenvalues and root mean squares of channels, rounded to what a picture can show.

namespace {

constexpr size_t kMostRanks = 32;

Json rounded_list(const VectorD& values) {
  Json list = Json::array();
  for (const double x : values) list.push_back(picture_number(x));
  return list;
}

// Places 1 .. d, dense at the front where spectra fall fastest.
std::vector<int> ranks_for(int d) {
  std::vector<int> ranks;
  for (size_t i = 0; i < kMostRanks; ++i) {
    const double part = static_cast<double>(i) / static_cast<double>(kMostRanks - 1);
    const int rank = static_cast<int>(std::lround(std::pow(d, part)));
    if (ranks.empty() || rank > ranks.back()) ranks.push_back(rank);
  }
  return ranks;
}

Json side_spectrum(const SideTransform& side, const std::vector<int>& ranks) {
  VectorD share = VectorD::Zero(static_cast<int>(ranks.size()));
  double effective_rank = 0;
  int heads = 0;
  for (int h = 0; h < side.eigenvalues.count; ++h) {
    const VectorD ascending = side.eigenvalues[h];
    const SpectrumSummary summary = summarise_spectrum(ascending);
    if (!(summary.trace > 0)) continue;
    ++heads;
    effective_rank += summary.effective_rank;
    for (size_t i = 0; i < ranks.size(); ++i) {
      share[static_cast<int>(i)] +=
          std::max(0.0, ascending[summary.dimension - ranks[i]]) / summary.trace;
    }
  }
  if (heads == 0) return nullptr;
  return {{"share", rounded_list(share / heads)},
          {"effective_rank", picture_number(effective_rank / heads)}};
}

double median(VectorD values) {
  std::sort(values.begin(), values.end());
  const auto n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

double peak(const VectorD& channels) { return channels.maxCoeff() / median(channels); }

VectorD root_diagonal(const MatrixD& moment) {
  return moment.diagonal().cwiseMax(0.0).cwiseSqrt().transpose();
}

struct HeadChannels {
  VectorD before, after;  // [d] root mean square of each channel
};

HeadChannels head_channels(const MatrixStack<double>& moment, const VectorStack<double>& sum,
                           int64_t count, const SideTransform& transform, int head) {
  const MatrixD second = moment[head] / static_cast<double>(count);
  const VectorD average = sum[head] / static_cast<double>(count);
  const VectorD mean = transform.mean[head].cast<double>();
  const MatrixD forward = transform.forward[head].cast<double>();
  // The mean of (x - m)^T (x - m), from the sums of x^T x and x.
  const MatrixD about =
      second - average.transpose() * mean - mean.transpose() * average + mean.transpose() * mean;
  return {root_diagonal(second), root_diagonal(forward.transpose() * about * forward)};
}

Json side_peaks(const std::vector<HeadChannels>& heads) {
  Json json = {{"peak_before", Json::array()}, {"peak_after", Json::array()}};
  for (const HeadChannels& head : heads) {
    json["peak_before"].push_back(picture_number(peak(head.before)));
    json["peak_after"].push_back(picture_number(peak(head.after)));
  }
  return json;
}

}  // namespace

double picture_number(double x) {
  if (!std::isfinite(x)) return x;
  char text[32];
  std::snprintf(text, sizeof text, "%.3e", x);
  return std::strtod(text, nullptr);
}

Json spectra_picture(const Bundle& bundle) {
  if (bundle.layers.empty()) return nullptr;
  Json layers = Json::array();
  std::vector<int> ranks;
  bool any = false;
  for (const LayerTransforms& layer : bundle.layers) {
    if (!layer.geometry.fitted()) continue;
    if (ranks.empty()) {
      ranks = ranks_for(std::min(layer.geometry.head_dim_k, layer.geometry.head_dim_v));
    }
    Json entry = {{"layer", layer.geometry.layer_id},
                  {"key", side_spectrum(layer.key, ranks)},
                  {"value", side_spectrum(layer.value, ranks)}};
    any = any || !entry["key"].is_null() || !entry["value"].is_null();
    layers.push_back(std::move(entry));
  }
  if (!any) return nullptr;
  return {{"ranks", ranks}, {"layers", std::move(layers)}};
}

Json channels_picture(const Bundle& bundle) {
  if (bundle.layers.empty() || bundle.statistics.size() != bundle.layers.size()) return nullptr;
  Json layers = Json::array(), profile = nullptr;
  double worst = 0;
  for (size_t l = 0; l < bundle.layers.size(); ++l) {
    const LayerTransforms& transforms = bundle.layers[l];
    if (!transforms.geometry.fitted()) continue;
    const LayerStatistics& s = bundle.statistics[l];
    std::vector<HeadChannels> keys, values;
    for (int h = 0; h < s.geometry.num_kv_heads; ++h) {
      keys.push_back(head_channels(s.k_moment, s.k_sum, s.count_kv, transforms.key, h));
      values.push_back(head_channels(s.v_moment, s.v_sum, s.count_kv, transforms.value, h));
      const double height = peak(keys.back().before);
      if (std::isfinite(height) && height > worst) {
        worst = height;
        profile = {{"layer", s.geometry.layer_id},
                   {"head", h},
                   {"before", rounded_list(keys.back().before)},
                   {"after", rounded_list(keys.back().after)}};
      }
    }
    layers.push_back(
        {{"layer", s.geometry.layer_id}, {"key", side_peaks(keys)}, {"value", side_peaks(values)}});
  }
  return {{"tokens", first_fitted(bundle.statistics, bundle.model.name).count_kv},
          {"layers", std::move(layers)},
          {"profile", std::move(profile)}};
}

}  // namespace oscar
