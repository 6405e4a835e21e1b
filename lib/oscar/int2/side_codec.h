// Keys or values of one layer into the cache's basis and through the INT2 codec, as torch tensors.
#pragma once

#include "oscar/bundle/bundle.h"
#include "oscar/cache/quantize_rows.h"
#include "oscar/fit/fit.h"
#include "oscar/model/torch.h"

namespace oscar {

// One side (keys or values) of one layer on a device. All tensors float32.
struct SideCodec {
  torch::Tensor forward;   // [Hkv, d, d]
  torch::Tensor partner;   // [Hkv, d, d] q_rotation for keys, o_rotation for values
  torch::Tensor mean;      // [Hkv, d]; undefined when not centred
  torch::Tensor feedback;  // [Hkv, d, d] U; undefined when no head shapes its rounding
  torch::Tensor metric;    // [Hkv, d, d] M; undefined when no head corrects by the metric
  // [segments, Hkv, 2, d] bf16 numbers, KeyCentres::rows; undefined when no head has centres.
  torch::Tensor centres;
  SideRecipe recipe;  // [Hkv]
  RowFormat format;
};

// Where the rows of one sequence lie: row i is token first_token + i of it, and its first token has
// position first_position.
struct RowPlaces {
  int64_t first_token = 0, first_position = 0, sink = 0;
};

// Rows [begin, end) of one segment (key_centres.h).
struct SegmentRun {
  int64_t begin = 0, end = 0, segment = 0;
};

// Of `rows` rows, the runs that share a segment of the side's centres, in order; none without
// centres. Rows of the sink, which never become INT2, count to the segment behind them.
std::vector<SegmentRun> segment_runs(const SideCodec& side, const RowPlaces& places, int64_t rows);

// A stack as a float32 tensor [count, rows, cols] of its own.
torch::Tensor to_tensor(const MatrixStack<float>& stack, torch::Device device);
torch::Tensor to_tensor(const MatrixStack<double>& stack, torch::Device device);

// Throws Error when a matrix that the settings need is missing or the quantization group does not
// divide d. `rope` is needed by keys with centres, for which there are segments up to
// rope.max_positions.
SideCodec make_side_codec(const SideTransform& transform, Side side,
                          const QuantizerSettings& quantizer, int layer, const Rope& rope,
                          torch::Device device);

// How rows of one head are written, for the cache library; points into `side`, which is on the
// host.
RowQuantizer row_quantizer(const SideCodec& side, int64_t head);

// (x - mean) forward: x [batch, Hkv, tokens, d] of any dtype -> float32 of the same shape.
torch::Tensor to_cache_basis(const SideCodec& side, const torch::Tensor& x);

// The rows as INT2 gives them back: rounded to bf16, quantized, dequantized; float32 of the same
// shape, the centres of keys included. rows [batch, Hkv, tokens, d] float32 in the cache's basis;
// `runs` cover all tokens, and are needed with centres only. By the cache library on the CPU
// (also for rows on a GPU in programs without kernels), by a kernel with the same bits on CUDA.
// `where` names the layer in errors: non-finite rows, or a range that the metadata dtype cannot
// hold.
torch::Tensor quantize_dequantize(const SideCodec& side, const torch::Tensor& rows,
                                  const std::string& where,
                                  const std::vector<SegmentRun>& runs = {});

// Throws the Error for rows that the codec refuses.
[[noreturn]] void refuse_rows(const std::string& where, RowStatus status);

}  // namespace oscar
