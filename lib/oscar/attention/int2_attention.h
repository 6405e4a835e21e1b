// Attention over rows that went through the codec, block by block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/cache/pages.h"
#include "oscar/cache/quantize_rows.h"
#include "oscar/fit/fit.h"
#include "oscar/model/torch.h"
#include "oscar/model/transformer.h"

namespace oscar {

// A side's recipe as the arrays that a writer of rows takes.

// The columns of a SideRecipe in the memory of `device`.
class DeviceRecipe {
 public:
  DeviceRecipe() = default;
  DeviceRecipe(const SideRecipe& recipe, torch::Device device)
      : clip_ratio_(torch::tensor(recipe.clip_ratio, torch::kFloat32).to(device)),
        correction_(codes(recipe.scale_correction, device)),
        rounding_(codes(recipe.rounding, device)) {}

  int64_t heads() const { return clip_ratio_.size(0); }
  // Points into this object and to the given matrices, [heads, d, d] each; null: no head needs it.
  SideWriter writer(const float* feedback, const float* metric) const {
    return {.clip_ratios = clip_ratio_.data_ptr<float>(),
            .corrections = correction_.data_ptr<uint8_t>(),
            .roundings = rounding_.data_ptr<uint8_t>(),
            .feedback = feedback,
            .metric = metric};
  }

 private:
  template <typename Choice>
  static torch::Tensor codes(const std::vector<Choice>& choices, torch::Device device) {
    auto all = torch::empty({static_cast<int64_t>(choices.size())}, torch::kUInt8);
    for (size_t i = 0; i < choices.size(); ++i) {
      all.data_ptr<uint8_t>()[i] = static_cast<uint8_t>(choices[i]);
    }
    return all.to(device);
  }
  torch::Tensor clip_ratio_, correction_, rounding_;
};

// Keys or values of one layer into the cache's basis and through the INT2 codec, as torch tensors.

// Another project's codec: rows [batch, Hkv, tokens, d] float32 that hold bf16 numbers, row i token
// i of its sequence, as they are read back.
using RowCodec = std::function<torch::Tensor(const torch::Tensor& rows)>;

// One side (keys or values) of one layer on a device. All tensors float32.
struct SideCodec {
  torch::Tensor forward;   // [Hkv, d, d]
  torch::Tensor partner;   // [Hkv, d, d] q_rotation for keys, o_rotation for values
  torch::Tensor mean;      // [Hkv, d]; undefined when not centered
  torch::Tensor feedback;  // [Hkv, d, d] U; undefined when no head shapes its rounding
  torch::Tensor metric;    // [Hkv, d, d] M; undefined when no head corrects by the metric
  // [segments, Hkv, 2, d] bf16 numbers, KeyCenters::rows; undefined when no head has centers.
  torch::Tensor centers;
  SideRecipe recipe;  // [Hkv]
  RowFormat format;
  int code_bits = 2;  // other widths are for measuring (attention/wide_codes.h)
  RowCodec other;     // in place of all that is above but `forward` and `partner`; mostly empty
};

// Where the rows of one sequence lie: row i is token first_token + i of it, and its first token has
// position first_position.
struct RowPlaces {
  int64_t first_token = 0, first_position = 0, sink = 0;
};

// Rows [begin, end) of one segment (codec.h).
struct SegmentRun {
  int64_t begin = 0, end = 0, segment = 0;
};

// Of `rows` rows, the runs that share a segment of the side's centers, in order; none without
// centers. Rows of the sink, which never become INT2, count to the segment behind them.
std::vector<SegmentRun> segment_runs(const SideCodec& side, const RowPlaces& places, int64_t rows);

// A stack as a float32 tensor [count, rows, cols] of its own.
torch::Tensor to_tensor(const MatrixStack<float>& stack, torch::Device device);
torch::Tensor to_tensor(const MatrixStack<double>& stack, torch::Device device);

// Throws Error when a matrix that the settings need is missing or the quantization group does not
// divide d. `rope` is needed by keys with centers, for which there are segments up to
// rope.max_positions.
SideCodec make_side_codec(const SideTransform& transform, Side side, const CacheFormat& quantizer,
                          int layer, const Rope& rope, torch::Device device);

// How rows of one head are written, for the cache library; points into `side`, which is on the
// host.
RowQuantizer row_quantizer(const SideCodec& side, int64_t head);

// (x - mean) forward: x [batch, Hkv, tokens, d] of any dtype -> float32 of the same shape.
torch::Tensor to_cache_basis(const SideCodec& side, const torch::Tensor& x);

// The rows as INT2 gives them back: rounded to bf16, quantized, dequantized; float32 of the same
// shape, the centers of keys included. rows [batch, Hkv, tokens, d] float32 in the cache's basis;
// `runs` cover all tokens, and are needed with centers only. By the cache library on the CPU
// (also for rows on a GPU in programs without kernels), by a kernel with the same bits on CUDA.
// `where` names the layer in errors: non-finite rows, or a range that the metadata dtype cannot
// hold. Of other widths and other codecs: the same by operations of torch.
torch::Tensor quantize_dequantize(const SideCodec& side, const torch::Tensor& rows,
                                  const std::string& where,
                                  const std::vector<SegmentRun>& runs = {});

// Throws the Error for rows that the codec refuses.
[[noreturn]] void refuse_rows(const std::string& where, RowStatus status);

// Which keys a query reads as INT2 and which exactly (math 4.7): every mode, as pure functions.

enum class CacheModeKind : uint8_t { kDecode, kPrefill, kChunked };

// Windows and mode that decide what a query sees. Positions are indices within the sequence.
struct CacheView {
  int64_t sink = 64, recent = 256;
  int64_t demote_block = 1;    // B: tokens leave the recent window B at a time
  int64_t sliding_window = 0;  // keys visible to a query, itself included; 0 = all before it
  CacheModeKind mode = CacheModeKind::kDecode;
  int64_t prefill_chunk = 0;  // tokens of one prefill chunk (kChunked)
  int64_t prompt = 0;         // queries below this belong to the prompt; kDecode has none
};

// The decode view of the quantizer's windows.
CacheView cache_view(const CacheFormat& quantizer, int sliding_window = 0);

// First key position after the INT2 region of query `i`: key j <= i is INT2 iff sink <= j < h(i)
// (and j is visible). h(i) = sink + B floor((i + 1 - recent - sink) / B), at least sink.
// kPrefill: prompt queries read everything exactly. kChunked: a prompt query reads its own chunk
// exactly and the chunks before as the cache held them when the chunk began, h(chunk start - 1).
// Queries from `prompt` on follow the decode rule. Never decreases with i.
int64_t int2_end(const CacheView& view, int64_t i);

// First key that query `i` sees: 0, or i - sliding_window + 1.
int64_t first_visible(const CacheView& view, int64_t i);

// One block [first, last) of queries.
struct QueryBlock {
  int64_t first = 0, last = 0;
};

// Splits queries [first, last) into blocks of at most `max_queries` over which int2_end grows by at
// most `max_queries` (a block of one query may grow by more).
std::vector<QueryBlock> query_blocks(const CacheView& view, int64_t first, int64_t last,
                                     int64_t max_queries);

// "decode", "prefill", "chunked:N". Throws UsageError for anything else.
void parse_cache_mode(const std::string& text, CacheView& view);
std::string cache_mode_name(const CacheView& view);

// What evaluation asks of an attention that keeps its keys and values in an INT2 cache.

// What Interrupted says when an evaluation is stopped.
inline constexpr const char* kStoppedEvaluation = "stopped; no report was written";

// What one method does to one layer's cache. Copies share tensors.
struct LayerCodec {
  SideCodec key, value;
  bool int2_keys = true, int2_values = true;  // false: that side stays exact
};

// q [batch, Hq, tokens, d] into the basis of the cached keys, float32.
torch::Tensor to_query_basis(const LayerCodec& codec, const torch::Tensor& q);

// Attention output o [batch, Hq, tokens, d] (float32) from the basis of the cached values back to
// the model's; adds the mean that centering took out, because attention weights sum to 1.
torch::Tensor from_value_basis(const LayerCodec& codec, const torch::Tensor& o);

class CacheEngine : public AttentionEngine {
 public:
  // False: the layer runs exactly in the original basis.
  virtual bool quantizes(int layer) const = 0;

  // Queries below this position belong to the prompt (modes prefill and chunked).
  virtual void set_prompt(int64_t tokens) = 0;

  // Position of the first token of every sequence; 0 until it is set.
  virtual void set_first_position(int64_t position) = 0;

  // Before this, attend() takes whole sequences (every key of every query). From here on, k and v
  // of each call are appended to what earlier calls left, up to `longest` tokens a sequence. Each
  // call of keep_cache() begins with an empty cache.
  virtual void keep_cache(int64_t longest) = 0;
};

// What runs a method's attention: the block-wise forward over dequantized rows, or a paged cache
// with the plain CPU references or the CUDA kernels.
enum class EngineKind : uint8_t { kSimulate, kReference, kKernel };

// "simulate", "reference", "kernel". Throws Error for anything else.
EngineKind parse_engine_kind(const std::string& name);
const char* engine_name(EngineKind kind);

// Attention over a cache whose old rows are INT2, block by block, and the engine `simulate`.

// One layer's cache content in the cache's basis, float32: every row exactly and as INT2.
// Keys [batch, Hkv, tokens, d_k], values [batch, Hkv, tokens, d_v].
struct CacheRows {
  torch::Tensor k_exact, k_int2, v_exact, v_int2;
};

// Softmax attention of the last q.size(2) positions over `rows` under `view`'s rule, in float32.
// q [batch, Hq, queries, d_k] in the cache's basis -> [batch, Hq, queries, d_v] in the values'
// basis. Memory beyond the inputs is a few blocks, never queries x tokens.
torch::Tensor attend_cache_rows(const CacheView& view, const torch::Tensor& q,
                                const CacheRows& rows, double sm_scale);

// The INT2 forward of one method. A layer without codec runs exactly in the original basis.
class Int2Attention final : public CacheEngine {
 public:
  // layers[l] may be null. `view` holds the windows and mode; `sliding_windows` [num_layers].
  Int2Attention(std::vector<std::shared_ptr<const LayerCodec>> layers, CacheView view,
                std::vector<int> sliding_windows);

  torch::Tensor attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v, double sm_scale) override;
  void keep_cache(int64_t longest) override;
  void set_prompt(int64_t tokens) override { view_.prompt = tokens; }
  void set_first_position(int64_t position) override { first_position_ = position; }
  bool quantizes(int layer) const override { return layers_[layer] != nullptr; }

 private:
  // Rows as the cache holds them; `before` tokens are in it already.
  void read_back(const LayerCodec& codec, int layer, int64_t before, CacheRows& rows) const;
  CacheRows append(int layer, const CacheRows& rows);

  std::vector<std::shared_ptr<const LayerCodec>> layers_;
  CacheView view_;
  std::vector<int> sliding_windows_;
  int64_t first_position_ = 0;
  bool keep_ = false;
  std::vector<CacheRows> kept_;
};

}  // namespace oscar
