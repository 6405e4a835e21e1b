// Weights of a folder by the names of weights.h, whatever its files call them.
#include "oscar/model/checkpoint/named_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <array>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {

// Names: prefixes of text halves, parts that a family calls otherwise, tensors that hold several.

namespace {

// What the names of a text half begin with, and what they begin with here.
constexpr NamePart kTextPrefixes[] = {{"model.language_model.", "model."},
                                      {"language_model.model.", "model."},
                                      {"language_model.lm_head.", "lm_head."}};

bool is_of_other_part(const std::string& name, const StoredNames& names) {
  return std::ranges::any_of(names.other_parts,
                             [&](std::string_view prefix) { return name.starts_with(prefix); });
}

std::string table_name(std::string name, const StoredNames& names) {
  if (!names.other_parts.empty()) {
    for (const NamePart& prefix : kTextPrefixes) {
      if (!name.starts_with(prefix.stored)) continue;
      name.replace(0, prefix.stored.size(), prefix.ours);
      break;
    }
  }
  for (const NamePart& part : names.parts) {
    if (const size_t at = name.find(part.stored); at != std::string::npos) {
      name.replace(at, part.stored.size(), part.ours);
    }
  }
  return name;
}

// Tensors of a layer that hold several matrices.
enum Joined { kQkv, kGateUp, kExpertsGateUp, kExpertsDown };
constexpr const char* kJoinedNames[] = {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight",
                                        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"};

std::string joined_name(int layer, Joined joined) {
  return fmt::format("model.layers.{}.{}", layer, kJoinedNames[joined]);
}

// The one that may hold a weight among others; none for roles that are always stored apart.
std::optional<Joined> joined_in(WeightRole role, const StoredNames& names) {
  using enum WeightRole;
  switch (role) {
    case kQ:
    case kK:
    case kV:
      return names.fused ? std::optional(kQkv) : std::nullopt;
    case kGate:
    case kUp:
      return names.fused ? std::optional(kGateUp) : std::nullopt;
    case kExpertGate:
    case kExpertUp:
      return kExpertsGateUp;
    case kExpertDown:
      return kExpertsDown;
    default:
      return std::nullopt;
  }
}

}  // namespace

NamedWeights::NamedWeights(std::shared_ptr<const SafetensorsWeights> files,
                           std::shared_ptr<const WeightSource> weights, const ModelConfig& config)
    : files_(std::move(files)), weights_(std::move(weights)) {
  find_names(config);
  for (int layer = 0; layer < config.num_layers; ++layer) find_rows(config, layer);
}

void NamedWeights::find_names(const ModelConfig& config) {
  for (const std::string& stored : weights_->names()) {
    if (is_of_other_part(stored, config.stored_names)) {
      changes_nothing_ = false;
      continue;
    }
    const std::string name = table_name(stored, config.stored_names);
    const auto [entry, added] = parts_.try_emplace(name, Part{.stored = stored});
    if (!added) {
      throw Error({.what = "two tensors stand for the same weight",
                   .where = weights_->place(stored),
                   .expected = "one of them",
                   .found = entry->second.stored + " too"});
    }
    changes_nothing_ = changes_nothing_ && name == stored;
  }
}

// Rows of joined tensors, in the order of the table: q, k, v; gate, up; experts one after another.
void NamedWeights::find_rows(const ModelConfig& config, int layer) {
  const auto is_there = [&](Joined which) { return parts_.contains(joined_name(layer, which)); };
  if (std::ranges::none_of(std::array{kQkv, kGateUp, kExpertsGateUp, kExpertsDown}, is_there)) {
    return;
  }
  std::map<std::string, JoinedTensor> joined;
  for (const WeightSpec& spec : layer_weights(config, layer)) {
    const auto which = joined_in(spec.role, config.stored_names);
    if (!which || parts_.contains(spec.name)) continue;
    const std::string tensor = joined_name(layer, *which);
    const auto holder = parts_.find(tensor);
    if (holder == parts_.end()) continue;
    JoinedTensor& all = joined[tensor];
    const int64_t matrix = std::max(spec.expert, 0);
    if (matrix >= all.matrices) all.matrices = matrix + 1, all.rows = 0;
    all.of_experts = spec.expert >= 0;
    all.columns = spec.shape[1];
    all.weights.emplace_back(spec.name, Part{.stored = holder->second.stored,
                                             .matrix = matrix,
                                             .first_row = all.rows,
                                             .rows = spec.shape[0]});
    all.rows += spec.shape[0];
  }
  if (joined.empty()) return;
  changes_nothing_ = false;
  const bool transposed = is_transposed(joined);
  for (auto& [tensor, all] : joined) {
    for (auto& [name, part] : all.weights) {
      part.stored_shape = all.shape(transposed);
      part.transposed = transposed && all.of_experts;
      parts_[name] = part;
    }
    parts_.erase(tensor);
  }
}

std::vector<int64_t> NamedWeights::JoinedTensor::shape(bool transposed) const {
  if (!of_experts) return {rows, columns};
  if (transposed) return {matrices, columns, rows};
  return {matrices, rows, columns};
}

bool NamedWeights::is_transposed(const std::map<std::string, JoinedTensor>& joined) const {
  const auto fits = [&](bool transposed) {
    return std::ranges::all_of(joined, [&](const auto& entry) {
      const std::string& stored = entry.second.weights.front().second.stored;
      return files_->stored(stored).shape == entry.second.shape(transposed);
    });
  };
  const bool plain = fits(false), transposed = fits(true);
  const bool has_experts =
      std::ranges::any_of(joined, [](const auto& entry) { return entry.second.of_experts; });
  if (plain != transposed || (plain && !has_experts)) return !plain;
  for (const auto& [tensor, all] : joined) {
    const std::string& stored = all.weights.front().second.stored;
    const auto expected = all.shape(false), found = files_->stored(stored).shape;
    if (plain || (found != expected && found != all.shape(true))) {
      throw Error({.what = plain ? "the order of dimensions of a tensor cannot be told"
                                 : "a tensor has another shape than the configuration asks for",
                   .where = weights_->place(stored),
                   .expected = fmt::format("{}", expected),
                   .found = fmt::format("{}", found)});
    }
  }
  throw Error({.what = "some of a layer's experts are stored transposed, and some are not",
               .where = weights_->place(joined.begin()->second.weights.front().second.stored)});
}

// Rows of a matrix out of a larger tensor.

namespace {

// Rows `first` to first + rows - 1 of a matrix in FP8.
std::shared_ptr<const BlockScales> scales_of_rows(const BlockScales& all, int64_t first,
                                                  int64_t rows, const std::vector<int64_t>& shape,
                                                  const std::string& where) {
  auto part = std::make_shared<BlockScales>(all);
  if (all.block_rows >= shape[0]) {  // one row of blocks
    part->block_rows = rows;
    return part;
  }
  if (first % all.block_rows != 0) {
    throw Error(
        {.what = "a block of scales lies across two matrices",
         .where = where,
         .expected = fmt::format("matrices that begin at multiples of {} rows", all.block_rows),
         .found = fmt::format("one that begins at row {}", first),
         .hint = "take the checkpoint in bf16 that this was made from"});
  }
  const int64_t across = (shape[1] + all.block_columns - 1) / all.block_columns;
  const int64_t begin = first / all.block_rows;
  const int64_t end = (first + rows + all.block_rows - 1) / all.block_rows;
  part->scales.assign(all.scales.begin() + begin * across, all.scales.begin() + end * across);
  return part;
}

// Columns of `matrix` [height, width] from `first_column` on, as rows.
RowDecoder columns_as_rows(const std::byte* matrix, Dtype dtype, int64_t height, int64_t width,
                           int64_t first_column) {
  return [=](int64_t first, int64_t count, float* out) {
    for (int64_t k = 0; k < height; ++k) {
      const int64_t begin = k * width + first_column + first;
      for (int64_t row = 0; row < count; ++row) {
        out[row * height + k] =
            stored_float(dtype, matrix + static_cast<size_t>(begin + row) * dtype_bytes(dtype));
      }
    }
  };
}

}  // namespace

TensorView NamedWeights::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = parts_.find(name);
  const Part whole{.stored = name};
  const Part& part = found == parts_.end() ? whole : found->second;
  if (part.stored_shape.empty()) {
    TensorView view = weights_->get(part.stored, shape);
    view.name = name;
    return view;
  }
  TensorView view = weights_->get(part.stored, part.stored_shape);
  const size_t sizes = part.stored_shape.size();
  const int64_t height = part.stored_shape[sizes - 2], width = part.stored_shape[sizes - 1];
  view.name = name;
  view.shape = shape;
  const StoredBytes stored = stored_bytes(name);
  view.bytes = stored.bytes;
  if (part.transposed) {
    view.decode = columns_as_rows(stored.begin, view.dtype, height, width, part.first_row);
    view.data = nullptr;
    return view;
  }
  view.data = stored.begin;
  if (view.fp8) {
    view.fp8 = scales_of_rows(*view.fp8, part.first_row, shape[0], part.stored_shape, place(name));
  }
  return view;
}

StoredBytes NamedWeights::stored_bytes(const std::string& name) const {
  const auto found = parts_.find(name);
  if (found == parts_.end()) return {};
  const Part& part = found->second;
  StoredBytes stored = weights_->stored_bytes(part.stored);
  if (part.stored_shape.empty()) return stored;
  const auto& shape = part.stored_shape;
  const int64_t matrices = shape.size() == 3 ? shape[0] : 1, height = shape[shape.size() - 2];
  const size_t matrix_bytes = stored.bytes / static_cast<size_t>(matrices);
  stored.begin += static_cast<size_t>(part.matrix) * matrix_bytes;
  stored.bytes = matrix_bytes;
  if (part.transposed) return stored;
  const size_t row_bytes = matrix_bytes / static_cast<size_t>(height);
  stored.begin += static_cast<size_t>(part.first_row) * row_bytes;
  stored.bytes = static_cast<size_t>(part.rows) * row_bytes;
  return stored;
}

std::vector<std::string> NamedWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, part] : parts_) names.push_back(name);
  return names;
}

std::string NamedWeights::place(const std::string& name) const {
  const auto found = parts_.find(name);
  return weights_->place(found == parts_.end() ? name : found->second.stored);
}

std::optional<std::string> NamedWeights::stored_name(const std::string& name) const {
  const auto found = parts_.find(name);
  if (found == parts_.end()) return name;
  if (!found->second.stored_shape.empty()) return std::nullopt;
  return found->second.stored;
}

std::shared_ptr<const WeightSource> by_table_names(
    const std::shared_ptr<const SafetensorsWeights>& files,
    const std::shared_ptr<const WeightSource>& weights, const ModelConfig& config) {
  auto named = std::make_shared<const NamedWeights>(files, weights, config);
  if (named->changes_nothing()) return weights;
  return named;
}

std::vector<std::string> weights_of_other_parts(const ModelConfig& config,
                                                const WeightSource& weights) {
  std::vector<std::string> names = weights.names();
  std::erase_if(
      names, [&](const std::string& name) { return !is_of_other_part(name, config.stored_names); });
  return names;
}

}  // namespace oscar
