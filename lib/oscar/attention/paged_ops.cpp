// What a paged cache does with rows and pages: by CPU references or by kernels.
#include "oscar/attention/paged_ops.h"

#include <algorithm>
#include <vector>

#include "oscar/cache/pages.h"
#include "oscar/model/side_by_side.h"

namespace oscar {

// The CPU references behind the interface of a paged cache.

namespace {

// Requests [begin, end) of a table; those of one request are at index 0 then.
PagedHistory from_request(PagedHistory history, int64_t begin) {
  history.block_table += begin * history.table_stride;
  if (history.history_len) history.history_len += begin;
  return history;
}

ExactWindows from_request(ExactWindows windows, int64_t begin) {
  windows.slot += begin;
  return windows;
}

KeyCenters from_request(KeyCenters centers, int64_t begin) {
  if (centers.first_position) centers.first_position += begin;
  return centers;
}

class ReferenceOps final : public PagedOps {
 public:
  torch::Device device() const override { return torch::kCPU; }

  void append(const AppendParams& params, int, int) override {
    side_by_side(params.batch, 1, [&](int64_t begin, int64_t end) {
      AppendParams part = params;
      part.history = from_request(params.history, begin);
      part.windows = from_request(params.windows, begin);
      part.centers = from_request(params.centers, begin);
      part.query_start_loc += begin;
      part.old_len += begin;
      part.old_history += begin;
      part.new_history += begin;
      if (part.read_history) part.read_history += begin;
      part.batch = static_cast<int>(end - begin);
      append_ref(part);
    });
  }

  void attend(const AttentionParams& params) override {
    side_by_side(params.batch, 1, [&](int64_t begin, int64_t end) {
      const int64_t row = int64_t{params.q_len} * params.num_qo_heads * params.format.head_dim;
      AttentionParams part = params;
      part.history = from_request(params.history, begin);
      part.windows = from_request(params.windows, begin);
      part.centers = from_request(params.centers, begin);
      part.seq_lens += begin;
      part.q += begin * row;
      part.lse = nullptr;
      part.batch = static_cast<int>(end - begin);
      std::vector<float> out(static_cast<size_t>((end - begin) * row));
      decode_attention_ref(part, out.data(), nullptr);
      std::transform(out.begin(), out.end(), params.o + begin * row, float_to_bf16);
    });
  }
};

}  // namespace

std::unique_ptr<PagedOps> make_reference_ops() { return std::make_unique<ReferenceOps>(); }

}  // namespace oscar
