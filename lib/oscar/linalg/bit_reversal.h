// The column shuffle P of OSCAR's rotation: which transformed channels stand next to each other
// (math 3.3).
#pragma once

#include <cassert>
#include <vector>

namespace oscar {

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

}  // namespace oscar
