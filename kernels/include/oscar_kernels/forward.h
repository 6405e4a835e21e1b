// What a layer does between its matrix products, each in one pass over memory. Rows are bf16,
// computed in fp32 and rounded where the separate operations would round.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oscar {

// All pointers in device memory, 16-byte aligned. No allocation, no waiting; without rows nothing
// is launched.

// sum = x + added, rounded; out = RMSNorm(sum) weight = sum / sqrt(mean(sum^2) + eps) weight (arXiv
// 1910.07467). `added` and `sum` may be null together: out is then of x.
struct NormParams {
  int64_t rows = 0;
  int width = 0;  // a multiple of 8, at most 16384
  float eps = 0;
  const uint16_t* x = nullptr;       // [rows, width]
  const uint16_t* added = nullptr;   // [rows, width]
  uint16_t* sum = nullptr;           // [rows, width]; may be x or added
  const uint16_t* weight = nullptr;  // [width]
  uint16_t* out = nullptr;           // [rows, width]
};
// Returns cudaErrorNotSupported for other widths.
cudaError_t add_and_norm(const NormParams& params, cudaStream_t stream);

// Queries and keys out of the joined product of a layer: each head's row through RMSNorm where
// there is a weight, then through RoPE (arXiv 2104.09864): dimensions i and i + rotary_dim / 2 turn
// by the angle of column i, those from rotary_dim on stay.
struct RotateParams {
  int64_t rows = 0;    // tokens of all sequences, one sequence behind another
  int64_t tokens = 0;  // of a sequence: row r is at place r % tokens
  int num_qo_heads = 0, num_kv_heads = 0;
  int head_dim = 0;    // 64, 128 or 256
  int rotary_dim = 0;  // a multiple of head_dim / 16, at most head_dim
  float eps = 0;
  const uint16_t* qkv = nullptr;  // [rows, num_qo_heads + 2 num_kv_heads, head_dim]
  const uint16_t *q_norm = nullptr, *k_norm = nullptr;  // [head_dim], both or neither
  const float *cos = nullptr, *sin = nullptr;           // [tokens, rotary_dim / 2]
  uint16_t *q = nullptr, *k = nullptr;  // [rows, num_qo_heads or num_kv_heads, head_dim]
};
// Returns cudaErrorNotSupported for other dimensions.
cudaError_t norm_and_rotate(const RotateParams& params, cudaStream_t stream);

// out = silu(gate) up, silu(x) = x / (1 + exp(-x)), rounded before the product too.
struct GateParams {
  int64_t rows = 0;
  int width = 0;                      // a multiple of 8
  const uint16_t* gate_up = nullptr;  // [rows, 2 width]: gate, then up
  uint16_t* out = nullptr;            // [rows, width]
};
// Returns cudaErrorNotSupported for other widths.
cudaError_t gate(const GateParams& params, cudaStream_t stream);

}  // namespace oscar
