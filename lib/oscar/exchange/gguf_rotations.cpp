// Matrices are transposed on the way out and in.
#include "oscar/exchange/gguf_rotations.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/cache/codec.h"
#include "oscar/io/gguf.h"
#include "oscar/io/gguf_copy.h"
#include "oscar/io/gguf_writer.h"

namespace oscar {
namespace {

constexpr std::string_view kBlock = "blk.", kKeyTensor = ".attn_k_rot.weight",
                           kValueTensor = ".attn_v_rot.weight";
// The one that the branch reads rotations for (stacks/stack.cpp).
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
