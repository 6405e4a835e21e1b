// Entry after entry of the tables, against the sizes of the arrays that they point into.
#include "table_checks.h"

#include <algorithm>
#include <string>

#include "checks.h"

namespace oscar::torch_ops {
namespace {

// Speaks about one request of one operator.
struct Request {
  const char* op = "";
  int b = 0;

  void require(bool holds, const char* array, const std::string& expected, int64_t found) const {
    if (holds) return;
    refuse(op, "a table does not fit the cache",
           std::string(array) + ", request " + std::to_string(b), expected, std::to_string(found));
  }
};

constexpr int kMostPosition = 1 << 30;

std::string up_to(int64_t lowest, int64_t highest) {
  return std::to_string(lowest) + " to " + std::to_string(highest);
}

void check_slot(const Request& request, const ExactWindows& windows, const TableLimits& limits) {
  if (!windows.slot) return;
  const int32_t slot = windows.slot[request.b];
  request.require(slot >= 0 && slot < limits.num_slots, "window_slot",
                  up_to(0, limits.num_slots - 1), slot);
}

void check_first_position(const Request& request, const KeyCenters& centers) {
  if (!centers.first_position) return;
  const int32_t position = centers.first_position[request.b];
  // With any number of tokens behind it an int, as positions are.
  request.require(position >= 0 && position <= kMostPosition, "first_position",
                  up_to(0, kMostPosition), position);
}

int64_t checked_history(const Request& request, const PagedHistory& history,
                        const TableLimits& limits) {
  const int64_t tokens = history.history_len[request.b];
  const int64_t capacity = limits.max_pages * kPageTokens;
  request.require(tokens >= 0 && tokens <= capacity, "history_len", up_to(0, capacity), tokens);
  return tokens;
}

// The pages of INT2 tokens [begin, end) of a request.
void check_pages(const Request& request, const PagedHistory& history, int64_t begin, int64_t end,
                 const TableLimits& limits) {
  for (int64_t i = begin / kPageTokens; i * kPageTokens < end; ++i) {
    const int32_t page = history.block_table[request.b * history.table_stride + i];
    request.require(page >= 0 && page < limits.num_pages, "block_table",
                    up_to(0, limits.num_pages - 1), page);
  }
}

}  // namespace

void check_attention_tables(const char* op, const AttentionParams& p, const TableLimits& limits) {
  for (int b = 0; b < p.batch; ++b) {
    const Request request{op, b};
    request.require(p.seq_lens[b] >= 0, "seq_lens", "0 or more", p.seq_lens[b]);
    if (p.seq_lens[b] == 0) continue;
    check_slot(request, p.windows, limits);
    check_first_position(request, p.centers);
    const int64_t history = checked_history(request, p.history, limits);
    check_pages(request, p.history, 0, history, limits);
    const int64_t first_recent = p.windows.sink_tokens + history;
    request.require(history == 0 || p.seq_lens[b] >= first_recent, "seq_lens",
                    "at least sink + INT2 tokens, " + std::to_string(first_recent), p.seq_lens[b]);
    request.require(p.seq_lens[b] <= first_recent + p.windows.ring_tokens, "seq_lens",
                    "at most sink + INT2 + ring tokens, " +
                        std::to_string(first_recent + p.windows.ring_tokens),
                    p.seq_lens[b]);
  }
}

void check_append_tables(const char* op, const AppendParams& p, const TableLimits& limits) {
  const int64_t sink = p.windows.sink_tokens, ring = p.windows.ring_tokens;
  for (int b = 0; b < p.batch; ++b) {
    const Request request{op, b};
    const int64_t begin = p.query_start_loc[b], end = p.query_start_loc[b + 1];
    request.require(begin >= 0 && begin <= limits.num_rows, "query_start_loc",
                    up_to(0, limits.num_rows), begin);
    request.require(end >= begin && end <= limits.num_rows, "query_start_loc",
                    "an end from " + up_to(begin, limits.num_rows), end);
    request.require(end - begin <= limits.max_new_rows, "max_new_rows",
                    "at least its new rows, " + std::to_string(end - begin), limits.max_new_rows);
    const int64_t old_len = p.old_len[b], new_len = old_len + end - begin;
    const int64_t before = p.old_history[b], after = p.new_history[b];
    if (begin == end && before == after) continue;
    check_slot(request, p.windows, limits);
    check_first_position(request, p.centers);
    request.require(old_len >= 0, "old_len", "0 or more", old_len);
    request.require(before >= 0 && (before == 0 || sink + before <= old_len), "old_history",
                    up_to(0, std::max<int64_t>(0, old_len - sink)), before);
    const int64_t most = std::max(before, std::min(new_len - sink, limits.max_pages * kPageTokens));
    request.require(after >= before && after <= most, "new_history",
                    up_to(before, most) + " (INT2 tokens that are there and have a page)", after);
    if (after > before) check_pages(request, p.history, before, after, limits);
    request.require(after - before <= limits.max_new_history, "max_new_history",
                    "at least its new INT2 tokens, " + std::to_string(after - before),
                    limits.max_new_history);
    request.require(old_len - sink - before <= ring, "old_history",
                    "at most ring_tokens " + std::to_string(ring) + " exact rows behind it",
                    old_len - sink - before);
    const int64_t read = read_history_of(p, b);
    request.require(read >= 0 && read <= after, "read_history", up_to(0, after) + " (new_history)",
                    read);
    request.require(new_len - sink - read <= ring, p.read_history ? "read_history" : "new_history",
                    "at most ring_tokens " + std::to_string(ring) + " exact rows behind it",
                    new_len - sink - read);
  }
}

void check_history_tables(const char* op, const HistoryRowsParams& p, const TableLimits& limits) {
  for (int b = 0; b < p.batch; ++b) {
    const Request request{op, b};
    check_first_position(request, p.centers);
    const int64_t end = std::min<int64_t>(checked_history(request, p.history, limits),
                                          int64_t{p.first_token} + p.tokens);
    check_pages(request, p.history, p.first_token, end, limits);
  }
}

void check_step_tables(const char* op, const StepParams& p, const TableLimits& limits) {
  for (int b = 0; b < p.requests; ++b) {
    const Request request{op, b};
    const int32_t begin = p.query_start_loc[b], end = p.query_start_loc[b + 1];
    request.require(begin >= 0 && end >= begin, "query_start_loc", "no less than the one before",
                    end);
    if (b >= p.held) continue;
    const int32_t slot = p.window_slot[b];
    request.require(slot >= 0 && slot < limits.num_slots, "window_slot",
                    up_to(0, limits.num_slots - 1), slot);
    request.require(p.drafts[b] >= 0 && p.drafts[b] <= end - begin, "drafts", up_to(0, end - begin),
                    p.drafts[b]);
  }
}

}  // namespace oscar::torch_ops
