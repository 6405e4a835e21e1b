// What one step of a server appends and which pages it fills, worked out where its lengths are
// known: on the device, while the host prepares the next step.
#pragma once

#include <cstdint>

#include "oscar/cache/pages.h"

namespace oscar {

// The numbers of each request of a step, in their order; AppendParams and AttentionParams say what
// they are.
enum StepNumber : int {
  kOldLen,
  kSeqLens,
  kOldHistory,
  kNewHistory,
  kOldWritten,
  kNewWritten,
  kWindowSlot,
  kStepNumbers
};

// One step. Rows of request b are query_start_loc[b] to query_start_loc[b + 1]; slot_mapping < 0
// marks rows that are written nowhere: those of dummy runs, and those that pad a graph. The first
// `held` requests have windows, each one of its own. History and pages go by the tokens that are
// certain, never by drafts: then a rejected draft has reached no page. A page is written once it is
// full, while all its rows are exact (math 4.7).
struct StepParams {
  const int32_t* query_start_loc = nullptr;  // [requests + 1]
  const int32_t* seq_lens = nullptr;         // [requests], this step's rows included
  const int64_t* slot_mapping = nullptr;     // [mapped] of each row
  const int32_t* window_slot = nullptr;      // [held]
  const int32_t* drafts = nullptr;           // [held] of a request's rows the last so many
  int32_t* starts = nullptr;   // out [requests + 1]: query_start_loc of rows that are written
  int32_t* numbers = nullptr;  // out [kStepNumbers][stride], of each request
  int32_t* history = nullptr;  // in and out [windows]: INT2 tokens of each window's request,
  int32_t* written = nullptr;  //   and its tokens that have a page
  int64_t stride = 0, mapped = 0;
  int requests = 0, held = 0;
  int sink_tokens = 0, recent_tokens = 0, demote_block = 1;
};

// Rows of a request that are written.
OSCAR_HOST_DEVICE inline int written_rows(const StepParams& p, int b) {
  const int first = p.query_start_loc[b], rows = p.query_start_loc[b + 1] - first;
  return rows > 0 && first < p.mapped && p.slot_mapping[first] >= 0 ? rows : 0;
}

OSCAR_HOST_DEVICE inline int at_least(int value, int lowest) {
  return value < lowest ? lowest : value;
}

// The numbers of request b, and what its window's request holds afterwards. Requests are
// independent.
OSCAR_HOST_DEVICE inline void fill_step_numbers(const StepParams& p, int b) {
  int start = 0;
  for (int i = 0; i < b; ++i) start += written_rows(p, i);
  const int rows = written_rows(p, b), length = rows > 0 ? p.seq_lens[b] : 0;
  const bool held = b < p.held;
  const int window = held ? p.window_slot[b] : 0;
  const int old_history = held ? p.history[window] : 0, old_written = held ? p.written[window] : 0;
  const int certain = length - (held ? p.drafts[b] : 0);
  const int full = at_least(certain - p.sink_tokens, 0) / kPageTokens * kPageTokens;
  const int new_history = at_least(
      history_for_length(certain, p.sink_tokens, p.recent_tokens, p.demote_block), old_history);
  const int new_written = at_least(at_least(full, new_history), old_written);
  if (b == 0) p.starts[0] = 0;
  p.starts[b + 1] = start + rows;
  const int numbers[kStepNumbers] = {length - rows, length,      old_history, new_history,
                                     old_written,   new_written, window};
  for (int i = 0; i < kStepNumbers; ++i) p.numbers[i * p.stride + b] = numbers[i];
  if (held) {
    p.history[window] = new_history;
    p.written[window] = new_written;
  }
}

}  // namespace oscar
