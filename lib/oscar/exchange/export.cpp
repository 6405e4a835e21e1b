// Decide what the stack runs, write it, look at what was written.
#include "oscar/exchange/export.h"

#include <fmt/format.h>

#include <algorithm>

#include "oscar/base/atomic_file.h"
#include "oscar/base/atomic_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/base/sha256.h"
#include "oscar/exchange/arrays.h"
#include "oscar/exchange/gguf_rotations.h"
#include "oscar/exchange/launch.h"
#include "oscar/exchange/manifest.h"
#include "oscar/exchange/mlx_rotations.h"
#include "oscar/exchange/torch_rotations.h"
#include "oscar/exchange/verify_export.h"
#include "oscar/io/npz.h"
#include "oscar/io/safetensors_arrays.h"
#include "oscar/stacks/describe.h"

namespace oscar {
namespace {

std::string all_of(const std::vector<Obstacle>& obstacles) {
  std::string text;
  for (const Obstacle& obstacle : obstacles) text += (text.empty() ? "" : "; ") + obstacle.text;
  return text;
}

StackPlan plan_of(const Bundle& bundle, const std::string& from, const ExchangeFormat& format,
                  bool reduce) {
  const Stack& stack = find_stack(format.stack);
  StackPlan plan = plan_for(stack, bundle);
  if (plan.verdict() == StackVerdict::kAsIs) return plan;
  const bool fits = is_served(stack);
  const std::string fitting =
      fits ? fmt::format("oscar-calibrate --for {} fits what runs as is", stack.name) : "";
  if (plan.verdict() == StackVerdict::kCannot) {
    throw Error({.what = fmt::format("{} can run nothing of this bundle", format.name),
                 .where = from,
                 .found = all_of(plan.obstacles),
                 .hint = fitting});
  }
  if (!reduce) {
    const auto line = plans_json({plan})[0]["line"].get<std::string>();
    throw Error({.what = fmt::format("{} cannot run this bundle's own transforms", format.name),
                 .where = from,
                 .found = all_of(plan.obstacles),
                 .hint = fmt::format("--reduce writes what it can ({})", line) +
                         (fitting.empty() ? "" : ";\n            " + fitting)});
  }
  return plan;
}

std::vector<const LayerTransforms*> layers_of(const Bundle& bundle, BundleVariant variant) {
  std::vector<const LayerTransforms*> layers;
  for (size_t i = 0; i < bundle.layers.size(); ++i) {
    layers.push_back(variant == BundleVariant::kOwn              ? &bundle.layers[i]
                     : variant == BundleVariant::kPortableShared ? &bundle.portable[i].shared
                                                                 : &bundle.portable[i].per_head);
  }
  return layers;
}

void write_files(const ExchangeFormat& format, const TransformSet& set,
                 const std::filesystem::path& folder, const std::filesystem::path& base) {
  const std::filesystem::path keys = folder / format.key_file;
  switch (format.layout) {
    case FileLayout::kTorchShared:
    case FileLayout::kTorchPerHead:
    case FileLayout::kTorchLocked: {
      const TorchLayout layout = torch_layout(format.layout);
      write_torch_rotations(keys, set, Side::kKey, layout);
      write_torch_rotations(folder / format.value_file, set, Side::kValue, layout);
      break;
    }
    case FileLayout::kMlx:
      write_mlx_rotations(keys, set, Side::kKey);
      write_mlx_rotations(folder / format.value_file, set, Side::kValue);
      write_mlx_manifest(folder, set);
      break;
    case FileLayout::kGguf:
      write_gguf_rotations(keys, set, base);
      break;
    case FileLayout::kNpz:
      write_npz(keys, to_arrays(set));
      break;
    case FileLayout::kSafetensors:
      write_safetensors(keys, to_arrays(set));
      break;
  }
}

void require_every_layer(const Bundle& bundle, const std::string& from) {
  for (const LayerTransforms& layer : bundle.layers) {
    if (layer.geometry.fitted()) continue;
    throw Error({.what = "these files hold a transform for every layer, and local layers have none",
                 .where = fmt::format("{}: layer {}", from, layer.geometry.layer_id),
                 .expected = "a bundle of a model whose layers all attend to all tokens",
                 .hint = "--to statistics writes the sums of the other layers"});
  }
}

// One matrix for all heads: by the layout, or, where it has places for either, by the variant.
bool writes_shared(const ExchangeFormat& format, const std::optional<StackPlan>& plan) {
  if (format.layout == FileLayout::kTorchShared || format.layout == FileLayout::kGguf) return true;
  return format.layout == FileLayout::kMlx && plan &&
         plan->run->variant == BundleVariant::kPortableShared;
}

}  // namespace

ExportResult export_bundle(const Bundle& bundle, const std::string& from,
                           const ExchangeFormat& format, bool reduce,
                           const std::filesystem::path& to, const std::filesystem::path& base) {
  if (bundle.statistics_only) {
    throw Error({.what = "a statistics file has no transforms",
                 .where = from,
                 .hint = "oscar-bundle fit makes a bundle of it"});
  }
  if (!base.empty() && format.layout != FileLayout::kGguf) {
    throw Error({.what = "only gguf-rot goes into a model's file", .where = base.string()});
  }
  ExportResult result;
  if (format.stack != nullptr) result.plan = plan_of(bundle, from, format, reduce);
  require_every_layer(bundle, from);
  const BundleVariant variant = result.plan ? result.plan->run->variant : BundleVariant::kOwn;
  const TransformSet set =
      transform_set(layers_of(bundle, variant), writes_shared(format, result.plan));
  AtomicFolder folder(to);
  write_files(format, set, folder.temporary(), base);
  Json files = Json::object();
  for (const char* name : {format.key_file, format.value_file}) {
    if (name != nullptr) files[name] = sha256_of_file(folder.temporary() / name);
  }
  const Json manifest = make_manifest(bundle, format, result.plan, set, files);
  write_file_atomically(folder.temporary() / kManifestName, manifest.dump(1) + "\n");
  write_file_atomically(folder.temporary() / kLaunchName,
                        launch_text(bundle, format, result.plan, !base.empty()));
  for (const Finding& finding : verify_export(format, folder.temporary())) {
    if (!finding.ok) {
      throw Error({.what = "what was written does not read back: " + finding.check,
                   .where = to.string(),
                   .found = finding.detail,
                   .hint = "oscar-bundle verify checks the bundle"});
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.temporary())) {
    result.files.push_back(entry.path().filename().string());
  }
  std::sort(result.files.begin(), result.files.end());
  result.layers = set.size();
  stop_if_requested("stopped; nothing was written");
  folder.commit();
  return result;
}

}  // namespace oscar
