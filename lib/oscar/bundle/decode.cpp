// From a file's groups, datasets and attributes to structs, checking every name, shape and value.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "oscar/base/error.h"
#include "oscar/bundle/corpus_fingerprint.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/cache/metadata.h"

namespace oscar {
namespace {

constexpr int kMaxLayers = 100000, kMaxHeads = 65536, kMaxHeadDim = 65536;

[[noreturn]] void refuse(const RawFile& raw, const std::string& object, const std::string& what,
                         const std::string& expected = "", const std::string& found = "",
                         const std::string& hint = "") {
  throw Error({.what = what,
               .where = raw.name + ": " + object,
               .expected = expected,
               .found = found,
               .hint = hint});
}

struct AttributeReader {
  const RawFile& raw;
  std::string object;
  bool layer = false;  // of a layer: some attributes may be absent

  std::string label(const char* name) const { return object + " attribute " + name; }

  template <typename T>
  const T* find(const char* name, const char* type) const {
    const auto group = raw.attributes.find(object);
    if (group != raw.attributes.end()) {
      if (const auto slot = group->second.find(name); slot != group->second.end()) {
        const T* value = std::get_if<T>(&slot->second);
        if (value == nullptr) refuse(raw, label(name), "attribute has a wrong type", type);
        return value;
      }
    }
    const bool optional =
        (std::string_view(name) == schema::kRunKey) ||
        (layer && std::any_of(schema::kOptionalLayerAttributes.begin(),
                              schema::kOptionalLayerAttributes.end(),
                              [name](const char* other) { return std::string(other) == name; }));
    if (!optional) refuse(raw, label(name), "required attribute is missing", type);
    return nullptr;
  }

  Json json(const char* name) const {
    const std::string& text = *find<std::string>(name, "text");
    return parse_json(text, raw.name + ": " + label(name));
  }

  void operator()(const char* name, std::string& value) const {
    const std::string* text = find<std::string>(name, "text");
    value = text == nullptr ? "" : *text;
  }
  void operator()(const char* name, Json& value) const { value = json(name); }
  void operator()(const char* name, AttentionKind& value) const {
    const std::string& text = *find<std::string>(name, "text");
    for (const auto kind : {AttentionKind::kFull, AttentionKind::kSliding, AttentionKind::kMla}) {
      if (text == schema::attention_name(kind)) {
        value = kind;
        return;
      }
    }
    refuse(raw, label(name), "unknown kind of attention", "full, sliding or mla", text);
  }
  void operator()(const char* name, std::vector<CorpusSource>& sources) const;
  template <typename Integer>
  requires std::is_integral_v<Integer>
  void operator()(const char* name, Integer& value) const {
    const int64_t* stored = find<int64_t>(name, "a 64-bit integer");
    if (stored == nullptr) return;
    const bool fits = std::is_same_v<Integer, uint64_t> ||
                      (*stored >= static_cast<int64_t>(std::numeric_limits<Integer>::min()) &&
                       *stored <= static_cast<int64_t>(std::numeric_limits<Integer>::max()));
    if (!fits) {
      refuse(raw, label(name), "attribute is out of range", "", std::to_string(*stored));
    }
    value = static_cast<Integer>(*stored);
  }
};

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
    refuse(raw, label(name), "attribute does not describe corpus sources", "", error.what());
  }
}

struct DatasetReader {
  RawFile& raw;
  std::string object;
  const LayerGeometry& geometry;

  int dim(const schema::Slot& slot) const {
    return slot.side == Side::kKey ? geometry.head_dim_k : geometry.head_dim_v;
  }

  // Takes the dataset's values after checking dtype, shape and finiteness. False when absent.
  template <typename T>
  bool take(const schema::Slot& slot, std::vector<T>& values) const {
    const std::string path = object + "/" + slot.name;
    const auto place = raw.datasets.find(path);
    if (place == raw.datasets.end()) {
      if (slot.required) refuse(raw, path, "required dataset is missing");
      return false;
    }
    hdf5::Dataset& dataset = place->second;
    if (dataset.dtype() != slot.dtype) {
      refuse(raw, path, "dataset has a wrong dtype", hdf5::dtype_name(slot.dtype),
             hdf5::dtype_name(dataset.dtype()));
    }
    hdf5::Shape shape;
    if (slot.rank != schema::Rank::kScalar) shape.push_back(geometry.num_kv_heads);
    if (slot.rank >= schema::Rank::kVectors) shape.push_back(dim(slot));
    if (slot.rank == schema::Rank::kMatrices) shape.push_back(dim(slot));
    if (dataset.shape != shape) {
      refuse(raw, path, "dataset has a wrong shape", hdf5::shape_text(shape),
             hdf5::shape_text(dataset.shape));
    }
    values = std::move(std::get<std::vector<T>>(dataset.data));
    if constexpr (std::is_floating_point_v<T>) {
      const auto bad =
          std::find_if(values.begin(), values.end(), [](T value) { return !std::isfinite(value); });
      if (bad != values.end()) {
        refuse(raw, path, "dataset holds a value that is not finite", "",
               std::to_string(*bad) + " at element " + std::to_string(bad - values.begin()));
      }
    }
    return true;
  }

  template <typename T>
  void operator()(const schema::Slot& slot, MatrixStack<T>& stack) const {
    if (!take(slot, stack.data)) return;
    stack.count = geometry.num_kv_heads;
    stack.rows = stack.cols = dim(slot);
  }
  template <typename T>
  void operator()(const schema::Slot& slot, VectorStack<T>& stack) const {
    if (!take(slot, stack.data)) return;
    stack.count = geometry.num_kv_heads;
    stack.cols = dim(slot);
  }
  template <typename T>
  void operator()(const schema::Slot& slot, std::vector<T>& values) const {
    if constexpr (std::is_enum_v<T>) {
      constexpr uint8_t kLast = std::is_same_v<T, TransformKind>
                                    ? static_cast<uint8_t>(TransformKind::kBalanced)
                                    : static_cast<uint8_t>(ScaleCorrection::kMetric);
      std::vector<uint8_t> codes;
      if (!take(slot, codes)) return;
      for (const uint8_t code : codes) {
        if (code > kLast) {
          refuse(raw, object + "/" + slot.name, "unknown code",
                 "0 to " + std::to_string(int{kLast}), std::to_string(int{code}));
        }
        values.push_back(static_cast<T>(code));
      }
    } else {
      take(slot, values);
    }
  }
  void operator()(const schema::Slot& slot, int64_t& value) const {
    std::vector<int64_t> values;
    take(slot, values);
    value = values.at(0);
    if (value <= 0) {
      refuse(raw, object + "/" + slot.name, "count is not positive", "", std::to_string(value));
    }
  }
};

std::vector<std::string> text_list(const RawFile& raw, const std::string& object,
                                   const char* name) {
  const auto group = raw.attributes.find(object);
  if (group == raw.attributes.end() || !group->second.contains(name)) return {};
  const Json list = AttributeReader{raw, object}.json(name);
  try {
    return list.get<std::vector<std::string>>();
  } catch (const nlohmann::json::exception& error) {
    refuse(raw, object + " attribute " + name, "attribute is not a JSON list of texts", "",
           error.what());
  }
}

void finish_side(const RawFile& raw, const std::string& path, const schema::SideSlots& slots,
                 int heads, SideTransform& side) {
  side.fallback = text_list(raw, path, slots.fallback);
  side.fallback.resize(static_cast<size_t>(heads));
  for (const float ratio : side.clip_ratio) {
    if (ratio < 0 || ratio > 1) {
      refuse(raw, path + "/" + slots.clip_ratio.name, "clip ratio is out of range", "0 to 1",
             std::to_string(ratio));
    }
  }
  const auto has = [](const auto& list, auto value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  if (side.metric.empty() && has(side.scale_correction, ScaleCorrection::kMetric)) {
    refuse(raw, path + "/" + slots.metric.name, "required dataset is missing",
           "a metric, because a head's scale correction is 2");
  }
  if (side.partner.empty() && has(side.kind, TransformKind::kBalanced)) {
    refuse(raw, path + "/" + slots.partner.name, "required dataset is missing",
           "the inverse transform, because a head is balanced");
  }
}

LayerTransforms decode_transforms(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  const DatasetReader read{raw, path, geometry};
  schema::visit_side(layer.key, schema::kKeySlots, read);
  schema::visit_side(layer.value, schema::kValueSlots, read);
  read(schema::kPredictedNmse, layer.predicted_output_nmse);
  if (layer.predicted_output_nmse.empty()) {
    layer.predicted_output_nmse.assign(geometry.num_kv_heads,
                                       std::numeric_limits<double>::quiet_NaN());
  }
  finish_side(raw, path, schema::kKeySlots, geometry.num_kv_heads, layer.key);
  finish_side(raw, path, schema::kValueSlots, geometry.num_kv_heads, layer.value);
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

LayerGeometry decode_geometry(const RawFile& raw, const std::string& path,
                              const BundleModel& model) {
  LayerGeometry g;
  g.num_qo_heads = model.num_qo_heads;
  schema::visit_geometry(g, AttributeReader{raw, path, true});
  const auto agree = [&](const char* name, int layer, int whole) {
    if (layer != whole) {
      refuse(raw, path + " attribute " + name, "layer does not fit /model", std::to_string(whole),
             std::to_string(layer));
    }
  };
  agree("num_qo_heads", g.num_qo_heads, model.num_qo_heads);
  agree("num_kv_heads", g.num_kv_heads, model.num_kv_heads);
  agree("head_dim_k", g.head_dim_k, model.head_dim_k);
  agree("head_dim_v", g.head_dim_v, model.head_dim_v);
  if (g.layer_id < 0 || g.layer_id >= model.num_layers ||
      path.substr(path.rfind('/')) != schema::layer_path("", g.layer_id)) {
    refuse(raw, path + " attribute layer_id", "layer id is not the group's name", "",
           std::to_string(g.layer_id));
  }
  if (g.sliding_window < 0) {
    refuse(raw, path + " attribute sliding_window", "attribute is out of range", "",
           std::to_string(g.sliding_window));
  }
  return g;
}

// Paths of the layer groups below `parent`, by layer id. Other names are ignored.
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

bool has_group(const RawFile& raw, const std::string& path) {
  return std::any_of(raw.objects.begin(), raw.objects.end(), [&path](const auto& object) {
    return !object.is_dataset && object.path == path;
  });
}

void check_model(const RawFile& raw, const BundleModel& m) {
  const auto within = [&raw](const char* name, int value, int most) {
    if (value < 1 || value > most) {
      refuse(raw, std::string(schema::kModel) + " attribute " + name, "attribute is out of range",
             "1 to " + std::to_string(most), std::to_string(value));
    }
  };
  within("num_layers", m.num_layers, kMaxLayers);
  within("num_kv_heads", m.num_kv_heads, kMaxHeads);
  within("num_qo_heads", m.num_qo_heads, kMaxHeads);
  within("head_dim_k", m.head_dim_k, kMaxHeadDim);
  within("head_dim_v", m.head_dim_v, kMaxHeadDim);
  if (m.num_qo_heads % m.num_kv_heads != 0) {
    refuse(raw, "/model attribute num_qo_heads", "query heads are no multiple of KV heads",
           "a multiple of " + std::to_string(m.num_kv_heads), std::to_string(m.num_qo_heads));
  }
}

void check_quantizer(const RawFile& raw, const BundleModel& model, const QuantizerSettings& q) {
  const auto check = [&raw](bool good, const char* name, const std::string& expected,
                            const std::string& found) {
    if (!good) {
      refuse(raw, std::string(schema::kQuantizer) + " attribute " + name,
             "quantizer setting is not supported", expected, found);
    }
  };
  const auto divides = [&q](int dim) { return dim % q.quant_group_size == 0; };
  MetadataDtype dtype{};
  check(q.bits == 2, "bits", "2", std::to_string(q.bits));
  check(q.quant_group_size > 0 && divides(model.head_dim_k) && divides(model.head_dim_v),
        "quant_group_size", "a divisor of the head dimensions", std::to_string(q.quant_group_size));
  check(q.sink_tokens >= 0, "sink_tokens", "0 or more", std::to_string(q.sink_tokens));
  check(q.recent_tokens >= 0, "recent_tokens", "0 or more", std::to_string(q.recent_tokens));
  check(q.demote_block > 0, "demote_block", "1 or more", std::to_string(q.demote_block));
  check(parse_metadata_name(q.metadata_dtype, dtype), "metadata_dtype", "fp16, bf16 or fp32",
        q.metadata_dtype);
  check(q.clip_span == "head_row", "clip_span", "head_row", q.clip_span);
  check(q.zero == "code_units", "zero", "code_units", q.zero);
}

void check_complete(const RawFile& raw, const char* parent, size_t found, int expected) {
  if (found != static_cast<size_t>(expected)) {
    refuse(raw, parent, "layers are missing", std::to_string(expected) + " layers",
           std::to_string(found));
  }
}

}  // namespace

Bundle decode_bundle(RawFile& raw, FileKind kind) {
  Bundle b;
  b.statistics_only = kind != FileKind::kRotations;
  const AttributeReader root{raw, "/"};
  schema::visit_root(b, root);
  for (const auto& [name, record] :
       {std::pair{schema::kSearch, &b.search}, {schema::kConvergence, &b.convergence}}) {
    const auto group = raw.attributes.find("/");
    if (group != raw.attributes.end() && group->second.contains(name)) *record = root.json(name);
  }
  root("tool_version", b.tool_version);
  root("tool_commit", b.tool_commit);
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
  for (const auto& path : layers) {
    const LayerGeometry geometry = decode_geometry(raw, path, b.model);
    if (kind == FileKind::kRotations) b.layers.push_back(decode_transforms(raw, path, geometry));
    const std::string below = path + "/" + schema::kStatistics;
    if (b.statistics_only || has_group(raw, below)) {
      LayerStatistics statistics;
      statistics.geometry = geometry;
      schema::visit_statistics(statistics, DatasetReader{raw, below, geometry});
      b.statistics.push_back(std::move(statistics));
    }
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
    if (dataset.dtype() != hdf5::Dtype::kU8) refuse(raw, path, "dataset has a wrong dtype", "u8");
    ResumeTensor tensor;
    tensor.name = path.substr(prefix.size());
    const AttributeReader describe{raw, path};
    describe("dtype", tensor.dtype);
    const Json shape = describe.json("shape");
    try {
      shape.get_to(tensor.shape);
    } catch (const nlohmann::json::exception& error) {
      refuse(raw, path + " attribute shape", "attribute is not a JSON list of extents", "",
             error.what());
    }
    tensor.bytes = std::move(std::get<std::vector<uint8_t>>(dataset.data));
    state.tensors.push_back(std::move(tensor));
  }
  return state;
}

}  // namespace oscar
