// Orthogonal Hadamard matrices, also for sizes that are no power of two (math 3.2).
#pragma once

#include "oscar/linalg/tensor.h"

namespace oscar {

// Largest power of two that divides d.
int hadamard_block_size(int d);

// [d, d] orthogonal. d a power of two: Sylvester's matrix / sqrt(d), entry (i, j) =
// (-1)^popcount(i & j) / sqrt(d). Otherwise blocks of b = hadamard_block_size(d): row i belongs to
// block i mod (d / b), as that block's row i / (d / b); block n fills columns [n b, (n + 1) b) with
// Sylvester / sqrt(b). Neighbouring rows (eigenvectors of like eigenvalue) so go to different
// blocks.
MatrixD hadamard(int d);

}  // namespace oscar
