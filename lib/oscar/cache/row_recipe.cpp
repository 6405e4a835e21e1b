// Questions to a side's recipe.
#include "oscar/cache/row_recipe.h"

#include <algorithm>

namespace oscar {

bool SideRecipe::any(ScaleCorrection correction) const {
  return std::find(scale_correction.begin(), scale_correction.end(), correction) !=
         scale_correction.end();
}

bool SideRecipe::any(Rounding way) const {
  return std::find(rounding.begin(), rounding.end(), way) != rounding.end();
}

double bits_per_element(const RowFormat& format, int64_t length, int64_t sink, int64_t recent) {
  if (length <= sink + recent) return 16.0;
  const double exact = 16.0 * static_cast<double>(sink + recent);
  const double quantized =
      (2.0 + 2.0 * 8 * metadata_bytes(format.metadata) / format.quant_group_size) *
      static_cast<double>(length - sink - recent);
  return (exact + quantized) / static_cast<double>(length);
}

}  // namespace oscar
