// Rows to codes, scale and zero: the CPU reference of quantize-append.
#pragma once

#include "oscar/cache/codec.h"

namespace oscar {

// Whole matrices of rows through the INT2 codec on the CPU: the plain version and a fast one.

// How the rows of one head of one side are written.
struct RowQuantizer {
  int head_dim = 0;  // multiple of 8, at most kMaxHeadDim
  RowFormat format = {};
  RowRecipe recipe = {};
  PackOrder order = PackOrder::kConsecutive;
  const float* feedback = nullptr;  // U [head_dim, head_dim], needed by Rounding::kShaped
  const float* metric = nullptr;    // M [head_dim, head_dim], needed by ScaleCorrection::kMetric
};

// Where results go; a null pointer leaves that result out. Row r of `packed` starts at
// r * head_dim / 4, its (scale, zero) pairs at element r * 2 * groups of `metadata`.
struct QuantizedRows {
  uint8_t* packed = nullptr;     // [rows, head_dim / 4]
  void* metadata = nullptr;      // [rows, head_dim / quant_group_size, 2] of the metadata dtype
  float* dequantized = nullptr;  // [rows, head_dim]
};

struct RowsStatus {
  RowStatus status = RowStatus::kOk;
  int64_t row = -1;  // first offending row; what was written from that row on is unspecified
};

// False when sizes do not fit together, a matrix that the recipe needs is missing, or rules other
// than this toolkit's come with shaped rounding or a scale correction.
bool valid_quantizer(const RowQuantizer& quantizer);

// x [rows, head_dim]: transformed, centered rows, already rounded to bf16 (the codec itself accepts
// any finite fp32). The plain version: one row after another, as the definition reads.
// Precondition: valid_quantizer(quantizer).
RowsStatus quantize_rows_ref(const RowQuantizer& quantizer, const float* x, int64_t rows,
                             const QuantizedRows& out);

// The same bytes, sixteen rows in lockstep on `threads` threads (0: all of the machine's).
RowsStatus quantize_rows(const RowQuantizer& quantizer, const float* x, int64_t rows,
                         const QuantizedRows& out, int threads = 1);

}  // namespace oscar
