// Rows to codes, scale and zero: the CPU reference of quantize-append.
#include "oscar/cache/quantize_rows.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "oscar/cache/codec.h"

namespace oscar {

// Rows through the codec: the plain loop, and sixteen rows in lockstep for vector units.

namespace {

constexpr int kLanes = 16;  // rows that advance together
constexpr int kStrip = 4;   // columns whose sums are held in registers

int num_groups(const RowQuantizer& q) { return q.head_dim / q.format.quant_group_size; }

// Magnitude at which `count` values are clipped; infinite for none.
float clip_threshold(float clip_ratio, const float* values, int count) {
  const int rank = clip_threshold_index(clip_ratio, count);
  return rank < 0 ? std::numeric_limits<float>::infinity() : magnitude_of_rank(values, count, rank);
}

// Scales and zeros of one row; reports values that are not finite and ranges that do not fit.
RowStatus row_scales(const RowQuantizer& q, const float* x, GroupScale* groups) {
  if (!std::all_of(x, x + q.head_dim, is_finite)) return RowStatus::kNonFinite;
  const int size = q.format.quant_group_size;
  const bool by_group = q.format.rules.clip_span == ClipSpan::kQuantGroup;
  float threshold = by_group ? 0.0f : clip_threshold(q.recipe.clip_ratio, x, q.head_dim);
  for (int g = 0; g < num_groups(q); ++g) {
    const float* values = x + g * size;
    if (by_group) threshold = clip_threshold(q.recipe.clip_ratio, values, size);
    // Clamping is monotone, so it commutes with min and max.
    const auto [lo, hi] = std::minmax_element(values, values + size);
    groups[g] = group_scale(q.format, std::clamp(*lo, -threshold, threshold),
                            std::clamp(*hi, -threshold, threshold));
    if (!is_finite(groups[g].stored.scale) || !is_finite(groups[g].stored.zero)) {
      return RowStatus::kMetadataOverflow;
    }
  }
  return RowStatus::kOk;
}

RowStatus apply_factor(const RowQuantizer& q, float factor, GroupScale* groups) {
  for (int g = 0; g < num_groups(q); ++g) {
    float& scale = groups[g].stored.scale;
    scale = round_to_metadata(mul_rn(scale, factor), q.format.metadata);
    if (!is_finite(scale)) return RowStatus::kMetadataOverflow;
  }
  return RowStatus::kOk;
}

void store_row(const RowQuantizer& q, int64_t row, const uint8_t* codes, const GroupScale* groups,
               const QuantizedRows& out) {
  const int count = num_groups(q), size = q.format.quant_group_size;
  if (out.packed) pack_row(codes, q.head_dim, q.order, out.packed + row * (q.head_dim / 4));
  for (int g = 0; out.metadata && g < count; ++g) {
    const ScaleZero& sz = groups[g].stored;
    store_metadata(out.metadata, (row * count + g) * 2, sz.scale, q.format.metadata);
    store_metadata(out.metadata, (row * count + g) * 2 + 1, sz.zero, q.format.metadata);
  }
  for (int i = 0; out.dequantized && i < q.head_dim; ++i) {
    out.dequantized[row * q.head_dim + i] =
        dequantize(q.format.rules, codes[i], groups[i / size].stored);
  }
}

// Sixteen rows, one per lane: values[i][lane].
struct Lanes {
  alignas(64) float x[kMaxHeadDim][kLanes];
  alignas(64) float error[kMaxHeadDim][kLanes];
  alignas(64) float y[kMaxHeadDim][kLanes];  // dequantized
  alignas(64) float scale[kMaxHeadDim][kLanes];
  alignas(64) float zero[kMaxHeadDim][kLanes];
  alignas(64) float factor[kLanes];
  alignas(64) int code[kMaxHeadDim][kLanes];
};

// sums[c][lane] += rows[j][lane] * matrix[j, column + c] for j in [0, count), ascending.
[[gnu::always_inline]] inline void strip_sums(const float (*rows)[kLanes], const float* matrix,
                                              int head_dim, int column, int count,
                                              float (&sums)[kStrip][kLanes]) {
  for (int half = 0; half < kLanes; half += 8) {
    float partial[kStrip][8] = {};
    for (int j = 0; j < count; ++j) {
      const float* entries = matrix + static_cast<int64_t>(j) * head_dim + column;
      for (int c = 0; c < kStrip; ++c) {
        for (int l = 0; l < 8; ++l) partial[c][l] += rows[j][half + l] * entries[c];
      }
    }
    for (int c = 0; c < kStrip; ++c) {
      for (int l = 0; l < 8; ++l) sums[c][half + l] = partial[c][l];
    }
  }
}

[[gnu::always_inline]] inline void code_column(const RowQuantizer& q, int column,
                                               const float (&pushed)[kLanes], Lanes& lanes) {
  const float* scale = lanes.scale[column / q.format.quant_group_size];
  const float* zero = lanes.zero[column / q.format.quant_group_size];
  for (int l = 0; l < kLanes; ++l) {
    const float value = lanes.x[column][l];
    const float t = (value - pushed[l]) / scale[l] + zero[l] + 0.5f;
    const float code =
        (t >= 1.0f ? 1.0f : 0.0f) + (t >= 2.0f ? 1.0f : 0.0f) + (t >= 3.0f ? 1.0f : 0.0f);
    lanes.code[column][l] = static_cast<int>(code);
    lanes.y[column][l] = (code - zero[l]) * scale[l];
    lanes.error[column][l] = lanes.y[column][l] - value;
  }
}

[[gnu::always_inline]] inline void code_lanes(const RowQuantizer& q, Lanes& lanes) {
  const bool shaped = q.recipe.rounding == Rounding::kShaped;
  for (int column = 0; column < q.head_dim; column += kStrip) {
    float sums[kStrip][kLanes] = {};
    if (shaped) strip_sums(lanes.error, q.feedback, q.head_dim, column, column, sums);
    for (int c = 0; c < kStrip; ++c) {
      for (int j = column; shaped && j < column + c; ++j) {
        const float entry = q.feedback[static_cast<int64_t>(j) * q.head_dim + column + c];
        for (int l = 0; l < kLanes; ++l) sums[c][l] += lanes.error[j][l] * entry;
      }
      code_column(q, column + c, sums[c], lanes);
    }
  }
}

[[gnu::always_inline]] inline void factor_lanes(const RowQuantizer& q, Lanes& lanes) {
  float num[kLanes] = {}, den[kLanes] = {};
  for (int column = 0; column < q.head_dim; column += kStrip) {
    float weighted[kStrip][kLanes];
    if (q.recipe.scale_correction == ScaleCorrection::kMetric) {
      strip_sums(lanes.x, q.metric, q.head_dim, column, q.head_dim, weighted);
    } else {
      for (int c = 0; c < kStrip; ++c) {
        for (int l = 0; l < kLanes; ++l) weighted[c][l] = lanes.x[column + c][l];
      }
    }
    for (int c = 0; c < kStrip; ++c) {
      for (int l = 0; l < kLanes; ++l) {
        num[l] += weighted[c][l] * lanes.x[column + c][l];
        den[l] += weighted[c][l] * lanes.y[column + c][l];
      }
    }
  }
  for (int l = 0; l < kLanes; ++l) lanes.factor[l] = correction_factor(num[l], den[l]);
}

[[gnu::always_inline]] inline void advance_lanes(const RowQuantizer& q, Lanes& lanes) {
  code_lanes(q, lanes);
  if (q.recipe.scale_correction != ScaleCorrection::kNone) factor_lanes(q, lanes);
}

#if defined(__x86_64__)
// AVX2 without FMA: wider vectors, the same roundings.
[[gnu::target("avx2")]] void advance_lanes_avx2(const RowQuantizer& q, Lanes& lanes) {
  advance_lanes(q, lanes);
}
#endif
void advance_lanes_any(const RowQuantizer& q, Lanes& lanes) { advance_lanes(q, lanes); }

auto pick_advance() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return advance_lanes_avx2;
#endif
  return advance_lanes_any;
}

// Rows [first, last) on the calling thread.
RowsStatus quantize_range(const RowQuantizer& q, const float* x, int64_t first, int64_t last,
                          const QuantizedRows& out) {
  static const auto advance = pick_advance();
  const auto lanes = std::make_unique<Lanes>();
  GroupScale groups[kLanes][kMaxHeadDim];
  uint8_t codes[kMaxHeadDim];
  for (int64_t base = first; base < last; base += kLanes) {
    const int live = static_cast<int>(std::min<int64_t>(kLanes, last - base));
    for (int l = 0; l < kLanes; ++l) {
      const int64_t row = base + std::min(l, live - 1);  // idle lanes repeat the last row
      const float* values = x + row * q.head_dim;
      const RowStatus status = row_scales(q, values, groups[l]);
      if (status != RowStatus::kOk) return {status, row};
      for (int i = 0; i < q.head_dim; ++i) lanes->x[i][l] = values[i];
      for (int g = 0; g < num_groups(q); ++g) {
        lanes->scale[g][l] = groups[l][g].stored.scale;
        lanes->zero[g][l] = groups[l][g].stored.zero;
      }
    }
    advance(q, *lanes);
    for (int l = 0; l < live; ++l) {
      if (q.recipe.scale_correction != ScaleCorrection::kNone) {
        const RowStatus status = apply_factor(q, lanes->factor[l], groups[l]);
        if (status != RowStatus::kOk) return {status, base + l};
      }
      for (int i = 0; i < q.head_dim; ++i) codes[i] = static_cast<uint8_t>(lanes->code[i][l]);
      store_row(q, base + l, codes, groups[l], out);
    }
  }
  return {};
}

// range(first, last) over all rows, cut in whole blocks of lanes; the first row refused.
template <typename Range>
RowsStatus in_ranges(int64_t rows, int threads, const Range& range) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int64_t blocks = (rows + kLanes - 1) / kLanes;
  threads = static_cast<int>(std::min<int64_t>(threads, std::max<int64_t>(1, blocks / 8)));
  std::vector<RowsStatus> results(threads);
  const auto share = [&](int t) {
    results[t] =
        range(blocks * t / threads * kLanes, std::min(rows, blocks * (t + 1) / threads * kLanes));
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(share, t);
  share(0);
  for (std::thread& worker : workers) worker.join();
  for (const RowsStatus& result : results) {
    if (result.status != RowStatus::kOk) return result;  // ranges ascend: the first is lowest
  }
  return {};
}

}  // namespace

bool valid_quantizer(const RowQuantizer& q) {
  const int size = q.format.quant_group_size;
  const bool plain =
      q.recipe.rounding == Rounding::kPlain && q.recipe.scale_correction == ScaleCorrection::kNone;
  return q.head_dim > 0 && q.head_dim % 8 == 0 && q.head_dim <= kMaxHeadDim && size > 0 &&
         q.head_dim % size == 0 && (q.format.rules == CodecRules{} || plain) &&
         (q.recipe.rounding == Rounding::kPlain || q.feedback != nullptr) &&
         (q.recipe.scale_correction != ScaleCorrection::kMetric || q.metric != nullptr);
}

namespace {

// Rows [first, last), one after another.
RowsStatus quantize_plainly(const RowQuantizer& q, const float* x, int64_t first, int64_t last,
                            const QuantizedRows& out) {
  const int size = q.format.quant_group_size;
  std::vector<GroupScale> groups(num_groups(q));
  std::vector<ScaleZero> coding(num_groups(q));
  std::vector<float> y(q.head_dim), errors(q.head_dim);
  std::vector<uint8_t> codes(q.head_dim);
  for (int64_t row = first; row < last; ++row) {
    const float* values = x + row * q.head_dim;
    RowStatus status = row_scales(q, values, groups.data());
    if (status != RowStatus::kOk) return {status, row};
    for (int g = 0; g < num_groups(q); ++g) coding[g] = groups[g].coding;
    if (q.recipe.rounding == Rounding::kShaped) {
      shaped_codes(values, q.feedback, coding.data(), q.head_dim, size, errors.data(),
                   codes.data());
    } else {
      for (int i = 0; i < q.head_dim; ++i) {
        codes[i] = static_cast<uint8_t>(code_of(q.format.rules, values[i], coding[i / size]));
      }
    }
    if (q.recipe.scale_correction != ScaleCorrection::kNone) {
      for (int i = 0; i < q.head_dim; ++i) y[i] = dequantize(codes[i], coding[i / size]);
      const float factor = q.recipe.scale_correction == ScaleCorrection::kMetric
                               ? metric_factor(values, y.data(), q.metric, q.head_dim)
                               : unbiased_factor(values, y.data(), q.head_dim);
      status = apply_factor(q, factor, groups.data());
      if (status != RowStatus::kOk) return {status, row};
    }
    store_row(q, row, codes.data(), groups.data(), out);
  }
  return {};
}

}  // namespace

RowsStatus quantize_rows_ref(const RowQuantizer& q, const float* x, int64_t rows,
                             const QuantizedRows& out) {
  assert(valid_quantizer(q));
  return quantize_plainly(q, x, 0, rows, out);
}

RowsStatus quantize_rows(const RowQuantizer& q, const float* x, int64_t rows,
                         const QuantizedRows& out, int threads) {
  assert(valid_quantizer(q));
  const bool in_lockstep = q.format.rules == CodecRules{};
  return in_ranges(rows, threads, [&](int64_t first, int64_t last) {
    return in_lockstep ? quantize_range(q, x, first, last, out)
                       : quantize_plainly(q, x, first, last, out);
  });
}

}  // namespace oscar
