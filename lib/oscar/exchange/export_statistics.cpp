// The bundle's table of statistics, walked over layers.
#include "oscar/exchange/export_statistics.h"

#include <fmt/format.h>

#include <cstring>
#include <map>

#include "oscar/base/atomic_file.h"
#include "oscar/base/atomic_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/schema.h"
#include "oscar/exchange/launch.h"
#include "oscar/exchange/manifest.h"
#include "oscar/io/npz.h"

namespace oscar {
namespace {

constexpr const char* kStatisticsName = "statistics.npz";

// One layer's part of an array.
struct LayerPart {
  std::vector<uint64_t> shape;
  const void* data = nullptr;
  size_t bytes = 0;  // 0: the layer has none
  const char* type = "<f8";
};

LayerPart part_of(const MatrixStack<double>& s) {
  return {{uint64_t(s.count), uint64_t(s.rows), uint64_t(s.cols)},
          s.data.data(),
          s.data.size() * sizeof(double)};
}
LayerPart part_of(const VectorStack<double>& s) {
  return {{uint64_t(s.count), uint64_t(s.cols)}, s.data.data(), s.data.size() * sizeof(double)};
}
LayerPart part_of(const std::vector<double>& s) {
  return {{s.size()}, s.data(), s.size() * sizeof(double)};
}
LayerPart part_of(const int64_t& count) { return {{}, &count, sizeof count, "<i8"}; }

class Stacking {
 public:
  Stacking(size_t layers, const std::string& from) : layers_(layers), from_(from) {}

  void add(size_t layer, const char* name, const LayerPart& part) {
    if (part.bytes == 0) return;
    NpzArray& array = arrays_[name];
    if (array.type.empty()) {
      array.type = part.type;
      array.shape = part.shape;
      array.shape.insert(array.shape.begin(), layers_);
      array.bytes.assign(layers_ * part.bytes, '\0');
    }
    const std::vector<uint64_t> own(array.shape.begin() + 1, array.shape.end());
    if (own != part.shape) {
      throw Error({.what = "layers of different shapes make no array",
                   .where = fmt::format("{}: {} of layer {}", from_, name, layer)});
    }
    std::memcpy(array.bytes.data() + layer * part.bytes, part.data, part.bytes);
  }
  const std::map<std::string, NpzArray>& arrays() const { return arrays_; }

 private:
  size_t layers_;
  std::string from_;
  std::map<std::string, NpzArray> arrays_;
};

std::string readme(const Bundle& bundle) {
  return fmt::format(
      "# Statistics of {}\n\n`{}` (`numpy.load`) holds what a calibration summed: sums over tokens "
      "and the query heads of each KV head, not means. Divide q_moment, q_sum, attn_out_moment and "
      "attn_out_sum by count_q, k_moment, v_moment, k_sum and v_sum by count_kv, and what is "
      "summed by attention by the weight of its side. Rows are row vectors, heads come after "
      "layers; layer_id has the model's number of each layer. Names, units and what each is: "
      "lib/oscar/bundle/SCHEMA.md of OSCAR Toolkit.\n",
      bundle.model.name, kStatisticsName);
}

}  // namespace

std::vector<std::string> export_statistics(const Bundle& bundle, const std::string& from,
                                           const std::filesystem::path& to) {
  if (bundle.statistics.empty()) {
    throw Error({.what = "there are no statistics to export",
                 .where = from,
                 .expected = "a statistics file, or a bundle that was made without "
                             "--no-statistics and not stripped"});
  }
  std::vector<const LayerStatistics*> layers;
  for (const LayerStatistics& layer : bundle.statistics) {
    if (layer.geometry.fitted()) layers.push_back(&layer);
  }
  Stacking stacking(layers.size(), from);
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerStatistics& layer = *layers[i];
    schema::visit_statistics(layer, [&](const schema::Slot& slot, const auto& values) {
      stacking.add(i, slot.name, part_of(values));
    });
    stacking.add(i, "layer_id", part_of(int64_t{layer.geometry.layer_id}));
  }
  AtomicFolder folder(to);
  const std::filesystem::path file = folder.temporary() / kStatisticsName;
  write_npz(file, stacking.arrays());
  Json arrays = Json::object();
  for (const auto& [name, array] : stacking.arrays()) arrays[name] = array.shape;
  Json manifest = begin_manifest(bundle, kStatisticsExport);
  manifest.update({{"tokens", bundle.corpus.tokens},
                   {"row_weights", bundle.row_weights},
                   {"arrays", std::move(arrays)},
                   {"files", {{kStatisticsName, sha256_of_file(file)}}}});
  write_file_atomically(folder.temporary() / kManifestName, manifest.dump(1) + "\n");
  write_file_atomically(folder.temporary() / kLaunchName, readme(bundle));
  stop_if_requested("stopped; nothing was written");
  folder.commit();
  return {kLaunchName, kManifestName, kStatisticsName};
}

}  // namespace oscar
