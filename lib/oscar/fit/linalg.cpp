// Eigenvectors, Hadamard and mixing matrices, sums in a fixed order.
#include "oscar/fit/linalg.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {

// Functions of symmetric matrices on top of `eigh`.

VectorD raised_eigenvalues(const VectorD& values, double relative_floor) {
  const double largest = values.size() == 0 ? 0.0 : values.maxCoeff();
  const double floor = largest > 0 ? relative_floor * largest : relative_floor;
  return values.cwiseMax(floor);
}

MatrixD symmetric_power(const MatrixD& vectors, const VectorD& values, double exponent) {
  const VectorD powered = values.array().pow(exponent).matrix();
  return vectors * powered.asDiagonal() * vectors.transpose();
}

int numerical_rank(const VectorD& ascending_values) {
  const auto d = ascending_values.size();
  if (d == 0) return 0;
  const double largest = ascending_values[d - 1];
  if (!(largest > 0)) return 0;
  const double smallest_counted =
      static_cast<double>(d) * std::numeric_limits<double>::epsilon() * largest;
  return static_cast<int>((ascending_values.array() > smallest_counted).count());
}

double condition_number(const MatrixD& t, const std::string& where) {
  const VectorD squared = eigenvalues(t.transpose() * t, where);
  const double smallest = squared[0], largest = squared[squared.size() - 1];
  if (!(smallest > 0)) return std::numeric_limits<double>::infinity();
  return std::sqrt(largest / smallest);
}

// Elimination in plain loops over rows, which are contiguous.

MatrixD fixed_order_product(const MatrixD& a, const MatrixD& b) {
  assert(a.cols() == b.rows());
  MatrixD c = MatrixD::Zero(a.rows(), b.cols());
  for (Eigen::Index i = 0; i < a.rows(); ++i) {
    double* const row = c.data() + i * b.cols();
    for (Eigen::Index k = 0; k < a.cols(); ++k) {
      const double factor = a(i, k);
      const double* const other = b.data() + k * b.cols();
      for (Eigen::Index j = 0; j < b.cols(); ++j) row[j] += factor * other[j];
    }
  }
  return c;
}

double fixed_order_mean_diagonal(const MatrixD& a) {
  double sum = 0;
  for (Eigen::Index i = 0; i < a.rows(); ++i) sum += a(i, i);
  return sum / static_cast<double>(a.rows());
}

MatrixD fixed_order_inverse(MatrixD a, const std::string& where) {
  assert(a.rows() == a.cols());
  const auto d = a.rows();
  std::vector<Eigen::Index> taken(static_cast<size_t>(d));
  for (Eigen::Index k = 0; k < d; ++k) {
    Eigen::Index best = k;
    for (Eigen::Index i = k + 1; i < d; ++i) {
      if (std::abs(a(i, k)) > std::abs(a(best, k))) best = i;
    }
    taken[static_cast<size_t>(k)] = best;
    double* const pivot_row = a.data() + k * d;
    if (best != k) std::swap_ranges(pivot_row, pivot_row + d, a.data() + best * d);
    const double pivot = pivot_row[k];
    if (pivot == 0 || !std::isfinite(pivot)) {
      throw Error(
          {.what = "a matrix has no inverse",
           .where = where,
           .found = "a pivot of " + std::to_string(pivot) + " in column " + std::to_string(k)});
    }
    pivot_row[k] = 1;
    for (Eigen::Index c = 0; c < d; ++c) pivot_row[c] /= pivot;
    for (Eigen::Index i = 0; i < d; ++i) {
      if (i == k) continue;
      double* const row = a.data() + i * d;
      const double factor = row[k];
      row[k] = 0;
      for (Eigen::Index c = 0; c < d; ++c) row[c] -= factor * pivot_row[c];
    }
  }
  for (Eigen::Index k = d; k-- > 0;) {
    const Eigen::Index other = taken[static_cast<size_t>(k)];
    if (other == k) continue;
    for (Eigen::Index i = 0; i < d; ++i) std::swap(a(i, k), a(i, other));
  }
  return a;
}

MatrixD udu_factor(MatrixD m, const std::string& where) {
  assert(m.rows() == m.cols());
  const auto d = m.rows();
  MatrixD u = MatrixD::Identity(d, d);
  std::vector<double> column(static_cast<size_t>(d));
  for (Eigen::Index j = d; j-- > 0;) {
    const double pivot = m(j, j);
    if (!(pivot > 0) || !std::isfinite(pivot)) {
      throw Error(
          {.what = "a metric has no triangular factor",
           .where = where,
           .expected = "a positive definite matrix",
           .found = "a pivot of " + std::to_string(pivot) + " in column " + std::to_string(j)});
    }
    for (Eigen::Index i = 0; i < j; ++i) {
      column[static_cast<size_t>(i)] = m(i, j);
      u(i, j) = m(i, j) / pivot;
    }
    for (Eigen::Index i = 0; i < j; ++i) {
      const double factor = u(i, j);
      double* const row = m.data() + i * d;
      for (Eigen::Index k = i; k < j; ++k) row[k] -= factor * column[static_cast<size_t>(k)];
    }
  }
  return u;
}

// The one owner of LAPACK: OpenBLAS's dsyevd, loaded into a scope of its own.
//
// libtorch carries MKL and exports dsyevd_, dgemm_ and the rest under the same names, so whichever
// library the loader meets first would serve both, for the solver and for every routine it calls.
// RTLD_LOCAL keeps OpenBLAS's names out of torch's way and RTLD_DEEPBIND keeps torch's out of its.

namespace {

// Fortran interface of LAPACK 3: everything by address, string lengths at the end.
using Dsyevd = void (*)(const char* jobz, const char* uplo, const int* n, double* a, const int* lda,
                        double* w, double* work, const int* lwork, int* iwork, const int* liwork,
                        int* info, size_t jobz_length, size_t uplo_length);

struct OpenBlas {
  Dsyevd dsyevd = nullptr;
  void (*set_num_threads)(int) = nullptr;
  int (*get_num_threads)() = nullptr;
  std::string path;
};

template <typename Function>
void find_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw Error({.what = "OpenBLAS lacks a function that the fit needs",
                 .where = OSCAR_OPENBLAS_LIBRARY,
                 .expected = name,
                 .hint = "install an OpenBLAS built with LAPACK (Debian: libopenblas0-pthread)"});
  }
}

// g++ says so by a macro, clang by a feature.
#if defined(__has_feature)
#define OSCAR_HAS_FEATURE(name) __has_feature(name)
#else
#define OSCAR_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || OSCAR_HAS_FEATURE(address_sanitizer) || \
    OSCAR_HAS_FEATURE(thread_sanitizer)
constexpr bool kSanitizer = true;
#else
constexpr bool kSanitizer = false;
#endif

OpenBlas load_openblas() {
  int flags = RTLD_NOW | RTLD_LOCAL;
  // Sanitizers end a process that asks for it; sanitized builds have no torch either.
  if constexpr (!kSanitizer) flags |= RTLD_DEEPBIND;
  // First the one that the Python wheel has beside its programs, then the very library that was
  // found when building, then, on another machine, its name.
  void* library = nullptr;
  std::error_code status;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", status);
  if (!status) {
    const auto beside = program.parent_path().parent_path() / "libs/libopenblas.so.0";
    library = dlopen(beside.c_str(), flags);
  }
  if (library == nullptr) library = dlopen(OSCAR_OPENBLAS_LIBRARY, flags);
  if (library == nullptr) library = dlopen("libopenblas.so.0", flags);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Error({.what = "OpenBLAS could not be loaded",
                 .where = OSCAR_OPENBLAS_LIBRARY,
                 .found = reason != nullptr ? reason : "no reason given",
                 .hint = "run scripts/setup.sh, or install libopenblas0-pthread"});
  }
  OpenBlas blas;
  const char* (*config)() = nullptr;
  find_symbol(library, "dsyevd_", blas.dsyevd);
  find_symbol(library, "openblas_set_num_threads", blas.set_num_threads);
  find_symbol(library, "openblas_get_num_threads", blas.get_num_threads);
  find_symbol(library, "openblas_get_config", config);
  if (std::strstr(config(), "USE64BITINT") != nullptr) {
    throw Error({.what = "OpenBLAS was built with 64-bit integers",
                 .where = OSCAR_OPENBLAS_LIBRARY,
                 .expected = "32-bit integers (LP64)",
                 .found = config()});
  }
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(blas.dsyevd), &info) != 0 && info.dli_fname != nullptr) {
    blas.path = info.dli_fname;
  }
  return blas;
}

const OpenBlas& openblas() {
  static const OpenBlas blas = load_openblas();
  return blas;
}

// OpenBLAS maps a buffer for each call that runs beside others, keeps it for later ones, and tries
// for ever where that fails, as under `ulimit -v`. 128 MiB are the most that any of its builds
// takes.
constexpr size_t kBufferRoom = size_t{160} << 20;

bool has_buffer_room(int buffers) {
  const size_t room = static_cast<size_t>(buffers) * kBufferRoom;
  void* place = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return false;
  ::munmap(place, room);
  return true;
}

// One of the calls that run side by side, each in one thread. The thread count is a setting of the
// whole library: the first call sets it, the last one sets it back. A call for which there is no
// room waits for the others to end; throws Error when there are none.
class OneCall {
 public:
  explicit OneCall(const OpenBlas& blas) : blas_(blas) {
    Shared& all = shared();
    std::unique_lock<std::mutex> lock(all.mutex);
    while (all.calls == all.buffers && !has_buffer_room(all.mapping + 1)) {
      if (all.calls == 0) {
        throw Error({.what = "no room in memory for the buffer of OpenBLAS",
                     .where = blas.path,
                     .expected = std::to_string(kBufferRoom >> 20) + " MiB of address space",
                     .hint = "raise ulimit -v"});
      }
      all.ended.wait(lock);
    }
    maps_ = all.calls == all.buffers;
    if (maps_) ++all.mapping;
    all.buffers = std::max(all.buffers, ++all.calls);
    if (all.calls > 1) return;
    all.threads_before = blas_.get_num_threads();
    blas_.set_num_threads(1);
  }
  ~OneCall() {
    Shared& all = shared();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (maps_) --all.mapping;
    if (--all.calls == 0) blas_.set_num_threads(all.threads_before);
    all.ended.notify_one();
  }
  OneCall(const OneCall&) = delete;
  OneCall& operator=(const OneCall&) = delete;

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable ended;
    int calls = 0, buffers = 0, threads_before = 1;
    int mapping = 0;  // calls whose buffer is among `buffers` and perhaps not yet mapped
  };
  static Shared& shared() {
    static Shared instance;
    return instance;
  }
  const OpenBlas& blas_;
  bool maps_ = false;  // a buffer of its own
};

// Row of the largest-magnitude entry, the lowest one of equals.
int leading_row(const MatrixD& vectors, int column) {
  int best = 0;
  for (int row = 1; row < vectors.rows(); ++row) {
    if (std::abs(vectors(row, column)) > std::abs(vectors(best, column))) best = row;
  }
  return best;
}

}  // namespace

void canonicalise(Eigh& e) {
  const int d = static_cast<int>(e.values.size());
  std::vector<int> leading(d), order(d);
  for (int c = 0; c < d; ++c) leading[c] = leading_row(e.vectors, c);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (e.values[a] != e.values[b]) return e.values[a] < e.values[b];
    return leading[a] < leading[b];
  });
  const Eigh before = e;
  for (int c = 0; c < d; ++c) {
    const int from = order[c];
    const double sign = before.vectors(leading[from], from) < 0 ? -1.0 : 1.0;
    e.values[c] = before.values[from];
    e.vectors.col(c) = sign * before.vectors.col(from);
  }
}

namespace {

// Eigenvalues, and with job "V" eigenvectors in place of the matrix.
VectorD solve(const char* job, Eigen::MatrixXd& matrix, const std::string& where) {
  const int d = static_cast<int>(matrix.rows());
  VectorD values(d);
  const OpenBlas& blas = openblas();
  int info = 0;
  {
    const OneCall call(blas);
    const int query = -1;
    double work_size = 0;
    int iwork_size = 0;
    blas.dsyevd(job, "L", &d, matrix.data(), &d, values.data(), &work_size, &query, &iwork_size,
                &query, &info, 1, 1);
    if (info == 0) {
      const int lwork = static_cast<int>(work_size), liwork = iwork_size;
      std::vector<double> work(static_cast<size_t>(lwork));
      std::vector<int> iwork(static_cast<size_t>(liwork));
      blas.dsyevd(job, "L", &d, matrix.data(), &d, values.data(), work.data(), &lwork, iwork.data(),
                  &liwork, &info, 1, 1);
    }
  }
  if (info != 0 || !matrix.allFinite() || !values.allFinite()) {
    throw Error({.what = "the eigen-decomposition failed",
                 .where = where,
                 .expected = "dsyevd info 0 and finite eigenvectors",
                 .found = "info " + std::to_string(info)});
  }
  return values;
}

// Column-major, as LAPACK reads it.
Eigen::MatrixXd symmetric_part(const MatrixD& a, const std::string& where) {
  assert(a.rows() == a.cols());
  if (!a.allFinite()) {
    throw Error({.what = "an eigen-decomposition was asked of a matrix that is not finite",
                 .where = where,
                 .hint = "look for overflow in the statistics"});
  }
  return 0.5 * a + 0.5 * a.transpose();
}

}  // namespace

Eigh eigh(const MatrixD& a, const std::string& where) {
  Eigen::MatrixXd matrix = symmetric_part(a, where);
  if (matrix.rows() == 0) return {};
  Eigh result;
  result.values = solve("V", matrix, where);
  result.vectors = matrix;
  canonicalise(result);
  return result;
}

VectorD eigenvalues(const MatrixD& a, const std::string& where) {
  Eigen::MatrixXd matrix = symmetric_part(a, where);
  return matrix.rows() == 0 ? VectorD() : solve("N", matrix, where);
}

std::string lapack_provider() { return openblas().path; }

// Construction of the (block) Hadamard matrix from Sylvester's closed form.

int hadamard_block_size(int d) {
  assert(d > 0);
  return d & -d;
}

MatrixD hadamard(int d) {
  const int block = hadamard_block_size(d), num_blocks = d / block;
  const double magnitude = 1.0 / std::sqrt(static_cast<double>(block));
  MatrixD h = MatrixD::Zero(d, d);
  for (int i = 0; i < d; ++i) {
    const unsigned row = static_cast<unsigned>(i / num_blocks);
    const int first = (i % num_blocks) * block;
    for (int j = 0; j < block; ++j) {
      const bool negative = std::popcount(row & static_cast<unsigned>(j)) % 2 != 0;
      h(i, first + j) = negative ? -magnitude : magnitude;
    }
  }
  return h;
}

// Pairs of directions turned level by level.

MatrixD even_cost_mixing(const VectorD& costs) {
  const auto d = costs.size();
  if (d % 2 != 0) return MatrixD::Identity(d, d);
  assert(costs.minCoeff() > 0);
  std::vector<Eigen::Index> order(static_cast<size_t>(d));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](Eigen::Index i, Eigen::Index j) { return costs[i] > costs[j]; });
  // Pair i: its larger cost, its smaller one.
  const auto half = d / 2;
  const auto larger = [&](Eigen::Index i) { return order[static_cast<size_t>(i)]; };
  const auto smaller = [&](Eigen::Index i) { return order[static_cast<size_t>(d - 1 - i)]; };
  VectorD even(half);
  for (Eigen::Index i = 0; i < half; ++i) even[i] = std::sqrt(costs[larger(i)] * costs[smaller(i)]);
  const MatrixD inner = even_cost_mixing(even);
  MatrixD mixed(d, d);
  for (Eigen::Index i = 0; i < half; ++i) {
    const Eigen::Index a = larger(i), b = smaller(i);
    const double root_a = std::sqrt(costs[a]), root_b = std::sqrt(costs[b]);
    const double sine = std::sqrt(root_b / (root_a + root_b));
    const double cosine = std::sqrt(root_a / (root_a + root_b));
    // The later column costs a sine^2 + b cosine^2; of the earlier one a b over that is left.
    mixed.row(a).head(half) = cosine * inner.row(i);
    mixed.row(b).head(half) = sine * inner.row(i);
    mixed.row(a).tail(half) = -sine * inner.row(i);
    mixed.row(b).tail(half) = cosine * inner.row(i);
  }
  return mixed;
}

}  // namespace oscar
