// The orthogonal matrix that makes every column of a shaped row cost the same (math 6.3).
#pragma once

#include "oscar/linalg/tensor.h"

namespace oscar {

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
