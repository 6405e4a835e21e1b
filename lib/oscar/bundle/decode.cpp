// A bundle's file to structs, with every check.
#include "oscar/bundle/decode.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/derived.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/encode.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/head_fit.h"

namespace oscar {

// The layers of a file: geometry, transforms, statistics.

constexpr int kMostLayers = 100000, kMostHeads = 65536, kMostHeadDim = 65536;

// All throw Error naming the object, as decode_bundle does; data moves out of `raw`. `path` is the
// group of a layer or of what is below it.

// Paths of the layer groups below `parent`, by layer id. Other names are ignored.
std::vector<std::string> layer_groups(const RawFile& raw, const char* parent);

// The layer's shape must fit `model`.
LayerGeometry decode_geometry(const RawFile& raw, const std::string& path,
                              const BundleModel& model);
LayerTransforms decode_transforms(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry);
// Empty where the layer has none.
WeightSamples decode_weight_samples(RawFile& raw, const std::string& path,
                                    const LayerGeometry& geometry);
LayerStatistics decode_statistics(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry);

// What is in an attribute, as text, JSON or a name.

void refuse_object(const RawFile& raw, const std::string& object, const std::string& what,
                   const std::string& expected, const std::string& found, const std::string& hint) {
  throw Error({.what = what,
               .where = raw.name + ": " + object,
               .expected = expected,
               .found = found,
               .hint = hint});
}

Json AttributeReader::json(const char* name) const {
  const std::string* text = find<std::string>(name, "text");
  if (text == nullptr) return nullptr;
  return parse_json(*text, raw.name + ": " + label(name));
}

void AttributeReader::operator()(const char* name, std::string& value) const {
  if (const std::string* text = find<std::string>(name, "text")) value = *text;
}

void AttributeReader::operator()(const char* name, AttentionKind& value) const {
  const std::string& text = *find<std::string>(name, "text");
  for (const auto kind : {AttentionKind::kFull, AttentionKind::kSliding, AttentionKind::kLocal,
                          AttentionKind::kNone}) {
    if (text == schema::attention_name(kind)) {
      value = kind;
      return;
    }
  }
  refuse_object(raw, label(name), "unknown kind of attention", "full, sliding, local or none",
                text);
}

void AttributeReader::operator()(const char* name, std::vector<CorpusSource>& sources) const {
  const Json list = json(name);
  try {
    for (const auto& entry : list) {
      CorpusSource s;
      entry.at("name").get_to(s.name);
      entry.at("sha256").get_to(s.sha256);
      s.kind = entry.value("kind", std::string());
      s.weight = entry.value("weight", 1.0);
      s.documents_read = entry.value("documents_read", int64_t{0});
      s.documents_used = entry.value("documents_used", int64_t{0});
      s.tokens_read = entry.value("tokens_read", int64_t{0});
      s.tokens_used = entry.value("tokens_used", int64_t{0});
      s.dropped = entry.value("dropped", std::vector<std::string>());
      sources.push_back(std::move(s));
    }
  } catch (const nlohmann::json::exception& error) {
    refuse_object(raw, label(name), "attribute does not describe corpus sources", "", error.what());
  }
}

std::vector<std::string> text_list(const RawFile& raw, const std::string& object,
                                   const char* name) {
  const auto group = raw.attributes.find(object);
  if (group == raw.attributes.end() || !group->second.contains(name)) return {};
  const Json list = AttributeReader{raw, object}.json(name);
  try {
    return list.get<std::vector<std::string>>();
  } catch (const nlohmann::json::exception& error) {
    refuse_object(raw, object + " attribute " + name, "attribute is not a JSON list of texts", "",
                  error.what());
  }
}

// Datasets of layers, checked by name, dtype, shape and value.

namespace {

struct DatasetReader {
  RawFile& raw;
  std::string object;
  const LayerGeometry& geometry;

  int dim(const schema::DatasetSpec& spec) const {
    return spec.side == Side::kKey ? geometry.head_dim_k : geometry.head_dim_v;
  }

  // Takes the dataset's values after checking dtype, shape and finiteness. False when absent.
  template <typename T>
  bool take(const schema::DatasetSpec& spec, std::vector<T>& values, uint64_t ratios = 0) const {
    const std::string path = object + "/" + spec.name;
    const auto place = raw.datasets.find(path);
    if (place == raw.datasets.end()) {
      if (spec.required) refuse_object(raw, path, "required dataset is missing");
      return false;
    }
    hdf5::Dataset& dataset = place->second;
    if (dataset.dtype() != spec.dtype) {
      refuse_object(raw, path, "dataset has a wrong dtype", hdf5::dtype_name(spec.dtype),
                    hdf5::dtype_name(dataset.dtype()));
    }
    const hdf5::Shape shape = schema::shape_of(spec, geometry, ratios);
    if (dataset.shape != shape) {
      refuse_object(raw, path, "dataset has a wrong shape", hdf5::shape_text(shape),
                    hdf5::shape_text(dataset.shape));
    }
    values = std::move(std::get<std::vector<T>>(dataset.data));
    if constexpr (std::is_floating_point_v<T>) {
      const auto bad =
          std::find_if(values.begin(), values.end(), [](T value) { return !std::isfinite(value); });
      if (bad != values.end()) {
        refuse_object(raw, path, "dataset holds a value that is not finite", "",
                      std::to_string(*bad) + " at element " + std::to_string(bad - values.begin()));
      }
    }
    return true;
  }

  template <typename T>
  void operator()(const schema::DatasetSpec& spec, MatrixStack<T>& stack) const {
    if (!take(spec, stack.data)) return;
    stack.count = geometry.num_kv_heads;
    const hdf5::Shape shape = schema::shape_of(spec, geometry, 0);
    stack.rows = static_cast<int>(shape[1]);
    stack.cols = static_cast<int>(shape[2]);
  }
  template <typename T>
  void operator()(const schema::DatasetSpec& spec, VectorStack<T>& stack) const {
    if (!take(spec, stack.data)) return;
    stack.count = geometry.num_kv_heads;
    stack.cols = dim(spec);
  }
  template <typename T>
  void operator()(const schema::DatasetSpec& spec, std::vector<T>& values) const {
    if constexpr (std::is_enum_v<T>) {
      constexpr uint8_t kLast = std::is_same_v<T, TransformKind>
                                    ? static_cast<uint8_t>(TransformKind::kBalanced)
                                    : static_cast<uint8_t>(ScaleCorrection::kMetric);
      std::vector<uint8_t> codes;
      if (!take(spec, codes)) return;
      for (const uint8_t code : codes) {
        if (code > kLast) {
          refuse_object(raw, object + "/" + spec.name, "unknown code",
                        "0 to " + std::to_string(int{kLast}), std::to_string(int{code}));
        }
        values.push_back(static_cast<T>(code));
      }
    } else {
      take(spec, values);
    }
  }
  // The file says how many ratios were tried.
  void operator()(const schema::ClipLossSpecs& specs, std::optional<ClipLosses>& losses) const {
    const std::string ratio_path = object + "/" + specs.ratio.name,
                      nmse_path = object + "/" + specs.nmse.name;
    const auto place = raw.datasets.find(ratio_path);
    const bool has_ratio = place != raw.datasets.end(), has_nmse = raw.datasets.contains(nmse_path);
    if (!has_ratio && !has_nmse) return;
    if (has_ratio != has_nmse) {
      refuse_object(raw, has_ratio ? nmse_path : ratio_path, "required dataset is missing",
                    "losses of clipping ratios beside the ratios, or neither");
    }
    const hdf5::Shape& shape = place->second.shape;
    const uint64_t ratios = shape.size() == 1 ? shape[0] : 0;
    if (ratios == 0 || ratios > kMostClipRatios) {
      refuse_object(raw, ratio_path, "dataset has a wrong shape",
                    "1 to " + std::to_string(kMostClipRatios) + " ratios", hdf5::shape_text(shape));
    }
    losses.emplace();
    take(specs.ratio, losses->ratio, ratios);
    take(specs.nmse, losses->nmse.data, ratios);
    losses->nmse.count = static_cast<int>(ratios);
    losses->nmse.cols = geometry.num_kv_heads;
    const std::string problem = clip_losses_problem(*losses, geometry.num_kv_heads);
    if (!problem.empty()) {
      refuse_object(raw, ratio_path, "losses of clipping ratios make no sense", "", problem);
    }
  }
  void operator()(const schema::DatasetSpec& spec, int64_t& value) const {
    std::vector<int64_t> values;
    take(spec, values);
    value = values.at(0);
    if (value <= 0) {
      refuse_object(raw, object + "/" + spec.name, "count is not positive", "",
                    std::to_string(value));
    }
  }
};

void finish_side(const RawFile& raw, const std::string& path, const schema::SideSpecs& specs,
                 int heads, SideTransform& side) {
  side.fallback = text_list(raw, path, specs.fallback);
  side.fallback.resize(static_cast<size_t>(heads));
  for (const float ratio : side.recipe.clip_ratio) {
    if (ratio < 0 || ratio > 1) {
      refuse_object(raw, path + "/" + specs.clip_ratio.name, "clip ratio is out of range", "0 to 1",
                    std::to_string(ratio));
    }
  }
  if (side.metric.empty() && side.recipe.any(ScaleCorrection::kMetric)) {
    refuse_object(raw, path + "/" + specs.metric.name, "required dataset is missing",
                  "a metric, because a head's scale correction is 2");
  }
  if (side.partner.empty() &&
      std::find(side.kind.begin(), side.kind.end(), TransformKind::kBalanced) != side.kind.end()) {
    refuse_object(raw, path + "/" + specs.partner.name, "required dataset is missing",
                  "the inverse transform, because a head is balanced");
  }
  side.recipe.widen(static_cast<size_t>(heads), {});
  for (int head = 0; head < heads; ++head) {
    side.recipe.rounding[static_cast<size_t>(head)] = rounding_of(side.feedback, head);
  }
}

}  // namespace

std::vector<std::string> layer_groups(const RawFile& raw, const char* parent) {
  std::vector<std::pair<size_t, std::string>> found;
  const std::string prefix = std::string(parent) + "/";
  for (const auto& object : raw.objects) {
    if (object.is_dataset || !object.path.starts_with(prefix)) continue;
    const std::string name = object.path.substr(prefix.size());
    if (name.size() < 3 || name.size() > 6) continue;
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    found.emplace_back(std::stoul(name), object.path);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& entry : found) paths.push_back(std::move(entry.second));
  return paths;
}

LayerGeometry decode_geometry(const RawFile& raw, const std::string& path,
                              const BundleModel& model) {
  LayerGeometry g;
  g.num_qo_heads = model.num_qo_heads;
  schema::visit_geometry(g, AttributeReader{raw, path, true});
  const auto agree = [&](const char* name, int layer, int whole) {
    if (layer != whole) {
      refuse_object(raw, path + " attribute " + name, "layer does not fit /model",
                    std::to_string(whole), std::to_string(layer));
    }
  };
  const auto positive = [&](const char* name, int value) {
    if (value > 0 && value <= kMostHeads) return;
    refuse_object(raw, path + " attribute " + name, "attribute is out of range",
                  "1 to " + std::to_string(kMostHeads), std::to_string(value));
  };
  // The windows of local layers may have another shape than what is fitted.
  const auto check = [&](const char* name, int layer, int whole) {
    g.attention == AttentionKind::kLocal ? positive(name, layer) : agree(name, layer, whole);
  };
  check("num_qo_heads", g.num_qo_heads, model.num_qo_heads);
  check("num_kv_heads", g.num_kv_heads, model.num_kv_heads);
  check("head_dim_k", g.head_dim_k, model.head_dim_k);
  check("head_dim_v", g.head_dim_v, model.head_dim_v);
  if (g.layer_id < 0 || g.layer_id >= model.num_layers ||
      path.substr(path.rfind('/')) != schema::layer_path("", g.layer_id)) {
    refuse_object(raw, path + " attribute layer_id", "layer id is not the group's name", "",
                  std::to_string(g.layer_id));
  }
  if (g.sliding_window < 0) {
    refuse_object(raw, path + " attribute sliding_window", "attribute is out of range", "",
                  std::to_string(g.sliding_window));
  }
  const bool local = g.attention == AttentionKind::kLocal;
  if (!g.fitted() && (g.quantized || local != (g.sliding_window > 0))) {
    refuse_object(raw, path + " attribute attention",
                  local ? "a local layer keeps a window in BF16" : "this layer holds no rows",
                  local ? "a sliding_window, and quantized 0" : "sliding_window 0 and quantized 0");
  }
  return g;
}

LayerTransforms decode_transforms(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  if (!geometry.fitted()) return layer;
  const DatasetReader read{raw, path, geometry};
  schema::visit_side(layer.key, schema::kKeySpecs, read);
  schema::visit_side(layer.value, schema::kValueSpecs, read);
  read(schema::kPredictedNmse, layer.predicted_output_nmse);
  if (layer.predicted_output_nmse.empty()) {
    layer.predicted_output_nmse.assign(geometry.num_kv_heads,
                                       std::numeric_limits<double>::quiet_NaN());
  }
  finish_side(raw, path, schema::kKeySpecs, geometry.num_kv_heads, layer.key);
  finish_side(raw, path, schema::kValueSpecs, geometry.num_kv_heads, layer.value);
  layer.warnings = text_list(raw, path, schema::kWarnings);
  if (const auto group = raw.attributes.find(path); group != raw.attributes.end()) {
    for (const auto& [name, value] : group->second) {
      if (!name.starts_with(schema::kSearchPrefix)) continue;
      layer.search[name.substr(std::string_view(schema::kSearchPrefix).size())] =
          AttributeReader{raw, path}.json(name.c_str());
    }
  }
  return layer;
}

WeightSamples decode_weight_samples(RawFile& raw, const std::string& path,
                                    const LayerGeometry& geometry) {
  WeightSamples samples;
  if (!geometry.fitted()) return samples;
  DatasetReader{raw, path, geometry}(schema::kMatrixSampleSpec, samples.matrices);
  DatasetReader{raw, path, geometry}(schema::kVectorSampleSpec, samples.vectors);
  if (samples.matrices.empty() && !samples.vectors.empty()) {
    refuse_object(raw, path, "samples of vectors without those of matrices",
                  schema::kMatrixSampleSpec.name, "none");
  }
  return samples;
}

LayerStatistics decode_statistics(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry) {
  LayerStatistics statistics;
  statistics.geometry = geometry;
  if (!geometry.fitted()) return statistics;
  schema::visit_statistics(statistics, DatasetReader{raw, path, geometry});
  const AttendedSums& attended = statistics.attended;
  const auto differs = [&](const auto& sum) { return sum.empty() != attended.empty(); };
  if (differs(attended.k_moment) || differs(attended.v_moment) || differs(attended.k_sum) ||
      differs(attended.v_sum) || differs(attended.k_sink_sum) || differs(attended.q_weight) ||
      differs(attended.k_weight) || differs(attended.v_weight) || differs(attended.k_sink_weight)) {
    refuse_object(raw, path, "required dataset is missing",
                  "all sums weighted by attention, or none of them");
  }
  return statistics;
}

// From a file's groups, datasets and attributes to structs, checking every name, shape and value.

namespace {

bool has_group(const RawFile& raw, const std::string& path) {
  return std::any_of(raw.objects.begin(), raw.objects.end(), [&path](const auto& object) {
    return !object.is_dataset && object.path == path;
  });
}

void check_model(const RawFile& raw, const BundleModel& m) {
  const auto within = [&raw](const char* name, int value, int most) {
    if (value < 1 || value > most) {
      refuse_object(raw, std::string(schema::kModel) + " attribute " + name,
                    "attribute is out of range", "1 to " + std::to_string(most),
                    std::to_string(value));
    }
  };
  within("num_layers", m.num_layers, kMostLayers);
  within("num_kv_heads", m.num_kv_heads, kMostHeads);
  within("num_qo_heads", m.num_qo_heads, kMostHeads);
  within("head_dim_k", m.head_dim_k, kMostHeadDim);
  within("head_dim_v", m.head_dim_v, kMostHeadDim);
  if (m.num_qo_heads % m.num_kv_heads != 0) {
    refuse_object(raw, "/model attribute num_qo_heads", "query heads are no multiple of KV heads",
                  "a multiple of " + std::to_string(m.num_kv_heads),
                  std::to_string(m.num_qo_heads));
  }
}

void check_quantizer(const RawFile& raw, const BundleModel& model, const CacheFormat& q) {
  const auto check = [&raw](bool good, const char* name, const std::string& expected,
                            const std::string& found) {
    if (!good) {
      refuse_object(raw, std::string(schema::kQuantizer) + " attribute " + name,
                    "quantizer setting is not supported", expected, found);
    }
  };
  const auto divides = [&q](int dim) { return dim % q.quant_group_size == 0; };
  check(q.bits == 2, "bits", "2", std::to_string(q.bits));
  check(q.quant_group_size > 0 && divides(model.head_dim_k) && divides(model.head_dim_v),
        "quant_group_size", "a divisor of the head dimensions", std::to_string(q.quant_group_size));
  check(q.sink_tokens >= 0, "sink_tokens", "0 or more", std::to_string(q.sink_tokens));
  check(q.recent_tokens >= 0, "recent_tokens", "0 or more", std::to_string(q.recent_tokens));
  check(q.demote_block > 0, "demote_block", "1 or more", std::to_string(q.demote_block));
}

void check_complete(const RawFile& raw, const char* parent, size_t found, int expected) {
  if (found != static_cast<size_t>(expected)) {
    refuse_object(raw, parent, "layers are missing", std::to_string(expected) + " layers",
                  std::to_string(found));
  }
}

}  // namespace

Bundle decode_bundle(RawFile& raw, FileKind kind) {
  Bundle b;
  b.statistics_only = kind != FileKind::kRotations;
  const AttributeReader root{raw, "/"};
  schema::visit_root(b, root);
  if (b.position_span < 0 || b.position_span > kMostPositions) {
    refuse_object(raw, "/ attribute position_span", "a position span that no model has",
                  "0 to " + std::to_string(kMostPositions), std::to_string(b.position_span));
  }
  for (const auto& [name, record] :
       {std::pair{schema::kSearch, &b.search}, {schema::kConvergence, &b.convergence}}) {
    const auto group = raw.attributes.find("/");
    if (group != raw.attributes.end() && group->second.contains(name)) *record = root.json(name);
  }
  root("tool_version", b.tool_version);
  root("tool_commit", b.tool_commit);
  root(schema::kFittedBy, b.fitted_by);
  if (b.fitted_by.empty() && !b.statistics_only) {
    b.fitted_by = schema::tool_and_commit(b.tool_version, b.tool_commit);
  }
  root(schema::kCreated, b.created_utc);
  root(schema::kContentHash, b.content_sha256);
  schema::visit_model(b.model, AttributeReader{raw, schema::kModel});
  schema::visit_corpus(b.corpus, AttributeReader{raw, schema::kCorpus});
  b.fingerprint = decode_fingerprint(raw);
  schema::visit_quantizer(b.quantizer, AttributeReader{raw, schema::kQuantizer});
  check_model(raw, b.model);
  check_quantizer(raw, b.model, b.quantizer);
  if (has_group(raw, schema::kEvaluation)) {
    b.evaluation = Json::object();
    if (const auto group = raw.attributes.find(schema::kEvaluation);
        group != raw.attributes.end()) {
      for (const auto& entry : group->second) {
        (*b.evaluation)[entry.first] =
            AttributeReader{raw, schema::kEvaluation}.json(entry.first.c_str());
      }
    }
  }
  const auto layers = layer_groups(raw, schema::kLayers);
  if (kind != FileKind::kCheckpoint) {
    check_complete(raw, schema::kLayers, layers.size(), b.model.num_layers);
  }
  int fitted = 0, sampled = 0;
  for (const auto& path : layers) {
    const LayerGeometry geometry = decode_geometry(raw, path, b.model);
    if (kind == FileKind::kRotations) b.layers.push_back(decode_transforms(raw, path, geometry));
    const std::string below = path + "/" + schema::kStatistics;
    if (b.statistics_only || has_group(raw, below)) {
      b.statistics.push_back(decode_statistics(raw, below, geometry));
      const auto group = raw.attributes.find(below);
      if (group != raw.attributes.end() && group->second.contains(schema::kSinkTokens)) {
        schema::visit_windows(b.collected.emplace(), AttributeReader{raw, below});
      }
    }
    fitted += geometry.fitted() ? 1 : 0;
    b.weight_samples.push_back(decode_weight_samples(raw, path, geometry));
    sampled += b.weight_samples.back().empty() ? 0 : 1;
  }
  if (sampled == 0) b.weight_samples.clear();
  if (sampled != 0 && sampled != fitted) {
    refuse_object(raw, schema::kLayers, "samples of the weights of some layers only",
                  fmt::format("{} or none", fitted), std::to_string(sampled));
  }
  if (kind == FileKind::kRotations && !b.statistics.empty()) {
    check_complete(raw, "statistics", b.statistics.size(), b.model.num_layers);
  }
  if (kind == FileKind::kRotations && has_group(raw, schema::kPortableLayers)) {
    const auto portable = layer_groups(raw, schema::kPortableLayers);
    check_complete(raw, schema::kPortableLayers, portable.size(), b.model.num_layers);
    for (const auto& path : portable) {
      const LayerGeometry geometry = decode_geometry(raw, path, b.model);
      b.portable.push_back({decode_transforms(raw, path + "/" + schema::kShared, geometry),
                            decode_transforms(raw, path + "/" + schema::kPerHead, geometry)});
    }
  }
  return b;
}

ResumeState decode_resume(RawFile& raw) {
  ResumeState state;
  const AttributeReader read{raw, schema::kResume};
  read("run_key", state.run_key);
  read("order", state.order);
  read("shard", state.shard);
  read("layer", state.layer);
  const std::string prefix = std::string(schema::kResume) + "/";
  for (auto& [path, dataset] : raw.datasets) {
    if (!path.starts_with(prefix)) continue;
    if (dataset.dtype() != hdf5::Dtype::kU8)
      refuse_object(raw, path, "dataset has a wrong dtype", "u8");
    ResumeTensor tensor;
    tensor.name = path.substr(prefix.size());
    const AttributeReader describe{raw, path};
    describe("dtype", tensor.dtype);
    const Json shape = describe.json("shape");
    try {
      shape.get_to(tensor.shape);
    } catch (const nlohmann::json::exception& error) {
      refuse_object(raw, path + " attribute shape", "attribute is not a JSON list of extents", "",
                    error.what());
    }
    tensor.own(std::move(std::get<std::vector<uint8_t>>(dataset.data)));
    state.tensors.push_back(std::move(tensor));
  }
  return state;
}

// Opening a bundle: format and hash first, then structure, then the numbers.

namespace {

// Statistics are barely compressible, and checkpoints hold hidden states as they are: a file that
// unpacks to far more than its size is not one of ours.
hdf5::Limits limits_for(const std::filesystem::path& path) {
  std::error_code code;
  const auto size = std::filesystem::file_size(path, code);
  const uint64_t most = std::max(uint64_t{4} << 30, code ? 0 : uint64_t{2} * size);
  return {.max_dataset_bytes = most, .max_total_bytes = most};
}

template <typename T>
const T& root_attribute(const RawFile& raw, const char* name, const char* hint) {
  const auto root = raw.attributes.find("/");
  if (root != raw.attributes.end()) {
    if (const auto stored = root->second.find(name); stored != root->second.end()) {
      if (const T* value = std::get_if<T>(&stored->second)) return *value;
    }
  }
  throw Error({.what = "required attribute is missing or has a wrong type",
               .where = raw.name + ": / attribute " + name,
               .hint = hint});
}

}  // namespace

RawFile load_raw(const std::filesystem::path& path) {
  const hdf5::Reader reader(path, limits_for(path));
  RawFile raw;
  raw.name = path.string();
  raw.objects = reader.objects();
  for (auto& attribute : reader.attributes()) {
    raw.attributes[attribute.object][attribute.name] = std::move(attribute.value);
  }
  for (const auto& object : raw.objects) {
    if (object.is_dataset) raw.datasets.emplace(object.path, reader.read(object.path));
  }
  reader.require_unchanged();
  restore_left_out(raw, limits_for(path).max_total_bytes);
  return raw;
}

FileKind check_format(const RawFile& raw) {
  const auto& format = root_attribute<std::string>(raw, "format", "this is not an OSCAR file");
  const bool statistics = format == schema::kStatisticsFormat;
  if (!statistics && format != schema::kRotationFormat) {
    throw Error(
        {.what = "this is not an OSCAR file",
         .where = raw.name + ": / attribute format",
         .expected = std::string(schema::kRotationFormat) + " or " + schema::kStatisticsFormat,
         .found = format});
  }
  const auto version = root_attribute<int64_t>(raw, "format_version", "");
  if (version < 1 || version > schema::kFormatVersion) {
    throw Error({.what = "file has a format version that this program cannot read",
                 .where = raw.name,
                 .expected = std::to_string(schema::kFormatVersion) + " at most",
                 .found = std::to_string(version),
                 .hint = "use a newer release of the toolkit"});
  }
  const Json features = parse_json(root_attribute<std::string>(raw, schema::kRequiredFeatures, ""),
                                   raw.name + ": / attribute required_features");
  for (const auto& feature : features) {
    const bool known = std::any_of(schema::kKnownFeatures.begin(), schema::kKnownFeatures.end(),
                                   [&feature](const char* name) { return feature == Json(name); });
    if (!known) {
      throw Error({.what = "file needs a feature that this program does not have",
                   .where = raw.name + ": / attribute required_features",
                   .found = feature.dump(-1, ' ', false, Json::error_handler_t::replace),
                   .hint = "use a newer release of the toolkit"});
    }
  }
  const bool resume = std::any_of(raw.objects.begin(), raw.objects.end(), [](const auto& object) {
    return object.path == schema::kResume;
  });
  return !statistics ? FileKind::kRotations
         : resume    ? FileKind::kCheckpoint
                     : FileKind::kStatistics;
}

void check_content_hash(const RawFile& raw) {
  const auto& stored = root_attribute<std::string>(raw, schema::kContentHash, "");
  std::vector<hdf5::DatasetView> views;
  std::vector<hdf5::Attribute> attributes;
  for (const auto& entry : raw.datasets) views.push_back(view(entry.second));
  for (const auto& [object, list] : raw.attributes) {
    for (const auto& [name, value] : list) attributes.push_back({object, name, value});
  }
  std::vector<const hdf5::DatasetView*> view_list;
  std::vector<const hdf5::Attribute*> attribute_list;
  for (const auto& entry : views) view_list.push_back(&entry);
  for (const auto& entry : attributes) attribute_list.push_back(&entry);
  const std::string computed = content_sha256(std::move(view_list), std::move(attribute_list));
  if (computed != stored) {
    throw Error({.what = "content is not what the file's content_sha256 says",
                 .where = raw.name,
                 .expected = stored,
                 .found = computed,
                 .hint = "the file was changed after it was written; fetch or make it again"});
  }
}

Bundle read_bundle(const std::filesystem::path& path) {
  RawFile raw = load_raw(path);
  const FileKind kind = check_format(raw);
  if (kind == FileKind::kCheckpoint) {
    throw Error({.what = "this file is a checkpoint of an unfinished run",
                 .where = path.string(),
                 .hint = "finish it with oscar-calibrate --resume"});
  }
  check_content_hash(raw);
  Bundle bundle = decode_bundle(raw, kind);
  const auto check = [&path](const LayerTransforms& layer, const char* below) {
    if (!layer.geometry.fitted()) return;
    const std::string where =
        path.string() + ": " + schema::layer_path(schema::kLayers, layer.geometry.layer_id) + below;
    require_valid(layer.key, Side::kKey, where + " keys");
    require_valid(layer.value, Side::kValue, where + " values");
  };
  for (const auto& layer : bundle.layers) check(layer, "");
  for (const auto& layer : bundle.portable) {
    check(layer.shared, " portable shared");
    check(layer.per_head, " portable per_head");
  }
  return bundle;
}

// The reader's own checks, one after the other, each failure kept as a finding.

namespace {

// Runs one check; its text is the detail. Returns whether it passed.
bool add(std::vector<Finding>& findings, const std::string& name,
         const std::function<std::string()>& check) {
  try {
    findings.push_back({true, name, check()});
  } catch (const Error& error) {
    findings.push_back({false, name, error.what()});
  }
  return findings.back().ok;
}

std::string counted(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

std::vector<Finding> verify_bundle(const std::filesystem::path& path) {
  std::vector<Finding> findings;
  RawFile raw;
  FileKind kind{};
  Bundle bundle;
  const bool opened = add(findings, "file structure and checksums", [&] {
    std::error_code status;
    if (std::filesystem::is_directory(path, status)) {
      throw Error({.what = "not a regular file",
                   .where = path.string(),
                   .found = "a folder",
                   .hint = "a folder of an export is verified with --for NAME"});
    }
    raw = load_raw(path);
    return counted(raw.datasets.size(), "dataset");
  });
  if (!opened) return findings;
  const bool known = add(findings, "format, version and features", [&] {
    kind = check_format(raw);
    return kind == FileKind::kRotations    ? schema::kRotationFormat
           : kind == FileKind::kStatistics ? schema::kStatisticsFormat
                                           : "checkpoint of an unfinished run";
  });
  if (!known) return findings;
  add(findings, "content_sha256", [&] {
    check_content_hash(raw);
    return std::get<std::string>(raw.attributes["/"][schema::kContentHash]);
  });
  const bool decoded = add(findings, "names, shapes, dtypes and values", [&] {
    if (kind == FileKind::kCheckpoint) decode_resume(raw);
    bundle = decode_bundle(raw, kind);
    return counted(kind == FileKind::kRotations ? bundle.layers.size() : bundle.statistics.size(),
                   "layer") +
           (bundle.portable.empty() ? "" : ", portable variant");
  });
  if (!decoded || kind != FileKind::kRotations) return findings;
  size_t good = 0;
  const auto check_layer = [&](const LayerTransforms& layer, const std::string& where) {
    if (!layer.geometry.fitted()) return;
    for (const Side side : {Side::kKey, Side::kValue}) {
      std::vector<Finding> one;
      const char* name = side == Side::kKey ? " keys" : " values";
      if (add(one, where + name, [&] {
            require_valid(side_of(layer, side), side, where + name);
            return std::string();
          })) {
        ++good;
      } else {
        findings.push_back(one[0]);
      }
    }
  };
  for (const auto& layer : bundle.layers) {
    check_layer(layer, schema::layer_path(schema::kLayers, layer.geometry.layer_id));
  }
  for (const auto& layer : bundle.portable) {
    const std::string where =
        schema::layer_path(schema::kPortableLayers, layer.shared.geometry.layer_id);
    check_layer(layer.shared, where + "/" + schema::kShared);
    check_layer(layer.per_head, where + "/" + schema::kPerHead);
  }
  findings.push_back({true, "inverse, orthogonality, eigenvalues",
                      counted(good, "transform") + " within the limits"});
  return findings;
}

}  // namespace oscar
