// From a file's groups, datasets and attributes to structs, checking every name, shape and value.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/bundle/attribute_reader.h"
#include "oscar/bundle/corpus_fingerprint.h"
#include "oscar/bundle/decode_layers.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/cache/metadata.h"

namespace oscar {
namespace {

constexpr int kMaxLayers = 100000, kMaxHeads = 65536, kMaxHeadDim = 65536;

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
  within("num_layers", m.num_layers, kMaxLayers);
  within("num_kv_heads", m.num_kv_heads, kMaxHeads);
  within("num_qo_heads", m.num_qo_heads, kMaxHeads);
  within("head_dim_k", m.head_dim_k, kMaxHeadDim);
  within("head_dim_v", m.head_dim_v, kMaxHeadDim);
  if (m.num_qo_heads % m.num_kv_heads != 0) {
    refuse_object(raw, "/model attribute num_qo_heads", "query heads are no multiple of KV heads",
                  "a multiple of " + std::to_string(m.num_kv_heads),
                  std::to_string(m.num_qo_heads));
  }
}

void check_quantizer(const RawFile& raw, const BundleModel& model, const QuantizerSettings& q) {
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

}  // namespace oscar
