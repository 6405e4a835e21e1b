// Rows into the basis of the cache and out of it: bf16 rows times the matrix of their KV head.
#pragma once

#include "oscar/cache/page_layout.h"

namespace oscar {

// The rows of one tensor: out = (x - subtracted) matrix + added, vectors being rows. Head h belongs
// to KV head h / (num_heads / num_kv_heads).
struct TransformRows {
  HeadRows x;                         // [rows][num_heads]
  uint16_t* out = nullptr;            // bf16 [rows][num_heads][head_dim], apart from every input
  const float* matrix = nullptr;      // [num_kv_heads][head_dim][head_dim]
  const float* subtracted = nullptr;  // [num_kv_heads][head_dim]; null: zeros
  const float* added = nullptr;       // [num_kv_heads][head_dim]; null: zeros
  int num_heads = 0;                  // a multiple of num_kv_heads
};

inline constexpr int kMaxTransforms = 3;  // q, k and v

struct TransformParams {
  TransformRows tensors[kMaxTransforms] = {};
  int num_tensors = 0;
  int rows = 0;  // of every tensor
  int num_kv_heads = 0, head_dim = 0;
};

// The CPU twin: differences, products and sums in fp32, one rounding to bf16 at the end.
void transform_ref(const TransformParams& params);

}  // namespace oscar
