// Figures are taken from the bundle's own matrices, never from what was written.
#include "oscar/exchange/manifest.h"

#include <algorithm>

#include "oscar/base/version.h"
#include "oscar/cache/numeric.h"
#include "oscar/exchange/coded_row.h"

namespace oscar {
namespace {

const char* word_of(BundleVariant variant) {
  switch (variant) {
    case BundleVariant::kOwn:
      return "own";
    case BundleVariant::kPortableShared:
      return "portable";
    case BundleVariant::kPortablePerHead:
      break;
  }
  return "portable-perhead";
}

Json probes(const TransformSet& set, Side which) {
  Json layers = Json::array();
  for (const auto& entry : set) {
    const SideTransform& side = side_of(entry.second, which);
    const std::vector<float> row = probe_row(side.forward.rows, 0);
    Json heads = Json::array();
    for (int head = 0; head < side.forward.count; ++head) {
      std::vector<double> image = probe_image(side, head, row);
      image.resize(std::min<size_t>(image.size(), kProbedNumbers));
      heads.push_back(std::move(image));
    }
    layers.push_back(std::move(heads));
  }
  return layers;
}

Json row_codes(const StackRun& run, const LayerTransforms& layer) {
  const auto codes = [&](Side which) {
    const ProbeCode code = probe_code(run, side_of(layer, which), which);
    return Json{{"codes", code.codes}, {"metadata", code.metadata}};
  };
  return {{"keys", codes(Side::kKey)}, {"values", codes(Side::kValue)}};
}

}  // namespace

std::vector<float> probe_row(int head_dim, int which) {
  std::vector<float> row(static_cast<size_t>(head_dim));
  for (int i = 0; i < head_dim; ++i) {
    row[static_cast<size_t>(i)] =
        static_cast<float>((i * i * 7 + i * (11 + which) + 5 * which) % 61 - 30) / 16;
  }
  return row;
}

std::vector<double> probe_image(const SideTransform& side, int head,
                                const std::vector<float>& row) {
  const auto matrix = side.forward[head];
  std::vector<double> image(row.size(), 0);
  for (int i = 0; i < matrix.rows(); ++i) {
    const double x =
        double{row[static_cast<size_t>(i)]} - (side.mean.empty() ? 0 : double{side.mean[head][i]});
    for (int j = 0; j < matrix.cols(); ++j) image[static_cast<size_t>(j)] += x * matrix(i, j);
  }
  return image;
}

ProbeCode probe_code(const StackRun& run, const SideTransform& side, Side which) {
  const ClipPair clip = run.clips.pair.value_or(ClipPair{});
  std::vector<float> row;
  for (const double x : probe_image(side, 0, probe_row(side.forward.rows, 0))) {
    row.push_back(bf16_to_float(float_to_bf16(static_cast<float>(x))));
  }
  const CodedRow coded = code_row(run, which == Side::kKey ? clip.key : clip.value, row);
  return {hex(coded.codes), hex(coded.metadata)};
}

Json begin_manifest(const Bundle& bundle, const char* format) {
  return {{"format", format},
          {"made_with", std::string("OSCAR Toolkit ") + kToolVersion},
          {"created_from",
           {{"content_sha256", bundle.content_sha256},
            {"model", bundle.model.name},
            {"architecture", bundle.model.architecture},
            {"weights_fingerprint", bundle.model.weights_fingerprint}}}};
}

Json make_manifest(const Bundle& bundle, const ExchangeFormat& format,
                   const std::optional<StackPlan>& plan, const TransformSet& set,
                   const Json& files) {
  const LayerTransforms& first = set.begin()->second;
  Json ids = Json::array();
  for (const auto& entry : set) ids.push_back(entry.first);
  Json manifest = begin_manifest(bundle, format.name);
  manifest.update({{"layers", std::move(ids)},
                   {"heads_k", first.key.forward.count},
                   {"heads_v", first.value.forward.count},
                   {"head_dim_k", first.key.forward.rows},
                   {"head_dim_v", first.value.forward.rows},
                   {"variant", plan ? word_of(plan->run->variant) : "own"},
                   {"sink_tokens", bundle.quantizer.sink_tokens},
                   {"recent_tokens", bundle.quantizer.recent_tokens},
                   {"quant_group_size", bundle.quantizer.quant_group_size},
                   {"row", nullptr}});
  if (plan) {
    const StackRun& run = *plan->run;
    if (run.clips.pair) manifest["clip"] = {run.clips.pair->key, run.clips.pair->value};
    if (run.relative_error) manifest["relative_error"] = *run.relative_error;
    if (run.kl_factor) manifest["kl_factor"] = *run.kl_factor;
    if (run.format) {
      manifest["metadata_dtype"] = codec_word(run.format->metadata);
      manifest["row"] = row_codes(run, first);
    }
  }
  manifest["probe"] = {{"keys", probes(set, Side::kKey)}, {"values", probes(set, Side::kValue)}};
  manifest["files"] = files;
  return manifest;
}

}  // namespace oscar
