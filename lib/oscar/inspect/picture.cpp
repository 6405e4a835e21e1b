// Shares of eigenvalues and root mean squares of channels, rounded to what a picture can show.
#include "oscar/inspect/picture.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "oscar/fit/fitted_layers.h"
#include "oscar/fit/spectrum.h"

namespace oscar {
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
