// Sums of products on the CPU's vector units, in one fixed order.
#include "oscar/cache/products.h"

#include <cstdint>

namespace oscar {
namespace {

// kWidth columns, whose sums stay in registers.
template <int kWidth, typename Real>
[[gnu::always_inline]] inline void add_strip(const Real* x, int count, const Real* rows, int stride,
                                             Real* sums) {
  Real held[kWidth];
  for (int j = 0; j < kWidth; ++j) held[j] = sums[j];
  for (int i = 0; i < count; ++i) {
    const Real* row = rows + int64_t{i} * stride;
    for (int j = 0; j < kWidth; ++j) held[j] += x[i] * row[j];
  }
  for (int j = 0; j < kWidth; ++j) sums[j] = held[j];
}

template <typename Real>
[[gnu::always_inline]] inline void add_strips(const Real* x, int count, const Real* rows,
                                              int stride, int columns, Real* sums) {
  if (count == 0) return;
  int j = 0;
  for (; j + 32 <= columns; j += 32) add_strip<32>(x, count, rows + j, stride, sums + j);
  for (; j + 8 <= columns; j += 8) add_strip<8>(x, count, rows + j, stride, sums + j);
  for (; j < columns; ++j) add_strip<1>(x, count, rows + j, stride, sums + j);
}

using AddProducts = void(const float*, int, const float*, int, int, float*);

#if defined(__x86_64__)
// AVX2 without FMA: wider vectors, the same roundings.
[[gnu::target("avx2")]] void add_products_avx2(const float* x, int count, const float* rows,
                                               int stride, int columns, float* sums) {
  add_strips(x, count, rows, stride, columns, sums);
}
#endif

void add_products_any(const float* x, int count, const float* rows, int stride, int columns,
                      float* sums) {
  add_strips(x, count, rows, stride, columns, sums);
}

AddProducts* pick_add_products() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return add_products_avx2;
#endif
  return add_products_any;
}

}  // namespace

void add_products(const float* x, int count, const float* rows, int stride, int columns,
                  float* sums) {
  static AddProducts* const add = pick_add_products();
  add(x, count, rows, stride, columns, sums);
}

void add_products(const double* x, int count, const double* rows, int stride, int columns,
                  double* sums) {
  add_strips(x, count, rows, stride, columns, sums);
}

}  // namespace oscar
