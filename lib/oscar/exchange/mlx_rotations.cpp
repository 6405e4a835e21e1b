// Matrices are transposed on the way out and in.
#include "oscar/exchange/mlx_rotations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/cache/codec.h"
#include "oscar/io/safetensors_arrays.h"
#include "oscar/io/safetensors_header.h"

namespace oscar {
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

}  // namespace oscar
