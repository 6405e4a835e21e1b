// Checks of what block tables and lengths hold. Only where the host can read them: on the CPU.
#pragma once

#include "oscar/cache/pages.h"
#include "oscar/cache/steps.h"

namespace oscar::torch_ops {

// How long the arrays are that tables point into.
struct TableLimits {
  int64_t num_pages = 0;        // of the pool
  int64_t max_pages = 0;        // entries of a request in the block table
  int64_t num_slots = 0;        // of the windows
  int64_t num_rows = 0;         // new rows (append)
  int64_t max_new_rows = 0;     // what the caller said (append)
  int64_t max_new_history = 0;  // the same
};

// Throw Error naming the request whose entries point outside the cache, or that leave rows without
// a place. Entries that the call does not read are not looked at, nor is anything of a request with
// seq_len 0 or without new rows and new history.
void check_attention_tables(const char* op, const AttentionParams& params,
                            const TableLimits& limits);
void check_append_tables(const char* op, const AppendParams& params, const TableLimits& limits);
void check_history_tables(const char* op, const HistoryRowsParams& params,
                          const TableLimits& limits);
// limits: num_slots.
void check_step_tables(const char* op, const StepParams& params, const TableLimits& limits);

}  // namespace oscar::torch_ops
