// Datasets of layers, checked by name, dtype, shape and value.
#include "oscar/bundle/decode_layers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "oscar/bundle/attribute_reader.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/checks.h"
#include "oscar/fit/metric.h"

namespace oscar {
namespace {

struct DatasetReader {
  RawFile& raw;
  std::string object;
  const LayerGeometry& geometry;

  int dim(const schema::Slot& slot) const {
    return slot.side == Side::kKey ? geometry.head_dim_k : geometry.head_dim_v;
  }

  // Takes the dataset's values after checking dtype, shape and finiteness. False when absent.
  template <typename T>
  bool take(const schema::Slot& slot, std::vector<T>& values, uint64_t ratios = 0) const {
    const std::string path = object + "/" + slot.name;
    const auto place = raw.datasets.find(path);
    if (place == raw.datasets.end()) {
      if (slot.required) refuse_object(raw, path, "required dataset is missing");
      return false;
    }
    hdf5::Dataset& dataset = place->second;
    if (dataset.dtype() != slot.dtype) {
      refuse_object(raw, path, "dataset has a wrong dtype", hdf5::dtype_name(slot.dtype),
                    hdf5::dtype_name(dataset.dtype()));
    }
    const hdf5::Shape shape = schema::shape_of(slot, geometry, ratios);
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
  void operator()(const schema::Slot& slot, MatrixStack<T>& stack) const {
    if (!take(slot, stack.data)) return;
    stack.count = geometry.num_kv_heads;
    const hdf5::Shape shape = schema::shape_of(slot, geometry, 0);
    stack.rows = static_cast<int>(shape[1]);
    stack.cols = static_cast<int>(shape[2]);
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
          refuse_object(raw, object + "/" + slot.name, "unknown code",
                        "0 to " + std::to_string(int{kLast}), std::to_string(int{code}));
        }
        values.push_back(static_cast<T>(code));
      }
    } else {
      take(slot, values);
    }
  }
  // The file says how many ratios were tried.
  void operator()(const schema::ClipLossSlots& slots, std::optional<ClipLosses>& losses) const {
    const std::string ratio_path = object + "/" + slots.ratio.name,
                      nmse_path = object + "/" + slots.nmse.name;
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
    take(slots.ratio, losses->ratio, ratios);
    take(slots.nmse, losses->nmse.data, ratios);
    losses->nmse.count = static_cast<int>(ratios);
    losses->nmse.cols = geometry.num_kv_heads;
    const std::string problem = clip_losses_problem(*losses, geometry.num_kv_heads);
    if (!problem.empty()) {
      refuse_object(raw, ratio_path, "losses of clipping ratios make no sense", "", problem);
    }
  }
  void operator()(const schema::Slot& slot, int64_t& value) const {
    std::vector<int64_t> values;
    take(slot, values);
    value = values.at(0);
    if (value <= 0) {
      refuse_object(raw, object + "/" + slot.name, "count is not positive", "",
                    std::to_string(value));
    }
  }
};

void finish_side(const RawFile& raw, const std::string& path, const schema::SideSlots& slots,
                 int heads, SideTransform& side) {
  side.fallback = text_list(raw, path, slots.fallback);
  side.fallback.resize(static_cast<size_t>(heads));
  for (const float ratio : side.recipe.clip_ratio) {
    if (ratio < 0 || ratio > 1) {
      refuse_object(raw, path + "/" + slots.clip_ratio.name, "clip ratio is out of range", "0 to 1",
                    std::to_string(ratio));
    }
  }
  if (side.metric.empty() && side.recipe.any(ScaleCorrection::kMetric)) {
    refuse_object(raw, path + "/" + slots.metric.name, "required dataset is missing",
                  "a metric, because a head's scale correction is 2");
  }
  if (side.partner.empty() &&
      std::find(side.kind.begin(), side.kind.end(), TransformKind::kBalanced) != side.kind.end()) {
    refuse_object(raw, path + "/" + slots.partner.name, "required dataset is missing",
                  "the inverse transform, because a head is balanced");
  }
  for (int head = 0; head < heads; ++head) {
    side.recipe.rounding.push_back(rounding_of(side.feedback, head));
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
  agree("num_qo_heads", g.num_qo_heads, model.num_qo_heads);
  agree("num_kv_heads", g.num_kv_heads, model.num_kv_heads);
  agree("head_dim_k", g.head_dim_k, model.head_dim_k);
  agree("head_dim_v", g.head_dim_v, model.head_dim_v);
  if (g.layer_id < 0 || g.layer_id >= model.num_layers ||
      path.substr(path.rfind('/')) != schema::layer_path("", g.layer_id)) {
    refuse_object(raw, path + " attribute layer_id", "layer id is not the group's name", "",
                  std::to_string(g.layer_id));
  }
  if (g.sliding_window < 0) {
    refuse_object(raw, path + " attribute sliding_window", "attribute is out of range", "",
                  std::to_string(g.sliding_window));
  }
  if (!g.fitted() && (g.quantized || g.sliding_window == 0)) {
    refuse_object(raw, path + " attribute attention", "a local layer keeps a window in BF16",
                  "a sliding_window, and quantized 0");
  }
  return g;
}

LayerTransforms decode_transforms(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  if (!geometry.fitted()) return layer;
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

MatrixStack<float> decode_weight_samples(RawFile& raw, const std::string& path,
                                         const LayerGeometry& geometry) {
  MatrixStack<float> samples;
  if (geometry.fitted()) DatasetReader{raw, path, geometry}(schema::kWeightSampleSlot, samples);
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

}  // namespace oscar
