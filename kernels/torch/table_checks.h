// Checks of what page tables and lengths hold. Only where the host can read them: on the CPU.
#pragma once

#include "oscar/cache/page_layout.h"

namespace oscar::torch_ops {

// How long the arrays are that tables point into.
struct TableLimits {
  int64_t num_pages = 0;        // of the pool
  int64_t num_kv_indices = 0;   // entries of kv_indices
  int64_t num_slots = 0;        // of the windows
  int64_t num_rows = 0;         // new rows (append)
  int64_t max_new_rows = 0;     // what the caller said (append)
  int64_t max_new_history = 0;  // the same
};

// Throw Error naming the request whose entries point outside the cache, or that leave rows without
// a place.
void check_attention_tables(const char* op, const AttentionParams& params,
                            const TableLimits& limits);
void check_append_tables(const char* op, const AppendParams& params, const TableLimits& limits);

}  // namespace oscar::torch_ops
