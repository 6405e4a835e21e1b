// The one owner of LAPACK: OpenBLAS's dsyevd, loaded into a scope of its own.
//
// libtorch carries MKL and exports dsyevd_, dgemm_ and the rest under the same names, so whichever
// library the loader meets first would serve both, for the solver and for every routine it calls.
// RTLD_LOCAL keeps OpenBLAS's names out of torch's way and RTLD_DEEPBIND keeps torch's out of its.
#include "oscar/linalg/eigh.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {
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
  // First the very library that was found when building, then, on another machine, its name.
  void* library = dlopen(OSCAR_OPENBLAS_LIBRARY, flags);
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

}  // namespace oscar
