// Writing the paged cache on the GPU: quantize and append, demotion.
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/pages.h"

namespace oscar {

// Whether the sizes of a call fit together.
bool valid_append(const AppendParams& params);

// Appends and demotes as AppendParams says; all pointers in device memory, rows and pool 16-byte
// aligned. max_new_rows and max_new_history bound what any request appends and demotes in this
// call; they size the grids, so a captured graph serves any smaller numbers. Rows leave the ring in
// one launch, new exact rows enter it in the next. Plain rounding writes the bytes of append_ref;
// with feedback matrices the codes of a row may differ from it in 1e-4 of the cases; with metrics
// its scales may, by a unit in the last place (1e-5 in fp32), in 1e-3 of them (math 5.4). Refused
// rows are AppendParams' matter. A feedback matrix with entries beyond +-4000 (factors of damped
// metrics stay below 161), or a metric with entries more than seven times its largest on the
// diagonal (no metric has them), sets the not-finite bit too: rows are then not usable. Returns
// cudaErrorInvalidValue where !valid_append(params).
cudaError_t append_rows(const AppendParams& params, int max_new_rows, int max_new_history,
                        cudaStream_t stream);

}  // namespace oscar
