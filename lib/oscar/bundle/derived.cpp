// Codings undone, dataset by dataset.
#include "oscar/bundle/derived.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/bundle/decode.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/linalg.h"

namespace oscar {
namespace {

using schema::Coding;
using schema::CodingRule;

// Larger matrices are stored as they are: a small file must not make its reader work for hours.
constexpr uint64_t kLargestDerivedDim = 512;

bool is_square_stack(const hdf5::Shape& shape) {
  return shape.size() == 3 && shape[0] > 0 && shape[1] > 0 && shape[1] == shape[2];
}

template <typename Element>
std::vector<Element> mirrored(const std::vector<Element>& rows, uint64_t heads, uint64_t d) {
  std::vector<Element> full(heads * d * d);
  auto next = rows.begin();
  for (uint64_t head = 0; head < heads; ++head) {
    Element* const matrix = full.data() + head * d * d;
    for (uint64_t i = 0; i < d; ++i) {
      for (uint64_t j = i; j < d; ++j) matrix[i * d + j] = matrix[j * d + i] = *next++;
    }
  }
  return full;
}

// d of d (d + 1) / 2, 0 when there is none.
uint64_t triangle_dim(uint64_t entries) {
  uint64_t d = 0;
  while (d * (d + 1) / 2 < entries && d <= (uint64_t{1} << 20)) ++d;
  return d * (d + 1) / 2 == entries ? d : 0;
}

// Where datasets are found while codings are undone; null for what is not there.
using Find = std::function<const hdf5::DatasetView*(const std::string& path)>;

const hdf5::DatasetView* find_dataset(const Find& find, const std::string& group,
                                      const schema::DatasetSpec& spec) {
  const hdf5::DatasetView* const found = find(group + "/" + spec.name);
  return found == nullptr || found->dtype != spec.dtype ? nullptr : found;
}

// What a dataset of `group` is derived from. Borrowed; all but `weights` are f32.
struct Sources {
  const float* matrices = nullptr;  // [heads, d, d] T, or the metric
  const float* partners = nullptr;  // [heads, d, d] o_rotation, may be null: of an output metric
  const double* weights = nullptr;  // [heads, d, d] M_O: of an output metric
  const uint8_t* kinds = nullptr;   // [heads]
  uint64_t heads = 0, d = 0;
};

// None when something is missing, of another type or shape, or too large.
std::optional<Sources> find_sources(const CodingRule& rule, const std::string& group,
                                    const Find& find) {
  const schema::SideSpecs& side = *rule.side;
  const auto* const matrices =
      find_dataset(find, group, rule.coding == Coding::kFactor ? side.metric : side.rotation);
  const auto* const kinds = find_dataset(find, group, side.kind);
  if (matrices == nullptr || kinds == nullptr || !is_square_stack(matrices->shape) ||
      matrices->shape[1] > kLargestDerivedDim || kinds->shape != hdf5::Shape{matrices->shape[0]}) {
    return std::nullopt;
  }
  Sources sources{.matrices = static_cast<const float*>(matrices->data),
                  .kinds = static_cast<const uint8_t*>(kinds->data),
                  .heads = matrices->shape[0],
                  .d = matrices->shape[1]};
  if (rule.coding == Coding::kOutputMetric) {
    const auto* const partners = find_dataset(find, group, side.partner);
    const auto* const weights = find(group + "/" + schema::kStatistics + "/o_proj_metric");
    if (weights == nullptr || weights->dtype != hdf5::Dtype::kF64 ||
        weights->shape != matrices->shape ||
        (partners != nullptr && partners->shape != matrices->shape)) {
      return std::nullopt;
    }
    sources.weights = static_cast<const double*>(weights->data);
    if (partners != nullptr) sources.partners = static_cast<const float*>(partners->data);
  }
  return sources;
}

MatrixF derived_matrix(const CodingRule& rule, const Sources& sources, uint64_t head,
                       const std::string& where) {
  const auto d = static_cast<Eigen::Index>(sources.d);
  const uint64_t offset = head * sources.d * sources.d;
  const Eigen::Map<const MatrixF> matrix(sources.matrices + offset, d, d);
  if (rule.coding == Coding::kFactor) {
    return feedback_factor(matrix.cast<double>(), where).cast<float>();
  }
  const Side side = rule.side->kind.side;
  if (rule.coding == Coding::kOutputMetric) {
    const Eigen::Map<const MatrixD> weight(sources.weights + offset, d, d);
    const MatrixF partner =
        sources.partners != nullptr
            ? MatrixF(Eigen::Map<const MatrixF>(sources.partners + offset, d, d))
            : MatrixF(matrix.transpose());
    return error_metric(partner, weight, side).cast<float>();
  }
  if (sources.kinds[head] != static_cast<uint8_t>(TransformKind::kBalanced)) {
    return side == Side::kKey ? MatrixF(matrix) : MatrixF(matrix.transpose());
  }
  const MatrixF inverse = fixed_order_inverse(matrix.cast<double>(), where).cast<float>();
  return side == Side::kKey ? MatrixF(inverse.transpose()) : inverse;
}

// Multiplications, d^3 a head, below which threads take longer to start than they save.
constexpr uint64_t kWorkOfThreads = uint64_t{1} << 18;

// [heads, d, d], large heads side by side on the machine's cores. Throws Error where a matrix has
// no inverse or factor.
std::vector<float> derive(const CodingRule& rule, const Sources& sources,
                          const std::string& where) {
  const uint64_t size = sources.d * sources.d;
  std::vector<float> all(sources.heads * size);
  const auto one = [&](int64_t number) {
    const auto head = static_cast<uint64_t>(number);
    const MatrixF matrix =
        derived_matrix(rule, sources, head, where + ", head " + std::to_string(head));
    std::memcpy(all.data() + head * size, matrix.data(), size * sizeof(float));
  };
  const auto heads = static_cast<int64_t>(sources.heads);
  if (all.size() * sources.d < kWorkOfThreads) {
    for (int64_t head = 0; head < heads; ++head) one(head);
  } else {
    parallel_for(heads, one);
  }
  return all;
}

// Undoes the codings of a file, one dataset at a time.
class Restorer {
 public:
  Restorer(RawFile& raw, uint64_t most_bytes) : raw_(raw), bytes_left_(most_bytes) {
    for (const auto& entry : raw.datasets) take(entry.first, bytes_of(entry.second));
  }

  void undo(const CodingRule& rule, const std::string& group) {
    const std::string path = group + "/" + rule.dataset;
    if (rule.coding == Coding::kUpper) {
      undo_upper(path);
    } else {
      undo_derived(rule, group, path);
    }
  }

 private:
  static uint64_t bytes_of(const hdf5::Dataset& dataset) {
    return hdf5::element_count(dataset.shape) * hdf5::dtype_bytes(dataset.dtype());
  }

  void take(const std::string& path, uint64_t bytes) {
    if (bytes > bytes_left_) refuse_object(raw_, path, "file unpacks to more than is accepted");
    bytes_left_ -= bytes;
  }

  // In the place of what was stored, if anything was.
  void put(hdf5::Dataset dataset) {
    const hdf5::ObjectInfo info{dataset.path, true, hdf5::dtype_name(dataset.dtype()),
                                dataset.shape};
    raw_.datasets.insert_or_assign(info.path, std::move(dataset));
    const auto spot =
        std::ranges::lower_bound(raw_.objects, info.path, std::less<>(), &hdf5::ObjectInfo::path);
    if (spot != raw_.objects.end() && spot->path == info.path) {
      *spot = info;
    } else {
      raw_.objects.insert(spot, info);
    }
  }

  void undo_upper(const std::string& path) {
    const auto place = raw_.datasets.find(path);
    if (place == raw_.datasets.end()) refuse_object(raw_, path, "required dataset is missing");
    const hdf5::Dataset& stored = place->second;
    const uint64_t d = stored.shape.size() == 2 ? triangle_dim(stored.shape[1]) : 0;
    if (d == 0 || stored.shape[0] == 0) {
      refuse_object(raw_, path, "dataset has a wrong shape",
                    "upper triangles, [heads, d (d + 1) / 2]", hdf5::shape_text(stored.shape));
    }
    const uint64_t heads = stored.shape[0];
    take(path, bytes_of(stored));  // less than as much once more
    if (const auto* const wide = std::get_if<std::vector<double>>(&stored.data)) {
      put({path, {heads, d, d}, mirrored(*wide, heads, d)});
    } else if (const auto* const narrow = std::get_if<std::vector<float>>(&stored.data)) {
      put({path, {heads, d, d}, mirrored(*narrow, heads, d)});
    } else {
      refuse_object(raw_, path, "dataset has a wrong dtype", "f32 or f64",
                    hdf5::dtype_name(stored.dtype()));
    }
  }

  void undo_derived(const CodingRule& rule, const std::string& group, const std::string& path) {
    std::map<std::string, hdf5::DatasetView> views;  // of what was asked for
    const Find find = [&](const std::string& wanted) -> const hdf5::DatasetView* {
      const auto place = raw_.datasets.find(wanted);
      if (place == raw_.datasets.end()) return nullptr;
      return &(views[wanted] = view(place->second));
    };
    const auto sources = find_sources(rule, group, find);
    if (!sources) {
      refuse_object(raw_, path, "dataset can't be derived",
                    "what it is derived from: matrices of at most " +
                        std::to_string(kLargestDerivedDim) + " columns and the heads' kinds",
                    "something is missing, or of another shape or dtype");
    }
    take(path, sources->heads * sources->d * sources->d * sizeof(float));
    std::vector<float> derived = derive(rule, *sources, raw_.name + ": " + path);
    const hdf5::Shape shape{sources->heads, sources->d, sources->d};
    const auto place = raw_.datasets.find(path);
    if (place != raw_.datasets.end()) correct(derived, place->second, shape);
    put({path, shape, std::move(derived)});
  }

  void correct(std::vector<float>& derived, const hdf5::Dataset& corrections,
               const hdf5::Shape& shape) const {
    const auto* const steps = std::get_if<std::vector<int32_t>>(&corrections.data);
    if (steps == nullptr || corrections.shape != shape) {
      refuse_object(raw_, corrections.path, "dataset has a wrong shape or dtype",
                    "i32 " + hdf5::shape_text(shape) + ", corrections of derived numbers",
                    std::string(hdf5::dtype_name(corrections.dtype())) + " " +
                        hdf5::shape_text(corrections.shape));
    }
    for (size_t i = 0; i < derived.size(); ++i) {
      derived[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(derived[i]) +
                                        std::bit_cast<uint32_t>((*steps)[i]));
    }
  }

  RawFile& raw_;
  uint64_t bytes_left_;
};

// The features without kDerivedFeature; none where it is not there, or others are unknown.
std::optional<Json> other_features(const std::string& text) {
  const Json features = Json::parse(text, nullptr, false);
  if (!features.is_array()) return std::nullopt;
  Json others = Json::array();
  for (const auto& feature : features) {
    const auto is = [&](const char* name) { return feature == Json(name); };
    if (std::ranges::none_of(schema::kKnownFeatures, is)) return std::nullopt;
    if (!is(schema::kDerivedFeature)) others.push_back(feature);
  }
  if (others.size() == features.size()) return std::nullopt;
  return others;
}

// Takes the codings of all groups out of the attributes.
std::map<std::string, Json> take_codings(RawFile& raw) {
  std::map<std::string, Json> all;
  for (auto& [group, attributes] : raw.attributes) {
    const auto place = attributes.find(schema::kCoding);
    if (place == attributes.end()) continue;
    const auto refuse_coding = [&, &group = group](const std::string& found) {
      refuse_object(raw, group + " attribute " + schema::kCoding, "coding is not known", "", found);
    };
    const Json codings = AttributeReader{raw, group}.json(schema::kCoding);
    if (!codings.is_object()) refuse_coding(codings.type_name());
    for (const auto& [name, coding] : codings.items()) {
      const bool known = std::ranges::any_of(
          schema::kCodings, [&, &name = name, &coding = coding](const CodingRule& rule) {
            return name == rule.dataset && coding == Json(schema::coding_name(rule.coding));
          });
      if (!known) refuse_coding(name + ", " + coding.dump());
    }
    attributes.erase(place);
    all.emplace(group, codings);
  }
  return all;
}

}  // namespace

void restore_left_out(RawFile& raw, uint64_t most_bytes) {
  const auto root = raw.attributes.find("/");
  if (root == raw.attributes.end()) return;
  const auto stored = root->second.find(schema::kRequiredFeatures);
  if (stored == root->second.end()) return;
  auto* const text = std::get_if<std::string>(&stored->second);
  const auto others = text == nullptr ? std::nullopt : other_features(*text);
  if (!others) return;
  *text = others->dump();
  const std::map<std::string, Json> codings = take_codings(raw);
  Restorer restorer(raw, most_bytes);
  // What is derived from is whole first.
  for (const Coding coding :
       {Coding::kUpper, Coding::kInverse, Coding::kOutputMetric, Coding::kFactor}) {
    for (const auto& [group, names] : codings) {
      for (const CodingRule& rule : schema::kCodings) {
        const auto name = names.find(rule.dataset);
        if (rule.coding != coding || name == names.end()) continue;
        if (*name == Json(schema::coding_name(coding))) restorer.undo(rule, group);
      }
    }
  }
}

}  // namespace oscar
