// Sums of products on the CPU's vector units, in one fixed order.
#pragma once

namespace oscar {

// sums[j] += x[0] rows[0][j] + ... + x[count - 1] rows[count - 1][j] for j in [0, columns). Each
// product and each sum is rounded once, in ascending order of the rows: the bits do not depend on
// the machine. Row i begins at rows + i * stride; `sums` overlaps neither x nor the rows.
void add_products(const float* x, int count, const float* rows, int stride, int columns,
                  float* sums);
void add_products(const double* x, int count, const double* rows, int stride, int columns,
                  double* sums);

}  // namespace oscar
