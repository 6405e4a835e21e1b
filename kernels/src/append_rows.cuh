// Where rows that enter the INT2 history come from and go to, shared by the append kernels.
#pragma once

#include "row_codec.cuh"

namespace oscar {

struct HistoryRow {
  const uint16_t* x = nullptr;  // bf16 source
  uint8_t* chunk = nullptr;
  int in_page = 0;
};

// Row of history token `token` of request b.
__device__ inline HistoryRow history_row(const AppendParams& p, int b, int token, int head,
                                         int side) {
  const int position = p.windows.sink_tokens + token, old_len = p.old_len[b];
  HistoryRow row;
  if (position >= old_len) {
    const int64_t at = p.rows_indptr[b] + position - old_len;
    row.x = (side ? p.v : p.k) + (at * p.num_kv_heads + head) * p.format.head_dim;
  } else {
    const int64_t slot = p.windows.slot ? p.windows.slot[b] : b;
    row.x = (side ? p.windows.v : p.windows.k) +
            window_offset(p.windows, slot, head, p.num_kv_heads, window_row(p.windows, position),
                          p.format.head_dim);
  }
  const int64_t page = p.history.kv_indices[p.history.kv_indptr[b] + token / kPageTokens];
  row.chunk = p.history.pool + (page * p.num_kv_heads + head) * chunk_bytes(p.format);
  row.in_page = token % kPageTokens;
  return row;
}

__device__ inline void store_scale_zero(const PageFormat& f, const HistoryRow& row, int side,
                                        int group, ScaleZero sz) {
  uint8_t* at = row.chunk + metadata_offset(f, side, row.in_page);
  if (f.metadata == MetadataDtype::kFp32) {
    reinterpret_cast<float2*>(at)[group] = make_float2(sz.scale, sz.zero);
  } else if (f.metadata == MetadataDtype::kFp16) {
    reinterpret_cast<uint32_t*>(at)[group] =
        float_to_fp16(sz.scale) | static_cast<uint32_t>(float_to_fp16(sz.zero)) << 16;
  } else {
    reinterpret_cast<uint32_t*>(at)[group] =
        float_to_bf16(sz.scale) | static_cast<uint32_t>(float_to_bf16(sz.zero)) << 16;
  }
}

}  // namespace oscar
