// Blocks of a tensor to float64 and back.
#include "oscar/fold/fold_weights.h"

#include <cmath>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

namespace oscar {
namespace {

template <typename T>
T load(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));  // headers need not align tensors
  return value;
}

double element(const TensorView& tensor, int64_t index) {
  switch (tensor.dtype) {
    case Dtype::kBf16:
      return bf16_to_float(load<uint16_t>(tensor.data + 2 * index));
    case Dtype::kFp16:
      return fp16_to_float(load<uint16_t>(tensor.data + 2 * index));
    case Dtype::kFp32:
      break;
  }
  return load<float>(tensor.data + 4 * index);
}

// [rows, cols] elements from `begin` on, in the order of the file.
MatrixD block(const TensorView& tensor, int64_t begin, int64_t rows, int64_t cols) {
  MatrixD result(rows, cols);
  for (int64_t i = 0; i < rows * cols; ++i) result.data()[i] = element(tensor, begin + i);
  return result;
}

// A tensor's new bytes, filled front to back.
class Writer {
 public:
  explicit Writer(const TensorView& like) : like_(like) { bytes_.reserve(like.bytes); }

  template <typename Values>
  void add(const Values& values) {
    const MatrixD plain = values;  // row-major
    for (int64_t i = 0; i < plain.size(); ++i) add_one(static_cast<float>(plain.data()[i]));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void add_one(float value) {
    switch (like_.dtype) {
      case Dtype::kBf16:
        return store(value, float_to_bf16(value), bf16_to_float(float_to_bf16(value)));
      case Dtype::kFp16:
        return store(value, float_to_fp16(value), fp16_to_float(float_to_fp16(value)));
      case Dtype::kFp32:
        return store(value, value, value);
    }
  }
  template <typename T>
  void store(float value, T stored, float back) {
    if (!std::isfinite(back)) {
      throw Error({.what = "a folded weight does not fit its dtype",
                   .where = like_.name,
                   .expected = std::string("numbers that ") + dtype_name(like_.dtype) + " holds",
                   .found = std::to_string(value)});
    }
    const size_t end = bytes_.size();
    bytes_.resize(end + sizeof(stored));
    std::memcpy(bytes_.data() + end, &stored, sizeof(stored));
  }

  const TensorView& like_;
  std::vector<std::byte> bytes_;
};

}  // namespace

std::vector<std::byte> fold_value_weight(const TensorView& weight, const ValueFold& fold) {
  Writer out(weight);
  const int64_t d = fold.head_dim(), hidden = weight.shape[1];
  for (int head = 0; head < fold.num_kv_heads(); ++head) {
    out.add(fold.forward[head].transpose() * block(weight, head * d * hidden, d, hidden));
  }
  return out.take();
}

std::vector<std::byte> fold_value_bias(const TensorView& bias, const ValueFold& fold) {
  Writer out(bias);
  const int64_t d = fold.head_dim();
  for (int head = 0; head < fold.num_kv_heads(); ++head) {
    MatrixD row = block(bias, head * d, 1, d);
    if (!fold.mean.empty()) row -= fold.mean[head];
    out.add(row * fold.forward[head]);
  }
  return out.take();
}

std::vector<std::byte> fold_output_weight(const TensorView& weight, const ValueFold& fold) {
  Writer out(weight);
  const int64_t d = fold.head_dim(), joined = fold.num_qo_heads / fold.num_kv_heads();
  for (int64_t row = 0; row < weight.shape[0]; ++row) {
    for (int64_t head = 0; head < fold.num_kv_heads(); ++head) {
      const int64_t begin = (row * fold.num_qo_heads + head * joined) * d;
      out.add(block(weight, begin, joined, d) * fold.inverse[head].transpose());
    }
  }
  return out.take();
}

std::vector<std::byte> fold_output_bias(const TensorView& bias, const TensorView& output_weight,
                                        const ValueFold& fold) {
  Writer out(bias);
  const int64_t d = fold.head_dim(), joined = fold.num_qo_heads / fold.num_kv_heads();
  const int64_t hidden = output_weight.shape[0];
  VectorD folded = block(bias, 0, 1, hidden);
  for (int64_t row = 0; row < hidden; ++row) {
    for (int64_t head = 0; head < static_cast<int64_t>(fold.mean.size()); ++head) {
      const int64_t begin = (row * fold.num_qo_heads + head * joined) * d;
      folded[row] += (block(output_weight, begin, joined, d) * fold.mean[head].transpose()).sum();
    }
  }
  out.add(folded);
  return out.take();
}

MatrixD attended_to_self(const ValueWeights& weights, const MatrixD& inputs, int num_qo_heads,
                         int num_kv_heads) {
  const int64_t hidden = weights.output.shape[0], d = weights.value.shape[0] / num_kv_heads;
  const int64_t joined = num_qo_heads / num_kv_heads;
  MatrixD values =
      inputs * block(weights.value, 0, num_kv_heads * d, weights.value.shape[1]).transpose();
  if (weights.value_bias.data != nullptr) {
    const VectorD bias = block(weights.value_bias, 0, 1, num_kv_heads * d);
    values.rowwise() += bias;
  }
  MatrixD given(inputs.rows(), num_qo_heads * d);  // to query heads
  for (int64_t j = 0; j < num_qo_heads; ++j) {
    given.middleCols(j * d, d) = values.middleCols(j / joined * d, d);
  }
  MatrixD result = given * block(weights.output, 0, hidden, num_qo_heads * d).transpose();
  if (weights.output_bias.data != nullptr) {
    const VectorD bias = block(weights.output_bias, 0, 1, hidden);
    result.rowwise() += bias;
  }
  return result;
}

}  // namespace oscar
