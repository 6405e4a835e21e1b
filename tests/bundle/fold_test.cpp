// Weights with a value transform folded in compute what they did, in every dtype.
#include "oscar/bundle/fold.h"

#include <gtest/gtest.h>
#include <cmath>
#include <random>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

namespace {

using namespace oscar;

constexpr int kHidden = 10, kQueryHeads = 6, kKvHeads = 2, kDim = 4;

// A tensor that owns its bytes, one byte off any alignment, as headers may place it.
struct Tensor {
  TensorView view;
  std::vector<std::byte> bytes;

  Tensor(const char* name, Dtype dtype, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    bytes.resize(static_cast<size_t>(count) * dtype_bytes(dtype) + 1);
    view = {name, dtype, std::move(shape), bytes.data() + 1, bytes.size() - 1};
  }
  void set(const std::vector<std::byte>& values) {
    std::copy(values.begin(), values.end(), bytes.begin() + 1);
  }
  void randomise(std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < view.bytes / dtype_bytes(view.dtype); ++i) {
      const float value = normal(random);
      if (view.dtype == Dtype::kFp32) {
        std::memcpy(bytes.data() + 1 + 4 * i, &value, 4);
      } else {
        const uint16_t half =
            view.dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
        std::memcpy(bytes.data() + 1 + 2 * i, &half, 2);
      }
    }
  }
};

struct Layer {
  Tensor value, value_bias, output, output_bias;

  explicit Layer(Dtype dtype)
      : value("v", dtype, {kKvHeads * kDim, kHidden}),
        value_bias("vb", dtype, {kKvHeads * kDim}),
        output("o", dtype, {kHidden, kQueryHeads * kDim}),
        output_bias("ob", dtype, {kHidden}) {
    std::mt19937_64 random(1);
    for (Tensor* tensor : {&value, &value_bias, &output, &output_bias}) tensor->randomise(random);
  }
  ValueWeights views() const {
    return {value.view, value_bias.view, output.view, output_bias.view};
  }
};

ValueFold random_fold(bool with_mean) {
  std::mt19937_64 random(2);
  std::normal_distribution<double> normal;
  ValueFold fold;
  fold.num_qo_heads = kQueryHeads;
  for (int head = 0; head < kKvHeads; ++head) {
    const MatrixD forward = MatrixD::NullaryExpr(kDim, kDim, [&] { return normal(random); }) +
                            3 * MatrixD::Identity(kDim, kDim);
    fold.forward.push_back(forward);
    fold.inverse.push_back(forward.inverse());
    if (with_mean) {
      fold.mean.push_back(VectorD::NullaryExpr(kDim, [&] { return normal(random); }));
    }
  }
  return fold;
}

Layer folded(const Layer& layer, const ValueFold& fold) {
  Layer result = layer;
  result.value.view.data = result.value.bytes.data() + 1;
  result.value_bias.view.data = result.value_bias.bytes.data() + 1;
  result.output.view.data = result.output.bytes.data() + 1;
  result.output_bias.view.data = result.output_bias.bytes.data() + 1;
  result.value.set(fold_value_weight(layer.value.view, fold));
  result.value_bias.set(fold_value_bias(layer.value_bias.view, fold));
  result.output.set(fold_output_weight(layer.output.view, fold));
  result.output_bias.set(fold_output_bias(layer.output_bias.view, layer.output.view, fold));
  return result;
}

double relative_change(Dtype dtype, const ValueFold& fold) {
  const Layer before(dtype);
  const Layer after = folded(before, fold);
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  const MatrixD inputs = MatrixD::NullaryExpr(20, kHidden, [&] { return normal(random); });
  const MatrixD expected = attended_to_self(before.views(), inputs, kQueryHeads, kKvHeads);
  return (attended_to_self(after.views(), inputs, kQueryHeads, kKvHeads) - expected).norm() /
         expected.norm();
}

TEST(FoldWeights, TheContributionStaysUpToTheRoundingOfTheDtype) {
  for (const bool with_mean : {false, true}) {
    const ValueFold fold = random_fold(with_mean);
    // Condition numbers are about 4; each weight is rounded once to half a unit of its dtype.
    EXPECT_LT(relative_change(Dtype::kFp32, fold), 8 * 0x1p-24);
    EXPECT_LT(relative_change(Dtype::kFp16, fold), 8 * 0x1p-11);
    EXPECT_LT(relative_change(Dtype::kBf16, fold), 8 * 0x1p-8);
  }
}

TEST(FoldWeights, ValuesComeOutCenteredAndTransformed) {
  const ValueFold fold = random_fold(true);
  const Layer before(Dtype::kFp32), after = folded(before, fold);
  const auto values = [](const Layer& layer, const VectorD& input) {
    VectorD v = VectorD::Zero(kKvHeads * kDim);
    for (int row = 0; row < kKvHeads * kDim; ++row) {
      const auto at = [](const Tensor& tensor, int i) {
        float value;
        std::memcpy(&value, tensor.view.data + 4 * i, 4);
        return static_cast<double>(value);
      };
      v[row] = at(layer.value_bias, row);
      for (int i = 0; i < kHidden; ++i) v[row] += input[i] * at(layer.value, row * kHidden + i);
    }
    return v;
  };
  const VectorD input = VectorD::LinSpaced(kHidden, -1, 2);
  const VectorD v = values(before, input), w = values(after, input);
  for (int head = 0; head < kKvHeads; ++head) {
    const VectorD expected =
        (VectorD(v.segment(head * kDim, kDim)) - fold.mean[head]) * fold.forward[head];
    // As for the whole layer: each weight is rounded once. Found: 2.4e-8.
    EXPECT_LT((w.segment(head * kDim, kDim) - expected).norm(), 8 * 0x1p-24 * expected.norm());
  }
}

TEST(FoldWeights, AWrongOrientationIsNoSmallChange) {
  ValueFold fold = random_fold(false);
  for (MatrixD& matrix : fold.forward) matrix.transposeInPlace();
  EXPECT_GT(relative_change(Dtype::kFp32, fold), 0.1);
}

TEST(FoldWeights, ANumberThatTheDtypeDoesNotHoldIsRefused) {
  ValueFold fold = random_fold(false);
  for (MatrixD& matrix : fold.forward) matrix *= 1e6;
  const Layer layer(Dtype::kFp16);
  EXPECT_THROW(fold_value_weight(layer.value.view, fold), Error);
}

}  // namespace
