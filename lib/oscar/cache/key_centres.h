// Two centres of keys a segment of positions (math 4.9): a key row is coded as what it differs by
// from the nearer one, and the sign of its scale says which one that is.
#pragma once

#include "oscar/cache/numeric.h"
#include "oscar/cache/rounded_arithmetic.h"

namespace oscar {

inline constexpr int kSegmentTokens = 1024;  // positions [1024 s, 1024 (s + 1)) are segment s
inline constexpr int kCentres = 2;

// The centres of one layer, transformed and centred as its rows are.
struct KeyCentres {
  // bf16 [segments][num_kv_heads][2][head_dim], 16-byte aligned; null: rows are coded as they are.
  const uint16_t* rows = nullptr;
  int segments = 0;                         // later positions belong to the last one
  const int32_t* first_position = nullptr;  // [batch] of each request's first token; null: 0
};

// The segment of all 64 rows of page `page` of a request: that of the page's middle.
OSCAR_HOST_DEVICE inline int segment_of_page(int first_position, int sink_tokens, int page,
                                             int segments) {
  constexpr int kHalfPage = 32;
  const int segment =
      (first_position + sink_tokens + 2 * kHalfPage * page + kHalfPage) / kSegmentTokens;
  return segment < segments ? segment : segments - 1;
}
OSCAR_HOST_DEVICE inline int segment_of_page(const KeyCentres& centres, int request,
                                             int sink_tokens, int page) {
  return segment_of_page(centres.first_position ? centres.first_position[request] : 0, sink_tokens,
                         page, centres.segments);
}

// The two centres of one segment and KV head, [2][head_dim].
OSCAR_HOST_DEVICE inline const uint16_t* centres_of(const KeyCentres& centres, int segment,
                                                    int head, int num_kv_heads, int head_dim) {
  return centres.rows + (static_cast<int64_t>(segment) * num_kv_heads + head) * kCentres * head_dim;
}

// Which of two centres [2][head_dim] is nearer to the bf16 row z [head_dim]: the first unless the
// second has the larger sum of o_i (z_i - o_i / 2). This order of sums defines it; kernels add in
// others and may choose differently where the two differ by rounding only.
OSCAR_HOST_DEVICE inline int nearest_centre(const uint16_t* z, const uint16_t* centres,
                                            int head_dim) {
  float score[kCentres];
  for (int j = 0; j < kCentres; ++j) {
    score[j] = 0.0f;
    for (int i = 0; i < head_dim; ++i) {
      const float o = bf16_to_float(centres[j * head_dim + i]);
      score[j] = add_rn(score[j], mul_rn(o, sub_rn(bf16_to_float(z[i]), mul_rn(0.5f, o))));
    }
  }
  return score[1] > score[0];
}

// What is coded of an entry z of a row whose centre has the entry o: bf16, like the row.
OSCAR_HOST_DEVICE inline uint16_t around_centre(uint16_t z, uint16_t o) {
  return float_to_bf16(sub_rn(bf16_to_float(z), bf16_to_float(o)));
}

// The scale of a row's first quantization group as stored, positive otherwise, and what it says.
OSCAR_HOST_DEVICE inline float scale_with_centre(float scale, int centre) {
  return centre ? -scale : scale;
}
OSCAR_HOST_DEVICE inline int centre_of_scale(float stored) {
  return static_cast<int>(float_bits(stored) >> 31);
}
OSCAR_HOST_DEVICE inline float scale_without_centre(float stored) {
  return float_from_bits(float_bits(stored) & 0x7fffffffu);
}

}  // namespace oscar
