// config.json as far as plans of memory read it.
#include <cmath>

#include "fuzz_case.h"
#include "oscar/bundle/memory_plan.h"

namespace oscar::fuzz {

// A file of a few bytes may speak of 4096 layers.
const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 128};

void read_untrusted(std::string_view bytes) {
  scratch_file("config.json", bytes);
  const CachedModel model = read_cached_model(scratch_folder());
  for (const auto format : {CacheKind::kBf16, CacheKind::kFp8, CacheKind::kInt2}) {
    const double request = request_bytes(model, format, 4096);
    require(std::isfinite(request) && request >= 0, "bytes of a request are no number");
  }
  memory_plan(model, {.gpu_bytes = int64_t{80} << 30, .context = 4096, .weight_bytes = {}});
}

}  // namespace oscar::fuzz
