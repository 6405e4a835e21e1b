// Owned, row-major stacks of small matrices and vectors, one per KV head, with Eigen views.
#pragma once

#include <Eigen/Dense>
#include <cassert>
#include <vector>

namespace oscar {

using MatrixD = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using VectorD = Eigen::Matrix<double, 1, Eigen::Dynamic>;  // row vectors, as in all formulas
using VectorF = Eigen::Matrix<float, 1, Eigen::Dynamic>;

// [count, rows, cols], row-major and contiguous. count = 0 means "absent".
template <typename T>
struct MatrixStack {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  int count = 0, rows = 0, cols = 0;
  std::vector<T> data;

  MatrixStack() = default;
  MatrixStack(int count_, int rows_, int cols_)
      : count(count_),
        rows(rows_),
        cols(cols_),
        data(static_cast<size_t>(count_) * rows_ * cols_, T(0)) {}

  bool empty() const { return data.empty(); }
  Eigen::Map<Matrix> operator[](int i) {
    assert(i >= 0 && i < count);
    return {data.data() + static_cast<size_t>(i) * rows * cols, rows, cols};
  }
  Eigen::Map<const Matrix> operator[](int i) const {
    assert(i >= 0 && i < count);
    return {data.data() + static_cast<size_t>(i) * rows * cols, rows, cols};
  }
  bool operator==(const MatrixStack&) const = default;
};

// [count, cols]: one row vector per KV head.
template <typename T>
struct VectorStack {
  using Vector = Eigen::Matrix<T, 1, Eigen::Dynamic>;
  int count = 0, cols = 0;
  std::vector<T> data;

  VectorStack() = default;
  VectorStack(int count_, int cols_)
      : count(count_), cols(cols_), data(static_cast<size_t>(count_) * cols_, T(0)) {}

  bool empty() const { return data.empty(); }
  Eigen::Map<Vector> operator[](int i) {
    assert(i >= 0 && i < count);
    return {data.data() + static_cast<size_t>(i) * cols, cols};
  }
  Eigen::Map<const Vector> operator[](int i) const {
    assert(i >= 0 && i < count);
    return {data.data() + static_cast<size_t>(i) * cols, cols};
  }
  bool operator==(const VectorStack&) const = default;
};

}  // namespace oscar
