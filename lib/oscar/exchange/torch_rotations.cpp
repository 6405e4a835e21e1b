// Entries of a dictionary, by global layer id.
#include "oscar/exchange/torch_rotations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>

#include "oscar/base/error.h"
#include "oscar/cache/codec.h"
#include "oscar/io/torch_file.h"

namespace oscar {
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
  if (side == Side::kKey && is_centred(transform)) {
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

}  // namespace oscar
