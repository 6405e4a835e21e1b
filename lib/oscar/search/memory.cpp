// The limits, and the sum of what they allow.
#include "oscar/search/memory.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "oscar/search/stages.h"

namespace oscar {
namespace {

constexpr SearchLimits kHost{.scores = int64_t{1} << 18,
                             .kept = int64_t{1} << 27,
                             .chunk_rows = 1,  // each chunk alone
                             .rows = int64_t{1} << 22};
constexpr SearchLimits kDevice{.scores = int64_t{1} << 24,
                               .kept = int64_t{1} << 29,
                               .chunk_rows = int64_t{1} << 24,
                               .rows = int64_t{1} << 27};

// Candidates of one side that are compared at a time where no transforms are: clipping ratios or
// writers, the present one included.
constexpr int64_t kQuickCandidates = 6, kFullCandidates = 12;

// Fits of the portable variants, made beside those of the main one; and the matrices of a side that
// each fit keeps.
constexpr int64_t kPortableFits = 4, kMatrices = 4;

// Matrices of d x d in float64 that making a fit takes at a time: of each head five moments, as
// they are and as they are fitted, and of the head at work roots, products and inverses.
constexpr int64_t kHeadMoments = 10, kFitMatrices = 10;

// Tensors as large as the rows that are quantized side by side: repeated, in the cache's basis,
// clipped, as numbers again, and the error.
constexpr int64_t kRowCopies = 5;

// Tensors as large as a part's scores: scores and weights, exact and of a candidate, the exponents
// and masks between them.
constexpr int64_t kScoreCopies = 6;

// Values of all heads of one token: query, key and value.
int64_t row_values(const ModelConfig& config) {
  return int64_t{config.num_qo_heads + 2 * config.num_kv_heads} * config.head_dim;
}

}  // namespace

const SearchLimits& search_limits(torch::Device device) {
  return device.is_cuda() ? kDevice : kHost;
}

int64_t held_back_bytes(const ModelConfig& config, const HeldBackSize& held_back) {
  return held_back.tokens * row_values(config) * static_cast<int64_t>(sizeof(float));
}

int64_t search_memory_bytes(const ModelConfig& config, const HeldBackSize& held_back,
                            const FitOptions& fixed, const SearchOptions& search,
                            torch::Device device) {
  const SearchLimits& limits = search_limits(device);
  const auto of_main = static_cast<int64_t>(fit_requests(fixed, search).size());
  const int64_t num_fits = of_main + kPortableFits;
  const int64_t num_candidates =
      std::max(of_main, search.full ? kFullCandidates : kQuickCandidates);
  const int64_t side_of_token = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t held = 2 * held_back.tokens * row_values(config);

  const int64_t batch = std::max(limits.chunk_rows, held_back.longest_chunk * side_of_token);
  const int64_t one_side = std::min(batch, held_back.tokens * side_of_token);
  const int64_t candidates = 2 * num_candidates * one_side;
  const int64_t together = std::min(std::max(limits.rows, one_side), candidates);

  const int64_t scores_of_query = int64_t{config.num_qo_heads} * held_back.longest_chunk;
  const int64_t queries = held_back.search_chunks * (search.full ? kSearchFull : kSearchQuick);
  const int64_t kept = std::min(limits.kept, 2 * queries * scores_of_query);
  const int64_t part = std::max(limits.scores, kFewestTogether * scores_of_query);
  const int64_t parts = device.is_cuda() ? 1 : at::get_num_threads();
  // On the device that computes, and on the host where they were made.
  const int64_t matrix = int64_t{config.head_dim} * config.head_dim;
  const int64_t kept_fits = num_fits * 2 * kMatrices * config.num_kv_heads * matrix;
  const int64_t fits =
      device.is_cuda()
          ? kept_fits
          : 2 * kept_fits +
                num_fits * (kHeadMoments * config.num_kv_heads + kFitMatrices) * 2 * matrix;
  const int64_t values =
      fits + held + candidates + kRowCopies * together + kept + kScoreCopies * part * parts;
  return values * static_cast<int64_t>(sizeof(float));
}

}  // namespace oscar
