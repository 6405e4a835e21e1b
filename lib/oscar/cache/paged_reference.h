// The plain CPU twins of the kernels, on the same structs and the same bytes.
#pragma once

#include "oscar/cache/page_layout.h"
#include "oscar/cache/scale_correction.h"

namespace oscar {

// Appends and demotes as AppendParams says (all pointers in host memory). Returns the or of all
// RowStatus bits. A refused row keeps the codes of its page.
RowStatus append_ref(const AppendParams& params);

// Decode attention in fp32 (what CPU evaluation runs) and in double (the oracle of tests).
// o: [batch][q_len][num_qo_heads][head_dim] of the arithmetic's type instead of params.o, which is
// ignored; lse as in params. A query that sees no key gives zeros and lse = -infinity.
void decode_attention_ref(const AttentionParams& params, float* o, float* lse);
void decode_attention_ref(const AttentionParams& params, double* o, double* lse);

// INT2 tokens back as rows (HistoryRowsParams): the codec's fp32 numbers, centres added in fp32,
// one rounding where they are bf16.
void dequantize_history_ref(const HistoryRowsParams& params);

// One dequantized row (side 0 = key, 1 = value) of a page, [head_dim]. A key with centres comes
// without its own: what is coded is the difference from it.
void dequantize_row(const PageFormat& format, const uint8_t* chunk, int side, int token,
                    float* out);

}  // namespace oscar
