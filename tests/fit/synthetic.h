// Statistics of synthetic heads, summed from rows that tests can also look at.
#pragma once

#include <random>
#include <vector>

#include "oscar/fit/fit.h"

namespace oscar::synthetic {

MatrixD normal_rows(int rows, int cols, std::mt19937_64& generator);

// Correlated rows with channel outliers (log-normal scales) around a mean.
MatrixD outlier_rows(int rows, int d, double mean, std::mt19937_64& generator);

// Rows of every head of a layer; q and out have group_size rows per token.
struct Rows {
  std::vector<MatrixD> q, k, v, out;  // [Hkv] of [rows, d]
};

Rows make_rows(int heads, int d, int tokens, int group_size, unsigned seed);
LayerStatistics collect(const Rows& rows, unsigned seed);
LayerStatistics statistics(int heads, int d, int tokens = 2000, unsigned seed = 7);

// The default RoPE of a head; rotary_dim < d is a partial one.
Rope rope(int rotary_dim, double theta = 1e6);
double largest(const MatrixD& m);
double from_identity(const MatrixD& m);

}  // namespace oscar::synthetic
