// Quantize and append: plain rounding, and the exact windows.
#include "append_rows.cuh"
#include "append_shaped.h"
#include "oscar_kernels/append.h"

namespace oscar {
namespace {

constexpr int kWarps = 8, kRowsPerWarp = 8;

// Key centers may not take the registers of a block: as many are resident as without them.
template <int kHeadDim>
constexpr int kResidentBlocks = kHeadDim == 64    ? 6
                                : kHeadDim == 128 ? 4
                                                  : 2;

// Plain rounding: eight consecutive tokens of one head and side per warp.
// Grid: x over blocks of tokens, y = request, z = head * 2 + side.
template <int kHeadDim>
__global__ void __launch_bounds__(kWarps * 32, kResidentBlocks<kHeadDim>)
    quantize_kernel(const __grid_constant__ AppendParams p) {
  const int b = blockIdx.y, head = blockIdx.z / 2, side = blockIdx.z % 2;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int first = p.old_history[b], last = p.new_history[b];
  const int own = first + (blockIdx.x * kWarps + threadIdx.x / 32) * kRowsPerWarp + lane / 4;
  if (own - lane / 4 >= last) return;
  const int token = min(own, last - 1);  // idle lanes repeat the last row and store nothing
  const HistoryRow row = history_row(p, b, token, head, side);
  QuarterRow<kHeadDim> x;
  x.load(row.x, t);
  int center = -1;
  const WarpCenters<kHeadDim> centers(p, b, head, side, own - lane / 4);
  if (centers.any()) {
    center = centers.nearer(centers.scores(p), x, token);
    x.subtract(p.centers.rows + center, t);
  }
  ScaleZero sz;
  const int refused =
      row_scale_zero<kHeadDim>(x, p.format, head_recipe(writer_of(p, side), head), sz);
  if (refused) report_refused(p, refused);
  uint32_t codes[kHeadDim / 64];
  plain_codes<kHeadDim>(x, sz, codes);
  if (own < last && !refused) {
    store_codes<kHeadDim>(codes, row.page_data + code_offset(p.format, side, row.in_page), t);
  }
  const int lanes = 4 * p.format.rows.quant_group_size / kHeadDim;
  if (t == 0) sz.scale = scale_with_center(sz.scale, is_second(center, kHeadDim));
  if (refused) sz = refused_scale_zero();
  if (own < last && t % lanes == 0) store_scale_zero(p.format, row, side, t / lanes, sz);
}

// New rows that stay exact: those of the sink, and those after the history that is read. Grid: x
// over rows, y = request; one warp a (row, head, side).
__global__ void __launch_bounds__(256, 6)
    store_windows_kernel(const __grid_constant__ AppendParams p) {
  const int b = blockIdx.y, d = p.format.head_dim, sink = p.windows.sink_tokens;
  const int first = p.query_start_loc[b], count = p.query_start_loc[b + 1] - first;
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32, jobs = p.num_kv_heads * 2;
  const int old_len = p.old_len[b];
  const int in_sink = max(0, min(count, sink - old_len));
  const int recent = max(in_sink, min(count, sink + read_history_of(p, b) - old_len));  // first one
  const int64_t slot = slot_of(p.windows, b);
  uint32_t not_finite = 0;
  for (int job = blockIdx.x * warps + threadIdx.x / 32; job < (in_sink + count - recent) * jobs;
       job += gridDim.x * warps) {
    const int stays = job / jobs, head = job % jobs / 2, side = job % 2;
    const int row = stays < in_sink ? stays : stays - in_sink + recent;
    const int64_t to = window_offset(p.windows, slot, head, p.num_kv_heads,
                                     window_row(p.windows, old_len + row), d);
    const uint32_t* source =
        reinterpret_cast<const uint32_t*>(row_at(side ? p.v : p.k, first + row, head));
    uint32_t* target = reinterpret_cast<uint32_t*>((side ? p.windows.v : p.windows.k) + to);
    for (int i = lane; i < d / 2; i += 32) {
      const uint32_t pair = source[i];
      target[i] = pair;
      not_finite |= ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u;  // all exponent bits set
    }
  }
  if (not_finite) report_refused(p, static_cast<int>(RowStatus::kNonFinite));
}

// Whether every head rounds plainly and corrects nothing, as far as can be told from here.
bool always_plain(const SideWriter& writer) {
  return !writer.corrections && !writer.roundings && !writer.feedback && !writer.metric;
}

template <int kHeadDim>
cudaError_t quantize_history(const AppendParams& p, int max_new_history, cudaStream_t stream) {
  if (!always_plain(p.key) || !always_plain(p.value)) {
    return quantize_shaped<kHeadDim>(p, max_new_history, stream);
  }
  const int rows = kWarps * kRowsPerWarp;
  const dim3 grid((max_new_history + rows - 1) / rows, p.batch, 2 * p.num_kv_heads);
  quantize_kernel<kHeadDim><<<grid, kWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

bool valid_append(const AppendParams& p) {
  const int d = p.format.head_dim, group = p.format.rows.quant_group_size;
  return (d == 64 || d == 128 || d == 256) && group > 0 && d % group == 0 && 4 * group >= d &&
         p.batch > 0 && p.batch <= 65535 && p.num_kv_heads > 0 && p.num_kv_heads <= 32767 &&
         p.query_start_loc && p.old_len && p.old_history && p.new_history &&
         p.windows.ring_tokens > 0 && (!p.centers.rows || p.centers.segments > 0);
}

cudaError_t append_rows(const AppendParams& p, int max_new_rows, int max_new_history,
                        cudaStream_t stream) {
  if (!valid_append(p) || max_new_rows < 0 || max_new_history < 0) return cudaErrorInvalidValue;
  // Rows leave the ring before new ones may take their places.
  if (max_new_history > 0) {
    cudaError_t error = cudaErrorInvalidValue;
    if (p.format.head_dim == 64) error = quantize_history<64>(p, max_new_history, stream);
    if (p.format.head_dim == 128) error = quantize_history<128>(p, max_new_history, stream);
    if (p.format.head_dim == 256) error = quantize_history<256>(p, max_new_history, stream);
    if (error != cudaSuccess) return error;
  }
  if (max_new_rows > 0) {
    // No more rows stay than the windows hold.
    const int rows = min(max_new_rows, p.windows.sink_tokens + p.windows.ring_tokens);
    const dim3 grid(min((rows * p.num_kv_heads * 2 + 7) / 8, 4096), p.batch);
    store_windows_kernel<<<grid, 256, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace oscar
