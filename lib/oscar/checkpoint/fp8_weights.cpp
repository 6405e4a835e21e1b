// Which scales belong to which weight, and whether they fit.
#include "oscar/checkpoint/fp8_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

namespace oscar {
namespace {

constexpr const char* kFp8 = "F8_E4M3";
constexpr const char* kDamaged = "the checkpoint is damaged or of another tool; fetch it again";

// Scales of what goes into a product or into the cache, not of weights.
constexpr std::string_view kOtherScales[] = {".input_scale", ".activation_scale", ".output_scale",
                                             ".q_scale",     ".k_scale",          ".v_scale"};

// Tensors that only make sense beside a quantized weight.
constexpr std::string_view kWeightScales[] = {"_scale", "_scale_inv"};

template <typename Suffixes>
bool ends_with_any(const std::string& name, const Suffixes& suffixes) {
  return std::any_of(std::begin(suffixes), std::end(suffixes),
                     [&](const auto& suffix) { return name.ends_with(suffix); });
}

int64_t count_blocks(int64_t size, int64_t block) {
  return size / block + (size % block != 0 ? 1 : 0);
}

std::optional<Dtype> scale_dtype(const std::string& dtype) {
  for (const Dtype candidate : {Dtype::kFp32, Dtype::kBf16}) {
    if (dtype == dtype_name(candidate)) return candidate;
  }
  return std::nullopt;
}

std::vector<float> read_numbers(const SafetensorsWeights::Stored& stored) {
  const Dtype dtype = *scale_dtype(stored.dtype);
  std::vector<float> numbers(stored.bytes / dtype_bytes(dtype));
  if (numbers.empty()) return numbers;
  if (dtype == Dtype::kFp32) {
    std::memcpy(numbers.data(), stored.data, stored.bytes);
    return numbers;
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, stored.data + 2 * i, sizeof bits);  // headers need not align tensors
    numbers[i] = bf16_to_float(bits);
  }
  return numbers;
}

}  // namespace

Fp8Weights::Fp8Weights(std::shared_ptr<const SafetensorsWeights> files, Fp8Layout layout)
    : files_(std::move(files)), layout_(std::move(layout)) {
  const std::vector<std::string> names = files_->names();
  for (const std::string& name : names) {
    if (files_->stored(name).dtype != kFp8) continue;
    const std::string scale = find_scale(name);
    check_scale(name, scale);
    scales_[name] = scale;
    hidden_.insert(scale);
  }
  if (scales_.empty()) {
    throw Error({.what = "config.json speaks of FP8 weights, and no tensor is stored in FP8",
                 .where = files_->shards().front().parent_path().string(),
                 .expected = std::string("tensors of dtype ") + kFp8,
                 .hint = "remove quantization_config from a copy of the folder's config.json if "
                         "the weights are those of the plain model"});
  }
  for (const std::string& name : names) {
    if (hidden_.contains(name)) continue;
    if (ends_with_any(name, kOtherScales)) {
      hidden_.insert(name);
    } else if (ends_with_any(name, kWeightScales)) {
      throw Error({.what = "scales belong to no tensor that is stored in FP8",
                   .where = place(name),
                   .hint = "without them the weights would be other numbers than the model's"});
    }
  }
}

std::string Fp8Weights::find_scale(const std::string& weight) const {
  const size_t dot = weight.rfind('.');
  const auto& left_out = layout_.left_out;
  if (dot != std::string::npos &&
      std::find(left_out.begin(), left_out.end(), weight.substr(0, dot)) != left_out.end()) {
    throw Error({.what = "a weight is stored in FP8 whose module config.json leaves out",
                 .where = place(weight),
                 .hint = kDamaged});
  }
  std::vector<std::string> wanted, found;
  for (const std::string& suffix : layout_.scale_suffixes) {
    wanted.push_back(weight + suffix);
    if (files_->contains(wanted.back())) found.push_back(wanted.back());
  }
  if (found.size() == 1) return found.front();
  throw Error({.what = found.empty() ? "a weight in FP8 has no scales"
                                     : "a weight in FP8 has scales under two names",
               .where = place(weight),
               .expected = fmt::format("{}", fmt::join(wanted, " or ")),
               .hint = kDamaged});
}

std::vector<int64_t> Fp8Weights::grid(const std::vector<int64_t>& shape) const {
  switch (layout_.layout) {
    case ScaleLayout::kTensor:
      return {1, 1};
    case ScaleLayout::kChannel:
      return {shape[0], 1};
    case ScaleLayout::kBlock:
      break;
  }
  return {count_blocks(shape[0], layout_.block_rows),
          count_blocks(shape[1], layout_.block_columns)};
}

void Fp8Weights::check_scale(const std::string& weight, const std::string& scale) const {
  const SafetensorsWeights::Stored codes = files_->stored(weight), found = files_->stored(scale);
  if (codes.shape.size() != 2 || codes.shape[0] == 0 || codes.shape[1] == 0) {
    throw Error({.what = "a tensor in FP8 is no matrix",
                 .where = place(weight),
                 .expected = "[rows, columns]",
                 .found = fmt::format("{}", codes.shape)});
  }
  if (!scale_dtype(found.dtype)) {
    throw Error({.what = "scales of this dtype are not implemented",
                 .where = place(scale),
                 .expected = "F32 or BF16",
                 .found = found.dtype});
  }
  const std::vector<int64_t> expected = grid(codes.shape);
  // One scale is written as a number or as a vector of one, one a channel as a vector too.
  const bool one = layout_.layout == ScaleLayout::kTensor &&
                   (found.shape.empty() || found.shape == std::vector<int64_t>{1});
  const bool vector =
      layout_.layout == ScaleLayout::kChannel && found.shape == std::vector<int64_t>{expected[0]};
  if (!one && !vector && found.shape != expected) {
    throw Error({.what = "the shape of scales does not fit their weight",
                 .where = place(scale),
                 .expected = fmt::format("{} ({}) for a weight of {}", expected, describe(layout_),
                                         codes.shape),
                 .found = fmt::format("{}", found.shape),
                 .hint = kDamaged});
  }
}

bool Fp8Weights::contains(const std::string& name) const {
  return files_->contains(name) && !hidden_.contains(name);
}

TensorView Fp8Weights::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = scales_.find(name);
  if (found == scales_.end()) return files_->get(name, shape);
  const SafetensorsWeights::Stored codes = files_->stored(name);
  if (codes.shape != shape) {
    throw Error({.what = "a tensor has another shape than the configuration asks for",
                 .where = place(name),
                 .expected = fmt::format("{}", shape),
                 .found = fmt::format("{}", codes.shape)});
  }
  auto scales = std::make_shared<BlockScales>();
  const bool block = layout_.layout == ScaleLayout::kBlock;
  scales->block_rows = block                                     ? layout_.block_rows
                       : layout_.layout == ScaleLayout::kChannel ? 1
                                                                 : shape[0];
  scales->block_columns = block ? layout_.block_columns : shape[1];
  scales->scales = read_numbers(files_->stored(found->second));
  for (size_t i = 0; i < scales->scales.size(); ++i) {
    const float scale = scales->scales[i];
    if (std::isfinite(scale) && scale > 0) continue;
    throw Error({.what = "a scale of weights in FP8 is no positive number",
                 .where = fmt::format("{}, number {}", place(found->second), i),
                 .expected = "a finite number above 0",
                 .found = fmt::format("{}", scale),
                 .hint = kDamaged});
  }
  return {.name = name,
          .shape = shape,
          .data = codes.data,
          .bytes = codes.bytes,
          .fp8 = std::move(scales)};
}

std::vector<std::string> Fp8Weights::names() const {
  std::vector<std::string> names = files_->names();
  std::erase_if(names, [this](const std::string& name) { return hidden_.contains(name); });
  return names;
}

std::string Fp8Weights::quantization() const {
  std::map<std::string, int> counts;
  for (const std::string& name : names()) ++counts[files_->stored(name).dtype];
  std::string text =
      fmt::format("{} with {} ({} tensors)", kFp8, describe(layout_), scales_.size());
  for (const auto& [dtype, count] : counts) {
    if (dtype != kFp8) text += fmt::format(", {} ({})", dtype, count);
  }
  if (const size_t others = hidden_.size() - scales_.size(); others > 0) {
    text += fmt::format("; {} scales of activations or of the cache not used", others);
  }
  return text;
}

}  // namespace oscar
