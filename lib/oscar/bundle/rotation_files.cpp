// Matrices in the files of other tools, written and read.
#include "oscar/bundle/rotation_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>

#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/base/json.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/schema.h"
#include "oscar/cache/codec.h"
#include "oscar/io/gguf.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/torch_file.h"
#include "oscar/model/checkpoint/gguf_model.h"

namespace oscar {

// Heads taken out of a side.

namespace {

template <typename AnyStack>
void keep_first(AnyStack& stack) {
  if (stack.empty()) return;
  stack.data.resize(stack.data.size() / static_cast<size_t>(stack.count));
  stack.count = 1;
}

void keep_first_head(SideTransform& side) {
  keep_first(side.forward);
  keep_first(side.partner);
  keep_first(side.mean);
  keep_first(side.eigenvalues);
  side.kind.resize(1);
  side.recipe = SideRecipe(1, side.recipe[0]);
}

}  // namespace

TransformSet transform_set(const std::vector<const LayerTransforms*>& layers, bool shared) {
  TransformSet set;
  for (const LayerTransforms* layer : layers) {
    LayerTransforms& copy = set[layer->geometry.layer_id] = *layer;
    if (!shared) continue;
    keep_first_head(copy.key);
    keep_first_head(copy.value);
  }
  return set;
}

// The bundle's table of datasets, walked over layers.

namespace {

using schema::DatasetSpec;
using schema::Rank;

constexpr int64_t kMostArrayLayers = 4096, kMostArrayHeads = 4096;

// Calls `visit` with (spec, field) of the specs that travel as arrays.
template <typename SideType, typename Visit>
void visit_arrays(SideType& side, const schema::SideSpecs& specs, Visit&& visit) {
  visit(specs.rotation, side.forward);
  visit(specs.partner, side.partner);
  visit(specs.mean, side.mean);
  schema::visit_recipe(side.recipe, specs, visit);
  visit(specs.metric, side.metric);
  visit(specs.feedback, side.feedback);
  if (specs.centers) visit(*specs.centers, side.centers);
}

const schema::SideSpecs& specs_of(Side side) {
  return side == Side::kKey ? schema::kKeySpecs : schema::kValueSpecs;
}

const std::vector<float>& numbers(const MatrixStack<float>& stack) { return stack.data; }
const std::vector<float>& numbers(const VectorStack<float>& stack) { return stack.data; }
const std::vector<float>& numbers(const std::vector<float>& values) { return values; }
std::vector<float> numbers(const std::vector<ScaleCorrection>& values) {
  std::vector<float> codes(values.size());
  std::transform(values.begin(), values.end(), codes.begin(),
                 [](ScaleCorrection c) { return static_cast<float>(c); });
  return codes;
}

// The side with all that stands for what it leaves out, where another layer has it.
SideTransform completed(SideTransform side, Side which, const std::set<std::string>& present) {
  const schema::SideSpecs& specs = specs_of(which);
  const int heads = side.forward.count, d = side.forward.rows;
  if (present.contains(specs.partner.name) && side.partner.empty()) {
    MatrixStack<float> partner(heads, d, d);
    for (int head = 0; head < heads; ++head) {
      partner[head] = partner_matrix(side, which, head);
    }
    side.partner = std::move(partner);
  }
  for (const auto& [spec, stack] :
       {std::pair{&specs.metric, &side.metric}, std::pair{&specs.feedback, &side.feedback}}) {
    if (!present.contains(spec->name) || !stack->empty()) continue;
    *stack = MatrixStack<float>(heads, d, d);
    for (int head = 0; head < heads; ++head) (*stack)[head].setIdentity();
  }
  if (specs.centers && present.contains(specs.centers->name) && side.centers.empty()) {
    side.centers = MatrixStack<float>(heads, kCenters, d);
  }
  return side;
}

// What follows [layers, heads] in a spec's shape.
std::vector<int64_t> tail(Rank rank, int64_t d) {
  switch (rank) {
    case Rank::kMatrices:
      return {d, d};
    case Rank::kVectors:
      return {d};
    case Rank::kCenters:
      return {kCenters, d};
    default:
      return {};
  }
}

struct Taking {
  const FloatTensors& arrays;
  const std::string& where;
  std::set<std::string> known;

  [[noreturn]] void refuse(const std::string& name, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const {
    throw Error({.what = what, .where = where + ": " + name, .expected = expected, .found = found});
  }

  // Values of one layer and the number of its heads; null pointer: there is no such array.
  struct Part {
    const float* values = nullptr;
    int heads = 0;
    size_t count = 0;
  };
  Part part(const DatasetSpec& spec, int64_t layer, int64_t layers, int64_t d) {
    known.insert(spec.name);
    const auto place = arrays.find(spec.name);
    if (place == arrays.end()) return {};
    const std::vector<int64_t>& shape = place->second.shape;
    const std::vector<int64_t> rest = tail(spec.rank, d);
    const bool with_heads = shape.size() == rest.size() + 2;
    const bool fits = (with_heads || shape.size() == rest.size() + 1) && shape[0] == layers &&
                      (!with_heads || (shape[1] > 0 && shape[1] <= kMostArrayHeads)) &&
                      std::equal(rest.begin(), rest.end(), shape.end() - ptrdiff_t(rest.size()));
    if (!fits) {
      refuse(spec.name, "an array has a wrong shape",
             fmt::format("[{0}, heads, {1}] or [{0}, {1}]", layers, fmt::join(rest, ", ")),
             fmt::format("[{}]", fmt::join(shape, ", ")));
    }
    const size_t size = place->second.values.size() / static_cast<size_t>(layers);
    const float* values = place->second.values.data() + size * static_cast<size_t>(layer);
    if (!std::all_of(values, values + size, [](float x) { return std::isfinite(x); })) {
      refuse(spec.name, "a number that is not finite", "", fmt::format("in layer {}", layer));
    }
    return {values, with_heads ? static_cast<int>(shape[1]) : 1, size};
  }
};

constexpr auto kUnknownCode = static_cast<ScaleCorrection>(255);

void take(const Taking::Part& part, int d, MatrixStack<float>& stack) {
  stack.count = part.heads;
  stack.cols = d;
  stack.rows = static_cast<int>(part.count) / part.heads / d;
  stack.data.assign(part.values, part.values + part.count);
}
void take(const Taking::Part& part, int d, VectorStack<float>& stack) {
  stack.count = part.heads;
  stack.cols = d;
  stack.data.assign(part.values, part.values + part.count);
}
void take(const Taking::Part& part, int, std::vector<float>& values) {
  values.assign(part.values, part.values + part.count);
}
void take(const Taking::Part& part, int, std::vector<ScaleCorrection>& values) {
  for (size_t i = 0; i < part.count; ++i) {
    const float code = part.values[i];
    const bool known = code == 0 || code == 1 || code == 2;
    values.push_back(known ? static_cast<ScaleCorrection>(code) : kUnknownCode);
  }
}

}  // namespace

FloatTensors to_arrays(const TransformSet& set) {
  std::set<std::string> present;
  for (const auto& entry : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      visit_arrays(side_of(entry.second, side), specs_of(side),
                   [&present](const DatasetSpec& spec, const auto& field) {
                     if (!numbers(field).empty()) present.insert(spec.name);
                   });
    }
  }
  FloatTensors arrays;
  for (const auto& entry : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const SideTransform whole = completed(side_of(entry.second, side), side, present);
      visit_arrays(whole, specs_of(side), [&](const DatasetSpec& spec, const auto& field) {
        if (!present.contains(spec.name)) return;
        FloatTensor& array = arrays[spec.name];
        if (array.shape.empty()) {
          array.shape = {static_cast<int64_t>(set.size()), whole.forward.count};
          const std::vector<int64_t> rest = tail(spec.rank, whole.forward.cols);
          array.shape.insert(array.shape.end(), rest.begin(), rest.end());
        }
        const auto& values = numbers(field);
        array.values.insert(array.values.end(), values.begin(), values.end());
      });
    }
  }
  return arrays;
}

TransformSet from_arrays(const FloatTensors& arrays, const std::string& where) {
  Taking taking{arrays, where, {}};
  TransformSet set;
  for (const Side side : {Side::kKey, Side::kValue}) {
    const schema::SideSpecs& specs = specs_of(side);
    const auto rotation = arrays.find(specs.rotation.name);
    if (rotation == arrays.end()) {
      taking.refuse(specs.rotation.name, "the array is missing",
                    "[layers, heads, d, d] or [layers, d, d]");
    }
    const std::vector<int64_t>& shape = rotation->second.shape;
    const bool square = shape.size() >= 3 && shape.size() <= 4 && shape[0] > 0 &&
                        shape[0] <= kMostArrayLayers && shape.back() > 0 &&
                        shape.back() <= kMaxHeadDim;
    if (!square) {
      taking.refuse(specs.rotation.name, "an array has a wrong shape",
                    "[layers, heads, d, d] or [layers, d, d]",
                    fmt::format("[{}]", fmt::join(shape, ", ")));
    }
    const int64_t layers = shape[0], d = shape.back();
    for (int64_t layer = 0; layer < layers; ++layer) {
      SideTransform& out = side_of(set[static_cast<int>(layer)], side);
      visit_arrays(out, specs, [&](const DatasetSpec& spec, auto& field) {
        const Taking::Part part = taking.part(spec, layer, layers, d);
        if (part.values != nullptr) take(part, static_cast<int>(d), field);
      });
      for (const ScaleCorrection c : out.recipe.scale_correction) {
        if (c == kUnknownCode) {
          taking.refuse(specs.scale_correction.name, "unknown code", "0, 1 or 2");
        }
      }
    }
  }
  for (const auto& entry : arrays) {
    if (taking.known.contains(entry.first)) continue;
    taking.refuse(entry.first, "an unknown name", fmt::format("{}", fmt::join(taking.known, ", ")));
  }
  return set;
}

// The table, and what is told instead of a row.

namespace {

struct Absent {
  const char* name;
  const char* reason;
  const char* hint;
};

constexpr Absent kAbsent[] = {
    {"onnxruntime",
     "no release of ONNX Runtime has the operator MixedPrecisionGroupQueryAttention: 1.31.1 does "
     "not, pull request 31726 is open",
     "npz and safetensors hold the matrices for a build of your own"},
    {"oscar_int2", "this toolkit's package reads the bundle itself", "give it the .h5 file"},
    {"llama.cpp", "llama.cpp reads rotations from the model's GGUF file",
     "--for gguf-rot writes those tensors"},
    {"oscar2", "OSCAR2 forks bake the matrices into the model's weights",
     "fold puts the value transforms into a checkpoint"},
};

}  // namespace

const std::vector<ExchangeFormat>& exchange_formats() {
  static const std::vector<ExchangeFormat> table = {
      {"sglang-v1", "sglang-v1", FileLayout::kTorchShared, "k_rotation_qqt_r_h_pbr.pt",
       "v_rotation_sst_r_h_pbr.pt"},
      {"sglang-v2", "sglang-v2", FileLayout::kTorchPerHead, "k_rotation_perhead.pt",
       "v_rotation_perhead.pt"},
      {"sglang-0c88a", "sglang-0c88a", FileLayout::kTorchLocked, "k_transform.pt",
       "v_transform.pt"},
      {"vllm-pr46774", "vllm-pr46774", FileLayout::kTorchShared, "k_rotation.pt", "v_rotation.pt",
       "vllm"},
      {"mlx", "mlx", FileLayout::kMlx, "k_rotation.safetensors", "v_rotation.safetensors"},
      {"gguf-rot", "llama.cpp", FileLayout::kGguf, "rotations.gguf", nullptr},
      {"npz", nullptr, FileLayout::kNpz, "transforms.npz", nullptr},
      {"safetensors", nullptr, FileLayout::kSafetensors, "transforms.safetensors", nullptr},
  };
  return table;
}

const ExchangeFormat& find_exchange_format(std::string_view name, std::string_view further) {
  for (const ExchangeFormat& format : exchange_formats()) {
    if (name == format.name) return format;
  }
  if (const auto answer = answer_to(name)) throw UsageError(*answer);
  for (const Absent& absent : kAbsent) {
    if (name == absent.name) {
      throw Error({.what = std::string("there is no export to ") + absent.name,
                   .found = absent.reason,
                   .hint = absent.hint});
    }
  }
  std::string known = exchange_format_names();
  if (!further.empty()) known += ", " + std::string(further);
  throw UsageError(
      {.what = "unknown export format", .expected = std::move(known), .found = std::string(name)});
}

bool is_called(const ExchangeFormat& format, std::string_view recorded) {
  return recorded == format.name || (format.former != nullptr && recorded == format.former);
}

std::string exchange_format_names() {
  std::string names;
  for (const ExchangeFormat& format : exchange_formats()) {
    names += (names.empty() ? "" : ", ") + std::string(format.name);
  }
  return names;
}

// Entries of a dictionary, by global layer id.

namespace {

using Kind = PickleNode::Kind;

// A shared storage would let a small file ask for any amount of memory.
constexpr int64_t kMostValues = int64_t{1} << 27;
constexpr int kMostLayers = 4096;

constexpr const char* kLockedMatrix = "transform";

const char* partner_name(Side side) { return side == Side::kKey ? "q_rotation" : "o_rotation"; }

FloatTensor matrices(const MatrixStack<float>& stack, bool per_head, bool transposed = false) {
  FloatTensor tensor;
  if (per_head) tensor.shape.push_back(stack.count);
  tensor.shape.insert(tensor.shape.end(), {stack.rows, stack.cols});
  for (int head = 0; head < stack.count; ++head) {
    const MatrixF matrix = transposed ? MatrixF(stack[head].transpose()) : MatrixF(stack[head]);
    tensor.values.insert(tensor.values.end(), matrix.data(), matrix.data() + matrix.size());
  }
  return tensor;
}

// The word of the published files for orthogonal rotations, else this toolkit's composition.
std::string objective(const TransformSet& set, Side side) {
  bool hadamard = true, balanced = false;
  for (const auto& entry : set) {
    for (const TransformKind kind : side_of(entry.second, side).kind) {
      hadamard = hadamard && kind == TransformKind::kHadamard;
      balanced = balanced || kind == TransformKind::kBalanced;
    }
  }
  if (hadamard) return "hadamard";
  return std::string(side == Side::kKey ? "qqt" : "sst") + (balanced ? "_t_h" : "_r_h_pbr");
}

TorchDict entry_of(int id, const SideTransform& transform, Side side, const TorchLayout& layout) {
  const bool per_head = layout.per_head;
  TorchDict entry;
  entry.push_back({"layer_id", {int64_t{id}}});
  entry.push_back({layout.matrix, {matrices(transform.forward, per_head)}});
  if (!transform.partner.empty()) {
    entry.push_back(
        {partner_name(side), {matrices(transform.partner, per_head, side == Side::kValue)}});
  }
  if (side == Side::kKey && is_centered(transform)) {
    FloatTensor mean{{transform.mean.cols}, transform.mean.data};
    if (per_head) mean.shape.insert(mean.shape.begin(), transform.mean.count);
    entry.push_back({"k_mean", {std::move(mean)}});
  }
  if (!per_head && !transform.eigenvalues.empty()) {
    const auto& values = transform.eigenvalues.data;
    entry.push_back({"eigenvalues",
                     {FloatTensor{{transform.eigenvalues.cols}, {values.begin(), values.end()}}}});
  }
  return entry;
}

class Reader {
 public:
  Reader(const std::filesystem::path& path, Side side, const char* matrix)
      : file_(TorchFile::open(path)), where_(path.string()), side_(side), matrix_(matrix) {}

  void read(TransformSet& set) {
    const PickleNode& root = file_.root();
    if (TorchFile::is_tensor(root)) return read_stack(root, set);
    const PickleNode* layers = root.find("layers");
    const PickleNode& table = layers != nullptr ? *layers : root;
    if (table.kind != Kind::kDict || table.items.empty()) {
      refuse("", "no rotations", "a dictionary with `layers`, one of matrices, or a stack");
    }
    if (table.items.size() > 2 * size_t{kMostLayers}) refuse("", "too many layers");
    for (size_t i = 0; i < table.items.size(); i += 2) {
      const std::optional<int> id = layer_id(*table.items[i]);
      if (!id) refuse("", "a key of a layer is no id", "an integer from 0 on");
      if (!seen_.insert(*id).second) refuse(fmt::format("layer {}", *id), "a layer comes twice");
      read_entry(*id, *table.items[i + 1], side_of(set[*id], side_));
    }
  }

  const std::set<std::string>& fields() const { return fields_; }

 private:
  [[noreturn]] void refuse(const std::string& place, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const {
    throw Error({.what = what,
                 .where = place.empty() ? where_ : where_ + ": " + place,
                 .expected = expected,
                 .found = found});
  }

  static std::optional<int> layer_id(const PickleNode& key) {
    int id = -1;
    if (key.kind == Kind::kInteger && key.integer < kMostLayers) id = static_cast<int>(key.integer);
    if (key.kind == Kind::kText) {
      const char* const end = key.text.data() + key.text.size();
      const auto [stop, status] = std::from_chars(key.text.data(), end, id);
      if (status != std::errc() || stop != end || id >= kMostLayers) id = -1;
    }
    return id < 0 ? std::nullopt : std::optional(id);
  }

  FloatTensor tensor(const PickleNode& node, const std::string& place) {
    FloatTensor found = file_.tensor(node, place, left_);
    left_ -= static_cast<int64_t>(found.values.size());
    if (!std::all_of(found.values.begin(), found.values.end(),
                     [](float x) { return std::isfinite(x); })) {
      refuse(place, "a number that is not finite");
    }
    return found;
  }

  // [d, d] or [heads, d, d].
  MatrixStack<float> square(FloatTensor found, const std::string& place) const {
    std::vector<int64_t> shape = found.shape;
    if (shape.size() == 2) shape.insert(shape.begin(), 1);
    if (shape.size() != 3 || shape[0] < 1 || shape[1] < 1 || shape[1] != shape[2] ||
        shape[1] > kMaxHeadDim) {
      refuse(place, "a rotation has a wrong shape", "[d, d] or [heads, d, d]",
             fmt::format("[{}]", fmt::join(found.shape, ", ")));
    }
    MatrixStack<float> stack;
    stack.count = static_cast<int>(shape[0]);
    stack.rows = stack.cols = static_cast<int>(shape[1]);
    stack.data = std::move(found.values);
    return stack;
  }

  void read_stack(const PickleNode& root, TransformSet& set) {
    const FloatTensor all = tensor(root, "the stack");
    if (all.shape.size() != 3 || all.shape[0] > kMostLayers) {
      refuse("the stack", "a stack of rotations has a wrong shape", "[layers, d, d]",
             fmt::format("[{}]", fmt::join(all.shape, ", ")));
    }
    const MatrixStack<float> layers = square(all, "the stack");
    const size_t size = layers.data.size() / static_cast<size_t>(layers.count);
    for (int id = 0; id < layers.count; ++id) {
      MatrixStack<float>& forward = side_of(set[id], side_).forward;
      forward = MatrixStack<float>(1, layers.rows, layers.cols);
      std::copy_n(layers.data.begin() + static_cast<ptrdiff_t>(size) * id, size,
                  forward.data.begin());
    }
  }

  void read_entry(int id, const PickleNode& entry, SideTransform& side) {
    const std::string place = fmt::format("layer {}", id);
    if (TorchFile::is_tensor(entry)) {
      side.forward = square(tensor(entry, place), place);
      return;
    }
    for (size_t i = 0; entry.kind == Kind::kDict && i < entry.items.size(); i += 2) {
      if (entry.items[i]->kind == Kind::kText) fields_.insert(entry.items[i]->text);
    }
    const PickleNode* rotation = entry.find(matrix_ ? matrix_ : "rotation");
    if (rotation == nullptr && matrix_ == nullptr) rotation = entry.find(kLockedMatrix);
    if (rotation == nullptr) {
      refuse(place, fmt::format("an entry has no `{}`", matrix_ ? matrix_ : "rotation"));
    }
    const PickleNode* stored = entry.find("layer_id");
    if (stored != nullptr && (stored->kind != Kind::kInteger || stored->integer != id)) {
      refuse(place, "layer_id is not the key of its entry");
    }
    side.forward = square(tensor(*rotation, place), place);
    const auto present = [&entry](const char* name) {
      const PickleNode* node = entry.find(name);
      return node != nullptr && node->kind != Kind::kNone ? node : nullptr;
    };
    if (const PickleNode* partner = present(partner_name(side_))) {
      const std::string where = fmt::format("{}, {}", place, partner_name(side_));
      side.partner = square(tensor(*partner, where), where);
      if (side_ == Side::kValue) {
        for (int head = 0; head < side.partner.count; ++head) {
          side.partner[head].transposeInPlace();
        }
      }
    }
    const auto vectors = [&](const PickleNode& node, const char* name) {
      const std::string where = fmt::format("{}, {}", place, name);
      const FloatTensor found = tensor(node, where);
      const bool one = found.shape.size() == 1;
      if (found.shape.empty() || found.shape.size() > 2 || found.shape.back() < 1 ||
          found.shape.back() > kMaxHeadDim) {
        refuse(where, "a vector has a wrong shape", "[d] or [heads, d]",
               fmt::format("[{}]", fmt::join(found.shape, ", ")));
      }
      return std::pair{one ? 1 : static_cast<int>(found.shape[0]), found};
    };
    if (const PickleNode* mean = side_ == Side::kKey ? present("k_mean") : nullptr) {
      auto [heads, found] = vectors(*mean, "k_mean");
      side.mean = VectorStack<float>(heads, static_cast<int>(found.shape.back()));
      side.mean.data = std::move(found.values);
    }
    if (const PickleNode* eigenvalues = present("eigenvalues")) {
      const auto [heads, found] = vectors(*eigenvalues, "eigenvalues");
      side.eigenvalues = VectorStack<double>(heads, static_cast<int>(found.shape.back()));
      std::copy(found.values.begin(), found.values.end(), side.eigenvalues.data.begin());
    }
  }

  TorchFile file_;
  std::string where_;
  Side side_;
  const char* matrix_;
  int64_t left_ = kMostValues;
  std::set<int> seen_;
  std::set<std::string> fields_;
};

}  // namespace

TorchLayout torch_layout(FileLayout layout) {
  const bool locked = layout == FileLayout::kTorchLocked;
  return {.per_head = locked || layout == FileLayout::kTorchPerHead,
          .matrix = locked ? kLockedMatrix : "rotation"};
}

void write_torch_rotations(const std::filesystem::path& path, const TransformSet& set, Side side,
                           const TorchLayout& layout) {
  const bool per_head = layout.per_head;
  TorchDict layers;
  for (const auto& [id, layer] : set) {
    layers.push_back({int64_t{id}, {entry_of(id, side_of(layer, side), side, layout)}});
  }
  TorchDict root;
  root.push_back({"format_version", {int64_t{per_head ? 2 : 1}}});
  root.push_back(
      {"objective", {per_head ? std::string("cov_eig_hadamard_perhead") : objective(set, side)}});
  root.push_back({"source_grouping", {std::string(per_head ? "per_kv_head" : "layer")}});
  root.push_back({"layers", {std::move(layers)}});
  write_torch_file(path, {std::move(root)});
}

std::set<std::string> read_torch_rotations(const std::filesystem::path& path, Side side,
                                           TransformSet& set, const char* matrix) {
  Reader reader(path, side, matrix);
  reader.read(set);
  return reader.fields();
}

// Matrices are transposed on the way out and in.

namespace {

constexpr std::string_view kLayerKey = "layer_", kOneKey = "rotation";
constexpr int kMostMlxLayers = 4096;

std::optional<int> id_of(std::string_view key) {
  if (!key.starts_with(kLayerKey)) return std::nullopt;
  int id = -1;
  const char* const end = key.data() + key.size();
  const auto [stop, status] = std::from_chars(key.data() + kLayerKey.size(), end, id);
  const bool good = status == std::errc() && stop == end && id >= 0 && id < kMostMlxLayers;
  return good ? std::optional(id) : std::nullopt;
}

MatrixStack<float> turned(const FloatTensor& tensor, const std::string& where) {
  std::vector<int64_t> shape = tensor.shape;
  if (shape.size() == 2) shape.insert(shape.begin(), 1);
  if (shape.size() != 3 || shape[0] < 1 || shape[1] < 1 || shape[1] != shape[2] ||
      shape[1] > kMaxHeadDim) {
    throw Error({.what = "a rotation has a wrong shape",
                 .where = where,
                 .expected = "[d, d] or [heads, d, d]",
                 .found = fmt::format("[{}]", fmt::join(tensor.shape, ", "))});
  }
  if (!std::all_of(tensor.values.begin(), tensor.values.end(),
                   [](float x) { return std::isfinite(x); })) {
    throw Error({.what = "a number that is not finite", .where = where});
  }
  MatrixStack<float> stack;
  stack.count = static_cast<int>(shape[0]);
  stack.rows = stack.cols = static_cast<int>(shape[1]);
  stack.data = tensor.values;
  for (int head = 0; head < stack.count; ++head) stack[head].transposeInPlace();
  return stack;
}

}  // namespace

void write_mlx_rotations(const std::filesystem::path& path, const TransformSet& set, Side side) {
  FloatTensors tensors;
  for (const auto& [id, layer] : set) {
    MatrixStack<float> stack = side_of(layer, side).forward;
    for (int head = 0; head < stack.count; ++head) stack[head].transposeInPlace();
    FloatTensor tensor{{stack.rows, stack.cols}, std::move(stack.data)};
    if (stack.count > 1) tensor.shape.insert(tensor.shape.begin(), stack.count);
    tensors.emplace(fmt::format("{}{}", kLayerKey, id), std::move(tensor));
  }
  write_safetensors(path, tensors);
}

void write_mlx_manifest(const std::filesystem::path& folder, const TransformSet& set) {
  Json ids = Json::array();
  for (const auto& entry : set) ids.push_back(entry.first);
  const Json manifest = {{"algorithm", "OSCAR"},
                         {"layer_indices", std::move(ids)},
                         {"paper", "arXiv:2605.17757"},
                         {"schema", "mlx-lm-oscar-rotations-v1"}};
  write_file_atomically(folder / kMlxManifest, manifest.dump(2) + "\n");
}

void read_mlx_rotations(const std::filesystem::path& path, Side side, int num_layers,
                        TransformSet& set) {
  for (const auto& [key, tensor] : read_safetensors(path)) {
    const std::string where = path.string() + ": " + key;
    const std::optional<int> id = id_of(key);
    if (!id && key != kOneKey) {
      throw Error({.what = "not a rotation of mlx-lm", .where = where, .expected = "layer_<id>"});
    }
    const MatrixStack<float> matrices = turned(tensor, where);
    const int first = id ? *id : 0, end = id ? *id + 1 : num_layers;
    for (int layer = first; layer < end; ++layer) side_of(set[layer], side).forward = matrices;
  }
}

bool has_mlx_keys(const std::filesystem::path& path) {
  const std::vector<TensorEntry> entries = parse_safetensors_header(MappedFile(path));
  return !entries.empty() && std::all_of(entries.begin(), entries.end(), [](const auto& entry) {
    return id_of(entry.name) || entry.name == kOneKey;
  });
}

// Matrices are transposed on the way out and in.

namespace {

constexpr std::string_view kBlock = "blk.", kKeyTensor = kGgufKeyRotation,
                           kValueTensor = kGgufValueRotation;
// The one that the branch reads rotations for (bundle/backends.cpp).
constexpr std::string_view kArchitecture = "qwen3";
constexpr int kMostGgufLayers = 4096;

// The layer of a name that ends in `suffix`.
std::optional<int> layer_of(std::string_view name, std::string_view suffix) {
  if (!name.starts_with(kBlock) || !name.ends_with(suffix)) return std::nullopt;
  const std::string_view digits =
      name.substr(kBlock.size(), name.size() - kBlock.size() - suffix.size());
  int id = -1;
  const auto [stop, status] = std::from_chars(digits.data(), digits.data() + digits.size(), id);
  const bool good = status == std::errc() && stop == digits.data() + digits.size() && id >= 0 &&
                    id < kMostGgufLayers;
  return good ? std::optional(id) : std::nullopt;
}

MatrixStack<float> rotation_of(const GgufTensor& tensor, const std::string& where) {
  const std::vector<int64_t>& shape = tensor.shape;
  if (shape.size() != 2 || shape[0] != shape[1] || shape[0] < 1 || shape[0] > kMaxHeadDim ||
      tensor.type == nullptr || tensor.type->decode == nullptr) {
    throw Error({.what = "a rotation of another shape or type",
                 .where = where,
                 .expected = "F32 [d, d]",
                 .found = tensor.type == nullptr ? "" : tensor.type->name});
  }
  const int d = static_cast<int>(shape[0]);
  MatrixStack<float> stack(1, d, d);
  decode_ggml(*tensor.type, tensor.data, int64_t{d} * d, stack.data.data());
  if (!stack[0].allFinite()) throw Error({.what = "a number that is not finite", .where = where});
  stack[0].transposeInPlace();
  return stack;
}

// The branch looks tensors up by the layers of the model that it loads.
void require_model_of(const GgufFile& model, const TransformSet& set) {
  const auto require = [&](const std::string& key, int64_t expected, int64_t found) {
    if (expected == found) return;
    throw Error({.what = "the GGUF model has another shape than the bundle's",
                 .where = fmt::format("{}: {}", model.path().string(), key),
                 .expected = std::to_string(expected),
                 .found = std::to_string(found)});
  };
  const std::string arch(kArchitecture);
  if (const auto found = model.text("general.architecture"); found != kArchitecture) {
    throw Error({.what = "llama.cpp's branch reads rotations of another architecture",
                 .where = model.path().string(),
                 .expected = arch,
                 .found = std::string(found.value_or("none"))});
  }
  require(arch + ".block_count", static_cast<int64_t>(set.size()),
          model.integer(arch + ".block_count").value_or(0));
  const auto heads = model.integer(arch + ".attention.head_count").value_or(0);
  const auto width = model.integer(arch + ".embedding_length").value_or(0);
  const int64_t implied = heads > 0 ? width / heads : 0;
  const LayerTransforms& first = set.begin()->second;
  require(arch + ".attention.key_length", first.key.forward.rows,
          model.integer(arch + ".attention.key_length").value_or(implied));
  require(arch + ".attention.value_length", first.value.forward.rows,
          model.integer(arch + ".attention.value_length").value_or(implied));
}

}  // namespace

void write_gguf_rotations(const std::filesystem::path& path, const TransformSet& set,
                          const std::filesystem::path& base) {
  FloatTensors tensors;
  for (const auto& [id, layer] : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      MatrixStack<float> stack = side_of(layer, side).forward;
      stack[0].transposeInPlace();
      tensors[fmt::format("{}{}{}", kBlock, id, side == Side::kKey ? kKeyTensor : kValueTensor)] = {
          {stack.rows, stack.cols}, std::move(stack.data)};
    }
  }
  if (!base.empty()) {
    const GgufFile model(base);
    require_model_of(model, set);
    const auto as_it_is = [](const std::string&, const GgufTensor&) {
      return std::optional<std::vector<std::byte>>();
    };
    return copy_gguf(model, path, as_it_is, tensors);
  }
  write_gguf(path,
             {{"general.architecture", std::string(kArchitecture)},
              {"general.name", std::string("OSCAR rotations")},
              {fmt::format("{}.block_count", kArchitecture), static_cast<uint32_t>(set.size())}},
             tensors);
}

TransformSet read_gguf_rotations(const std::filesystem::path& path) {
  const GgufFile file(path);
  TransformSet set;
  for (const auto& [name, tensor] : file.tensors()) {
    for (const auto& [suffix, side] :
         {std::pair{kKeyTensor, Side::kKey}, {kValueTensor, Side::kValue}}) {
      const std::optional<int> id = layer_of(name, suffix);
      if (!id) continue;
      side_of(set[*id], side).forward = rotation_of(tensor, path.string() + ": " + name);
    }
  }
  if (set.empty()) {
    throw Error({.what = "no rotations",
                 .where = path.string(),
                 .expected = "tensors blk.<id>.attn_k_rot.weight and attn_v_rot.weight"});
  }
  return set;
}

}  // namespace oscar
