// One row at a time, from the file or from the decoder of its type.
#include "oscar/bundle/weight_samples.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {
namespace {

// E4M3 without infinities: sign, 4 bits of exponent, 3 of mantissa.
float fp8_to_float(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

// A matrix of a source, row by row; a vector is a matrix of one row.
class Rows {
 public:
  Rows(const WeightSource& source, const WeightSpec& spec)
      : view_(source.get(spec.name, spec.shape)), stored_(source.stored_bytes(spec.name)) {}

  std::vector<float> operator[](int64_t row) const {
    const int64_t columns = view_.shape.back();
    std::vector<float> values(static_cast<size_t>(columns));
    if (view_.data == nullptr) {
      view_.decode(row, 1, values.data());
      return values;
    }
    const size_t entry = view_.fp8 ? 1 : dtype_bytes(view_.dtype);
    std::vector<std::byte> bytes(values.size() * entry);
    // Not through the map, where a page brings megabytes along.
    stored_.read(static_cast<size_t>(row) * bytes.size(), bytes.size(), bytes.data());
    for (int64_t column = 0; column < columns; ++column) {
      const auto i = static_cast<size_t>(column);
      values[i] = view_.fp8 ? fp8_to_float(static_cast<uint8_t>(bytes[i])) * scale(row, column)
                            : stored_float(view_.dtype, bytes.data() + i * entry);
    }
    return values;
  }

 private:
  float scale(int64_t row, int64_t column) const {
    const BlockScales& fp8 = *view_.fp8;
    const int64_t across = (view_.shape[1] + fp8.block_columns - 1) / fp8.block_columns;
    return fp8
        .scales[static_cast<size_t>(row / fp8.block_rows * across + column / fp8.block_columns)];
  }

  TensorView view_;
  StoredBytes stored_;
};

// The tensor's place among the sampled matrices or vectors; -1: it is not among them.
constexpr std::array kMatrixRoles = {WeightRole::kQ, WeightRole::kK, WeightRole::kV,
                                     WeightRole::kO};
constexpr std::array kVectorRoles = {WeightRole::kQBias, WeightRole::kKBias, WeightRole::kVBias,
                                     WeightRole::kQNorm, WeightRole::kKNorm};
static_assert(kMatrixRoles.size() == kSampledMatrices && kVectorRoles.size() == kSampledVectors);

template <size_t N>
int place_among(const std::array<WeightRole, N>& roles, WeightRole role) {
  const auto found = std::find(roles.begin(), roles.end(), role);
  return found == roles.end() ? -1 : static_cast<int>(found - roles.begin());
}

void sample_matrix(const WeightSource& source, const WeightSpec& spec, int index,
                   MatrixStack<float>& samples) {
  const Rows matrix(source, spec);
  const bool by_columns = spec.role == WeightRole::kO;
  const int64_t part = spec.shape[by_columns ? 1 : 0] / samples.count;  // of a KV head
  const int64_t rows = by_columns ? spec.shape[0] : part;
  const int64_t columns = by_columns ? part : spec.shape[1];
  std::vector<float> row;
  int64_t held = -1;
  const auto take = [&](int head, int sample) {
    const SamplePosition at = sample_position(sample, rows, columns);
    const int64_t wanted = at.row + (by_columns ? 0 : head * part);
    if (wanted != held) row = matrix[held = wanted];
    const float value = row[static_cast<size_t>(at.column + (by_columns ? head * part : 0))];
    samples[head](index, sample) = bf16_to_float(float_to_bf16(value));
  };
  if (by_columns) {  // a row of all heads is read once
    for (int sample = 0; sample < kWeightSamples; ++sample) {
      for (int head = 0; head < samples.count; ++head) take(head, sample);
    }
    return;
  }
  for (int head = 0; head < samples.count; ++head) {
    for (int sample = 0; sample < kWeightSamples; ++sample) take(head, sample);
  }
}

void sample_vector(const WeightSource& source, const WeightSpec& spec, bool shared, int index,
                   MatrixStack<float>& samples) {
  const std::vector<float> entries = Rows(source, spec)[0];
  const int64_t part = spec.shape[0] / (shared ? 1 : samples.count);  // of a KV head
  for (int head = 0; head < samples.count; ++head) {
    for (int sample = 0; sample < kWeightSamples; ++sample) {
      const int64_t at = sample_position(sample, part) + (shared ? 0 : head * part);
      samples[head](index, sample) = bf16_to_float(float_to_bf16(entries[static_cast<size_t>(at)]));
    }
  }
}

void check_finite(const MatrixStack<float>& samples, const WeightSource& weights, int layer) {
  if (std::all_of(samples.data.begin(), samples.data.end(),
                  [](float value) { return std::isfinite(value); })) {
    return;
  }
  throw Error({.what = "attention weights hold a value that is not finite",
               .where = weights.shards().front().string() + ": layer " + std::to_string(layer),
               .hint = "the checkpoint is damaged; fetch it again"});
}

}  // namespace

std::vector<WeightSamples> sample_weights(const ModelConfig& config, const WeightSource& weights) {
  if (config.has_output_gates()) return {};  // rows of q_proj are not those of queries alone
  std::vector<WeightSamples> layers(static_cast<size_t>(config.num_layers));
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (!config.geometry(layer, 0).fitted()) continue;
    auto& samples = layers[static_cast<size_t>(layer)];
    samples.matrices = MatrixStack<float>(config.num_kv_heads, kSampledMatrices, kWeightSamples);
    samples.vectors = MatrixStack<float>(config.num_kv_heads, kSampledVectors, kWeightSamples);
    for (const WeightSpec& spec : layer_weights(config, layer)) {
      if (const int index = place_among(kMatrixRoles, spec.role); index >= 0) {
        sample_matrix(weights, spec, index, samples.matrices);
      }
      if (const int index = place_among(kVectorRoles, spec.role); index >= 0) {
        const bool norm = spec.role == WeightRole::kQNorm || spec.role == WeightRole::kKNorm;
        const bool shared = norm && spec.shape[0] == config.head_dim;
        sample_vector(weights, spec, shared, index, samples.vectors);
      }
    }
    check_finite(samples.matrices, weights, layer);
    check_finite(samples.vectors, weights, layer);
  }
  return layers;
}

namespace {

constexpr std::array kMatrixNames = {"W_Q", "W_K", "W_V", "W_O"};
constexpr std::array kVectorNames = {"b_Q", "b_K", "b_V", "q_norm", "k_norm"};
constexpr int kFirstNorm = 3;
static_assert(kMatrixNames.size() == kSampledMatrices && kVectorNames.size() == kSampledVectors);

bool is_same_entry(float a, float b, bool fp16) {
  if (a == b || !fp16) return a == b;
  int exponent = 0;  // the larger one is below 2^exponent
  std::frexp(std::max(std::abs(a), std::abs(b)), &exponent);
  const double ulp = std::ldexp(1.0, exponent - 8), subnormal = std::ldexp(1.0, -24);
  return std::abs(double{a} - double{b}) <= ulp + subnormal;
}

// What was compared so far.
struct SampleDifferences {
  std::string first;  // tensor that differs
  int tensors = 0, differing_tensors = 0;
  int64_t entries = 0, differing_entries = 0;

  template <size_t N>
  void add(const MatrixStack<float>& a, const MatrixStack<float>& b,
           const std::array<const char*, N>& names, int first_norm, size_t layer, bool fp16) {
    if (a.empty() || b.empty()) return;
    const int heads = std::min(a.count, b.count);
    for (int tensor = 0; tensor < static_cast<int>(N); ++tensor) {
      int64_t compared = 0, differing = 0;
      for (int head = 0; head < heads; ++head) {
        const auto x = a[head].row(tensor), y = b[head].row(tensor);
        if (tensor >= first_norm && (x.isZero(0) || y.isZero(0))) continue;
        compared += kWeightSamples;
        for (int i = 0; i < kWeightSamples; ++i) {
          differing += is_same_entry(x[i], y[i], fp16) ? 0 : 1;
        }
      }
      entries += compared;
      differing_entries += differing;
      tensors += compared > 0 ? 1 : 0;
      if (differing == 0) continue;
      ++differing_tensors;
      if (first.empty()) first = fmt::format("{} of layer {}", names[tensor], layer);
    }
  }
};

}  // namespace

std::string weight_difference(const std::vector<WeightSamples>& a,
                              const std::vector<WeightSamples>& b, bool fp16) {
  SampleDifferences found;
  for (size_t layer = 0; layer < std::min(a.size(), b.size()); ++layer) {
    found.add(a[layer].matrices, b[layer].matrices, kMatrixNames, kSampledMatrices, layer, fp16);
    found.add(a[layer].vectors, b[layer].vectors, kVectorNames, kFirstNorm, layer, fp16);
  }
  if (found.differing_entries == 0) return "";
  return fmt::format(
      "{} differs, and {} more of {} tensors: {:.1f}% of {} sampled entries", found.first,
      found.differing_tensors - 1, found.tensors,
      100.0 * static_cast<double>(found.differing_entries) / static_cast<double>(found.entries),
      found.entries);
}

}  // namespace oscar
