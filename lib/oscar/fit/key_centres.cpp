// Centres turned to each segment, transformed and rounded.
#include "oscar/fit/key_centres.h"

#include <algorithm>

#include "oscar/cache/key_centres.h"
#include "oscar/fit/position_average.h"

namespace oscar {

std::vector<float> centre_rows(const SideTransform& keys, const Rope& rope) {
  const int heads = keys.forward.count, d = keys.forward.rows;
  const int segments = std::max(1, (rope.max_positions + kSegmentTokens - 1) / kSegmentTokens);
  std::vector<float> rows(static_cast<size_t>(segments) * heads * kCentres * d, 0.0f);
  for (int head = 0; head < heads; ++head) {
    if (!has_centres(keys, head)) continue;
    MatrixD turned(segments * kCentres, d);
    for (int j = 0; j < kCentres; ++j) {
      const VectorD centre = keys.centres[head].row(j).cast<double>();
      for (int s = 0; s < segments; ++s) {
        turned.row(s * kCentres + j) = average_sum(centre, rope, phase_at(segment_middle(s)));
      }
    }
    turned.rowwise() -= keys.mean[head].cast<double>();
    const MatrixD transformed = turned * keys.forward[head].cast<double>();
    for (int s = 0; s < segments; ++s) {
      float* const to = rows.data() + (static_cast<size_t>(s) * heads + head) * kCentres * d;
      std::transform(
          transformed.row(s * kCentres).data(), transformed.row(s * kCentres).data() + kCentres * d,
          to, [](double entry) { return bf16_to_float(float_to_bf16(static_cast<float>(entry))); });
    }
  }
  return rows;
}

}  // namespace oscar
