// Bundles out of bundles: stripped, fitted again, compared.
#include "oscar/bundle/edit.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/decode.h"
#include "oscar/bundle/encode.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/moments.h"
#include "oscar/model/checkpoint/rope.h"

namespace oscar {

// What each profile drops, from the structs and from the list of what would be written.

namespace {

// Whether an object of a bundle's file is gone from its serving profile.
bool is_dropped(const std::string& path) {
  const std::string statistics = std::string("/") + schema::kStatistics;
  return path == schema::kFingerprint || path == schema::kEvaluation ||
         path.starts_with(schema::kPortable) || path.ends_with(statistics) ||
         path.find(statistics + "/") != std::string::npos;
}

}  // namespace

Bundle strip_bundle(Bundle bundle, StripProfile profile, const std::string& name) {
  if (bundle.statistics_only) {
    throw Error({.what = "a statistics file holds nothing but statistics to strip",
                 .where = name,
                 .expected = "a rotation bundle"});
  }
  bundle.statistics.clear();
  bundle.collected.reset();
  bundle.fingerprint = {};
  bundle.created_utc.clear();  // another file
  if (profile == StripProfile::kServing) {
    bundle.portable.clear();
    bundle.evaluation.reset();
  }
  return bundle;
}

std::string serving_sha256(const Bundle& bundle) {
  const EncodedFile file = encode_bundle(bundle, nullptr);
  std::vector<const hdf5::DatasetView*> datasets;
  std::vector<const hdf5::Attribute*> attributes;
  for (const auto& dataset : file.datasets) {
    if (!is_dropped(dataset.path)) datasets.push_back(&dataset);
  }
  for (const auto& attribute : file.attributes) {
    if (!is_dropped(attribute.object)) attributes.push_back(&attribute);
  }
  return content_sha256(std::move(datasets), std::move(attributes));
}

// The fit of a calibration run, without the run.

namespace {

// Says in the first fitted layer that its sums by attention are of other windows than the bundle's.
void warn_of_windows(Bundle& bundle, const Windows& collected) {
  const Windows windows = bundle.quantizer.windows();
  const auto first = std::ranges::find_if(
      bundle.layers, [](const LayerTransforms& layer) { return layer.geometry.fitted(); });
  if (first == bundle.layers.end()) return;
  first->warnings.push_back(
      fmt::format("sums weighted by attention were collected with {}, and the bundle is for {}",
                  differing(collected, windows), differing(windows, collected)));
}

// The positions to fit for: as asked, else as recorded. A file fitted to positions as collected
// (preset paper) records none, and gets all that the model serves, as a calibration does.
int64_t served_positions(const Bundle& input, int64_t asked, const std::string& name) {
  if (asked > kMostPositions) {
    throw Error({.what = "positions beyond what any model serves",
                 .where = "--position-span",
                 .expected = "at most " + std::to_string(kMostPositions),
                 .found = std::to_string(asked)});
  }
  if (asked >= 0) return asked;
  if (input.position_span > 0) return input.position_span;
  const Json& rope = input.model.rope;
  const auto served = rope.find("max_positions");
  if (served != rope.end() && served->is_number_integer() && served->get<int64_t>() > 0) {
    return served->get<int64_t>();
  }
  throw Error({.what = "the file does not say which positions are served",
               .where = name,
               .hint = "say so with --position-span N (0: fit for the positions as collected)"});
}

CacheFormat settled(CacheFormat quantizer, const BundleModel& model) {
  if (quantizer.quant_group_size == 0) quantizer.quant_group_size = model.head_dim_k;
  if (model.head_dim_k % quantizer.quant_group_size != 0 ||
      model.head_dim_v % quantizer.quant_group_size != 0) {
    throw Error({.what = "the quantization group does not divide the head",
                 .where = "--quant-group-size",
                 .expected = "a divisor of " + std::to_string(model.head_dim_k),
                 .found = std::to_string(quantizer.quant_group_size)});
  }
  return quantizer;
}

}  // namespace

Rope recorded_rope(const Bundle& input, const std::string& name) {
  // As make_rope wrote it: behind the parameters stands the length that is served, which is none.
  Json parameters = input.model.rope;
  bool interleaved = false;
  const int64_t fitted = std::max<int64_t>(1, input.position_span);
  int64_t positions = fitted;
  if (parameters.is_object()) {
    const Json served = parameters.value("max_positions", Json());
    if (served.is_number_integer() && served.get<int64_t>() <= kMostPositions) {
      positions = std::max(positions, served.get<int64_t>());
    }
    parameters.erase("max_positions");
    // What follows is of transformers' engine: this toolkit's own runs no such model.
    if (parameters.value("rope_type", Json()) == "none") return {};
    interleaved = parameters.value("interleaved", Json()) == true;
    parameters.erase("interleaved");
  }
  Rope rope = make_rope(parameters, input.model.head_dim_k, static_cast<int>(fitted), name);
  rope.interleaved = interleaved;
  rope.max_positions = static_cast<int>(positions);
  return rope;
}

Bundle refit_bundle(Bundle input, const RefitOptions& options, const std::string& name) {
  return refit_bundle(std::move(input), options, name,
                      [](const LayerStatistics& layer, const FitOptions& fit, const Rope& rope,
                         const CacheFormat&) -> RefittedLayer {
                        return {fit_layer(layer, fit, rope),
                                {fit_portable(layer, fit, Granularity::kShared, rope),
                                 fit_portable(layer, fit, Granularity::kPerHead, rope)}};
                      });
}

Bundle refit_bundle(Bundle input, const RefitOptions& options, const std::string& name,
                    const RefitLayer& fit_one) {
  require_statistics(input, name);
  FitOptions fit = options.fit;
  fit.position_span = served_positions(input, fit.position_span, name);
  const bool energy = fit.objective_v == ValueObjective::kEnergy;
  if (energy && first_fitted(input.statistics, name).v_energy_moment.empty()) {
    throw Error({.what = "the file holds no value energy moment",
                 .where = name,
                 .hint = "calibrate with --objective-v energy, or fit with --objective-v sv"});
  }
  const Rope rope = recorded_rope(input, name);
  Json held_back = held_back_part(input);
  const Windows collected = collected_windows(input);
  const bool weighted = is_weighted(input);
  Bundle out = std::move(input);
  out.statistics_only = false;
  out.preset = options.preset;
  out.method = method_name(fit.kind);
  out.composition = composition_name(fit.kind);
  out.objective_v = objective_name(fit.objective_v);
  out.granularity = granularity_name(fit.granularity);
  out.position_span = fit.position_span;
  out.quantizer = settled(options.quantizer, out.model);
  out.evaluation.reset();
  out.search = std::move(held_back);
  out.run_key.clear();  // no run made this
  out.created_utc.clear();
  out.fitted_by.clear();
  out.layers.clear();
  out.portable.clear();
  for (LayerStatistics& layer : out.statistics) {
    stop_if_requested("stopped; nothing was written");
    // The recent window decides whether a sliding layer is ever quantized.
    layer.geometry.quantized = layer.geometry.quantized_beyond(out.quantizer.recent_tokens);
    if (!layer.geometry.fitted()) {
      const LayerTransforms none = without_transforms(layer.geometry);
      out.layers.push_back(none);
      out.portable.push_back({none, none});
      continue;
    }
    RefittedLayer made = fit_one(layer, fit, rope, out.quantizer);
    out.layers.push_back(std::move(made.main));
    out.portable.push_back(std::move(made.portable));
  }
  out.row_weights = used_row_weights(out.statistics, fit);
  const Windows windows = out.quantizer.windows();
  const bool moved = weighted && collected != windows;
  if (moved && fit.row_weights == RowWeights::kAttention) warn_of_windows(out, collected);
  out.collected = moved ? std::optional(collected) : std::nullopt;
  if (!options.keep_statistics) {
    out.statistics.clear();
    out.collected.reset();
  }
  return out;
}

Bundle set_writer(Bundle bundle, Bundle statistics, const WriterOptions& options,
                  const std::string& name, const std::string& statistics_name) {
  require_statistics(statistics, statistics_name);
  require_same_model(statistics, bundle, statistics_name, name);
  FitOptions fit;
  fit.center = options.center;
  fit.row_weights = RowWeights::kAttention;  // where they were collected; else a warning says so
  fit.position_span = served_positions(statistics, options.position_span, statistics_name);
  const Rope rope = recorded_rope(statistics, statistics_name);
  const bool with_metric = options.scale_correction == ScaleCorrection::kMetric;
  const bool with_feedback = options.rounding == Rounding::kShaped;
  std::vector<LayerStatistics>& sums = statistics.statistics;
  for (size_t i = 0; i < bundle.layers.size(); ++i) {
    LayerTransforms& layer = bundle.layers[i];
    // The recent window decides whether a sliding layer is ever quantized.
    sums.at(i).geometry.quantized = layer.geometry.quantized;
    if (!layer.geometry.fitted()) continue;
    const LayerMoments moments = layer_moments(sums[i], fit, rope);
    if (!moments.warning.empty()) layer.warnings.push_back(moments.warning);
    const auto write = [&](SideTransform& side, Side which, const VectorStack<double>& mean,
                           const MatrixStack<double>& weight) {
      const std::string where = fmt::format("layer {}, {}", layer.geometry.layer_id,
                                            which == Side::kKey ? "keys" : "values");
      if (options.center && !is_centered(side)) {
        for (int head = 0; head < mean.count; ++head) side.mean[head] = mean[head].cast<float>();
      }
      std::ranges::fill(side.recipe.scale_correction, options.scale_correction);
      set_metric(side, which, weight, with_metric, with_feedback, where);
      require_valid(side, which, name + ": " + where);
    };
    write(layer.key, Side::kKey, moments.key_mean, moments.query);
    write(layer.value, Side::kValue, moments.value_mean, moments.output_metric);
  }
  bundle.row_weights = used_row_weights(sums, fit);
  bundle.position_span = fit.position_span;
  const Windows collected = collected_windows(statistics);
  if (is_weighted(statistics) && collected != bundle.quantizer.windows()) {
    warn_of_windows(bundle, collected);
  }
  const CorpusRecord& corpus = statistics.corpus;
  bundle.corpus.sources.insert(bundle.corpus.sources.end(), corpus.sources.begin(),
                               corpus.sources.end());
  bundle.corpus.tokens += corpus.tokens;
  bundle.fingerprint = statistics.fingerprint;
  return bundle;
}

// Comparison of two files as flat lists, so that names this build does not know count too.

namespace {

constexpr size_t kLongestText = 60;

std::string text_of(const hdf5::AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    return text->size() > kLongestText ? text->substr(0, kLongestText) + "..." : *text;
  }
  if (const auto* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  return fmt::format("{}", std::get<double>(value));
}

bool is_compared(const std::string& object, const std::string& name) {
  return object != "/" || (name != schema::kContentHash && name != schema::kCreated &&
                           !name.starts_with(schema::kToolPrefix));
}

std::string dataset_difference(const hdf5::Dataset& a, const hdf5::Dataset& b) {
  if (a.dtype() != b.dtype() || a.shape != b.shape) {
    return fmt::format("{} {} against {} {}", hdf5::dtype_name(a.dtype()),
                       hdf5::shape_text(a.shape), hdf5::dtype_name(b.dtype()),
                       hdf5::shape_text(b.shape));
  }
  if (a.data == b.data) return "";
  return std::visit(
      [&b](const auto& left) {
        const auto& right = std::get<std::decay_t<decltype(left)>>(b.data);
        double largest = 0, scale = 0;
        size_t count = 0;
        for (size_t i = 0; i < left.size(); ++i) {
          const auto x = static_cast<double>(left[i]), y = static_cast<double>(right[i]);
          if (left[i] != right[i]) ++count;
          largest = std::max(largest, std::abs(x - y));
          scale = std::max({scale, std::abs(x), std::abs(y)});
        }
        return fmt::format("{} of {} elements differ, by {:.3g} at most (largest entry {:.3g})",
                           count, left.size(), largest, scale);
      },
      a.data);
}

void only_in(std::vector<std::string>& lines, const std::string& path, const char* which) {
  lines.push_back(fmt::format("{}: only in {}", path, which));
}

}  // namespace

std::vector<std::string> diff_bundles(const std::filesystem::path& a,
                                      const std::filesystem::path& b) {
  const RawFile first = load_raw(a), second = load_raw(b);
  for (const RawFile* raw : {&first, &second}) {
    check_format(*raw);
    check_content_hash(*raw);
  }
  std::vector<std::string> lines;
  std::set<std::string> objects;
  for (const RawFile* raw : {&first, &second}) {
    for (const auto& object : raw->objects) objects.insert(object.path);
  }
  const auto find = [](const auto& map, const std::string& key) {
    const auto place = map.find(key);
    return place == map.end() ? nullptr : &place->second;
  };
  const auto has = [](const RawFile& raw, const std::string& path) {
    return std::binary_search(raw.objects.begin(), raw.objects.end(),
                              hdf5::ObjectInfo{path, false, "", {}},
                              [](const auto& x, const auto& y) { return x.path < y.path; });
  };
  static const std::map<std::string, hdf5::AttributeValue> kNone;
  for (const auto& path : objects) {
    if (!has(first, path) || !has(second, path)) {
      // Of a group that one file lacks, the group's own line says enough.
      const std::string parent = path.substr(0, path.rfind('/'));
      if (parent.empty() || (has(first, parent) && has(second, parent))) {
        only_in(lines, path, has(first, path) ? "A" : "B");
      }
      continue;
    }
    const auto* left = find(first.attributes, path);
    const auto* right = find(second.attributes, path);
    const auto& mine = left != nullptr ? *left : kNone;
    const auto& other = right != nullptr ? *right : kNone;
    for (const auto& [name, value] : mine) {
      if (!is_compared(path, name)) continue;
      const auto* theirs = find(other, name);
      const std::string label = path + " attribute " + name;
      if (theirs == nullptr) {
        only_in(lines, label, "A");
      } else if (value != *theirs) {
        lines.push_back(fmt::format("{}: {} against {}", label, text_of(value), text_of(*theirs)));
      }
    }
    for (const auto& entry : other) {
      if (is_compared(path, entry.first) && !mine.contains(entry.first)) {
        only_in(lines, path + " attribute " + entry.first, "B");
      }
    }
    const auto* data = find(first.datasets, path);
    const auto* other_data = find(second.datasets, path);
    if ((data == nullptr) != (other_data == nullptr)) {
      lines.push_back(path + ": a group against a dataset");
    } else if (data != nullptr) {
      const std::string text = dataset_difference(*data, *other_data);
      if (!text.empty()) lines.push_back(path + ": " + text);
    }
  }
  return lines;
}

// Sampling rule and hashes, to the file and back.

namespace {

// What decides which hashes a text has (SCHEMA.md). Another number at its end, another rule.
constexpr const char* kRule = "smallest of ngram_hash 1";
constexpr const char *kNgram = "ngram", *kCapacity = "capacity", *kRuleName = "rule";

[[noreturn]] void refuse(const RawFile& raw, const std::string& what, const std::string& expected,
                         const std::string& found) {
  throw Error({.what = what,
               .where = raw.name + ": " + schema::kFingerprint,
               .expected = expected,
               .found = found});
}

bool has_attribute(const RawFile& raw, const char* name, const hdf5::AttributeValue& value) {
  const auto object = raw.attributes.find(schema::kFingerprint);
  if (object == raw.attributes.end()) return false;
  const auto attribute = object->second.find(name);
  return attribute != object->second.end() && attribute->second == value;
}

}  // namespace

void encode_fingerprint(const NgramFingerprint& fingerprint, EncodedFile& file) {
  if (fingerprint.empty()) return;
  file.datasets.push_back({schema::kFingerprint,
                           hdf5::Dtype::kI64,
                           {fingerprint.hashes.size()},
                           fingerprint.hashes.data(),
                           true});
  file.attributes.push_back({schema::kFingerprint, kNgram, int64_t{kNgramTokens}});
  file.attributes.push_back({schema::kFingerprint, kCapacity, kFingerprintCapacity});
  file.attributes.push_back({schema::kFingerprint, kRuleName, std::string(kRule)});
}

NgramFingerprint decode_fingerprint(const RawFile& raw) {
  const auto place = raw.datasets.find(schema::kFingerprint);
  const bool known = place != raw.datasets.end() &&
                     has_attribute(raw, kRuleName, std::string(kRule)) &&
                     has_attribute(raw, kNgram, int64_t{kNgramTokens}) &&
                     has_attribute(raw, kCapacity, kFingerprintCapacity);
  if (!known) return {};
  const hdf5::Dataset& dataset = place->second;
  const auto* hashes = std::get_if<std::vector<int64_t>>(&dataset.data);
  if (hashes == nullptr) {
    refuse(raw, "dataset has a wrong dtype", hdf5::dtype_name(hdf5::Dtype::kI64),
           hdf5::dtype_name(dataset.dtype()));
  }
  const auto capacity = static_cast<uint64_t>(kFingerprintCapacity);
  if (dataset.shape.size() != 1 || dataset.shape[0] > capacity) {
    refuse(raw, "dataset has a wrong shape", "at most " + hdf5::shape_text({capacity}),
           hdf5::shape_text(dataset.shape));
  }
  for (size_t i = 0; i < hashes->size(); ++i) {
    const int64_t hash = (*hashes)[i];
    if (hash < 0 || (i > 0 && hash <= (*hashes)[i - 1])) {
      refuse(raw, "hashes are not in ascending order", "each above the one before, from 0 on",
             std::to_string(hash) + " at element " + std::to_string(i));
    }
  }
  return {*hashes};
}

}  // namespace oscar
