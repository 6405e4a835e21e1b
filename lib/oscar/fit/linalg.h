// Eigenvectors, Hadamard and mixing matrices, sums in a fixed order.
#pragma once

#include <Eigen/Dense>
#include <cassert>
#include <string>
#include <vector>

namespace oscar {

// Owned, row-major stacks of small matrices and vectors, one per KV head, with Eigen views.

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

// Eigen-decomposition of small symmetric matrices, reproducible to the byte on one machine
// (math 3.1).

struct Eigh {
  VectorD values;   // [d] ascending
  MatrixD vectors;  // [d, d] eigenvectors as columns, in the order of `values`
};

// A = U diag(values) U^T by LAPACK's dsyevd, on (A + A^T) / 2 formed in float64, one thread a call;
// calls from several threads run side by side.
// Order: ascending; columns of bit-equal eigenvalues by the row of their largest-magnitude entry.
// Sign: the largest-magnitude entry of each column is positive; of entries whose magnitudes are
// bit-equal the lowest row counts (no tolerance is involved).
// `where` names the matrix in errors. Throws Error when A is not finite or dsyevd fails.
Eigh eigh(const MatrixD& a, const std::string& where);

// The eigenvalues alone [d], ascending, in a fraction of the time; within rounding those of `eigh`.
VectorD eigenvalues(const MatrixD& a, const std::string& where);

// Applies the order and sign rules of `eigh` in place.
void canonicalise(Eigh& e);

// Path of the shared library whose dsyevd `eigh` calls. Throws Error when it cannot be loaded.
std::string lapack_provider();

// Roots and condition numbers of symmetric matrices.

// Eigenvalues below `relative_floor` times the largest one, raised to that value (all of them to
// `relative_floor` when the largest is not positive).
VectorD raised_eigenvalues(const VectorD& values, double relative_floor);

// vectors diag(values^exponent) vectors^T; values must be positive when the exponent is negative.
MatrixD symmetric_power(const MatrixD& vectors, const VectorD& values, double exponent);

// Eigenvalues above d * epsilon * the largest one, the accuracy of a float64 decomposition.
int numerical_rank(const VectorD& ascending_values);

// Largest over smallest singular value; infinity for a singular matrix. Accurate up to about 1e7
// (it comes from the eigenvalues of T^T T).
double condition_number(const MatrixD& t, const std::string& where);

// Product, inverse and triangular factor in one order of operations, so that any machine gets the
// same bits.
//
// Each step is one multiplication, division or subtraction of doubles, rounded by itself (IEEE 754,
// nearest even; the build turns off contraction into fused operations). Elements of one step don't
// depend on each other: vector units change nothing. What files of version 0.1 leave out is derived
// with these.

// A B: entry (i, j) begins as 0, and A(i, k) * B(k, j) is added for k from 0 on.
MatrixD fixed_order_product(const MatrixD& a, const MatrixD& b);

// The sum of the diagonal from its first entry to its last, over d.
double fixed_order_mean_diagonal(const MatrixD& a);

// A^-1 [d, d] by Gauss-Jordan elimination. For k from 0 to d - 1: of rows k to d - 1 the first with
// the largest |A(i, k)| changes places with row k; p = A(k, k), A(k, k) = 1, row k is divided by p;
// for every other row i: f = A(i, k), A(i, k) = 0, row i becomes row i - f * row k. At the end, for
// k from d - 1 to 0, column k changes places with the column of the row that step k took. Throws
// Error naming `where` when a pivot is 0 or not finite.
MatrixD fixed_order_inverse(MatrixD a, const std::string& where);

// Unit upper triangular U of M = U D U^T, D diagonal and positive, from M's upper triangle. For j
// from d - 1 to 0: D_j = M(j, j), and for i < j U(i, j) = M(i, j) / D_j; then for i <= k < j
// M(i, k) becomes M(i, k) - U(i, j) * M(k, j). Throws Error naming `where` when a D_j is not
// positive or not finite.
MatrixD udu_factor(MatrixD m, const std::string& where);

// Orthogonal Hadamard matrices, also for sizes that are no power of two (math 3.2).

// Largest power of two that divides d.
int hadamard_block_size(int d);

// [d, d] orthogonal. d a power of two: Sylvester's matrix / sqrt(d), entry (i, j) =
// (-1)^popcount(i & j) / sqrt(d). Otherwise blocks of b = hadamard_block_size(d): row i belongs to
// block i mod (d / b), as that block's row i / (d / b); block n fills columns [n b, (n + 1) b) with
// Sylvester / sqrt(b). Neighbouring rows (eigenvectors of like eigenvalue) so go to different
// blocks.
MatrixD hadamard(int d);

// The column shuffle P of OSCAR's rotation: which transformed channels stand next to each other
// (math 3.3).

inline bool is_power_of_two(int d) { return d > 0 && (d & (d - 1)) == 0; }

// `value` read backwards as a number of log2(d) bits; d is a power of two.
inline int reverse_bits(int value, int d) {
  assert(is_power_of_two(d) && value >= 0 && value < d);
  int reversed = 0;
  for (int bit = 1; bit < d; bit <<= 1) {
    reversed = (reversed << 1) | (value & 1);
    value >>= 1;
  }
  return reversed;
}

// perm of P = I[:, perm], so that (X P)[:, c] = X[:, perm[c]]: perm[c] = d - 1 - reverse_bits(c).
// With eigenvectors in ascending order this puts the i-th largest eigenvalue's column at the
// bit-reversed place of i (arXiv 2605.17757). The identity when d is no power of two.
inline std::vector<int> bit_reversal_permutation(int d) {
  std::vector<int> perm(static_cast<size_t>(d));
  for (int c = 0; c < d; ++c) perm[c] = is_power_of_two(d) ? d - 1 - reverse_bits(c, d) : c;
  return perm;
}

// The orthogonal matrix that makes every column of a shaped row cost the same (math 6.3).

// [d, d] orthogonal Q such that Q^T diag(costs) Q = U D U^T, U unit upper triangular, has an even
// D: the geometric mean of `costs` in each entry when d is a power of two. An orthogonal matrix
// keeps the product of D, so no other has a smaller sum. costs [d] positive, in any order.
//
// A geometric mean decomposition (Jiang, Hager and Li, Linear Algebra Appl. 396, 2005) by halving:
// the largest cost a is paired with the smallest b, the second largest with the second smallest,
// and each pair is turned until both its entries of D are sqrt(a b). The first columns of all pairs
// then are a problem of half the size, and so are the second columns; equal costs are turned by 45
// degrees, as in a Hadamard matrix, so every column mixes nearly all directions. Halving stops at
// an odd size, whose directions stay apart.
MatrixD even_cost_mixing(const VectorD& costs);

}  // namespace oscar
