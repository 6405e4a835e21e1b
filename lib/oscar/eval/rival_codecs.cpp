// Other projects' codecs, each from its definition. Read in: vLLM 0.26, llama.cpp's ggml-quants.c,
// KIVI's quant/new_pack.py (github.com/jy-yuan/KIVI), KVarN (github.com/huawei-csl/KVarN).
#include "oscar/eval/rival_codecs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {
namespace {

using torch::Tensor;

Tensor absmax(const Tensor& x) { return x.abs().amax(-1, true); }
Tensor as_fp16(const Tensor& x) { return x.to(torch::kHalf).to(torch::kFloat32); }

// [.., n] -> [.., n / size, size].
Tensor blocks_of(const Tensor& x, int64_t size) { return x.unflatten(-1, {-1, size}); }

// Sylvester's Hadamard matrix over sqrt(n): symmetric, its own inverse.
Tensor hadamard_matrix(int64_t n, torch::Device device) {
  auto h = torch::ones({1, 1});
  while (h.size(0) < n) h = torch::cat({torch::cat({h, h}, 1), torch::cat({h, -h}, 1)}, 0);
  return (h / std::sqrt(static_cast<double>(n))).to(device);
}

// Blocks of as many values as the matrix has rows, each times it.
Tensor turned(const Tensor& x, const Tensor& h) {
  return torch::matmul(blocks_of(x, h.size(0)), h).flatten(-2);
}

// Numbers.

constexpr double kLargestE4m3 = 448;

// Nearest of 3 bits of mantissa, ties to even; beyond the largest it is the largest.
Tensor as_e4m3(const Tensor& x) {
  return x.clamp(-kLargestE4m3, kLargestE4m3).to(torch::kFloat8_e4m3fn).to(torch::kFloat32);
}

// 0, .5, 1, 1.5, 2, 3, 4 and 6 with a sign; nearest, ties to even, saturating.
Tensor as_e2m1(const Tensor& x) {
  const auto a = x.abs().clamp_max(6);
  const auto step = torch::where(a.lt(2), 0.5, torch::where(a.lt(4), 1.0, 2.0));
  return x.sign() * (a / step).round() * step;
}

// Halves away from zero, as C's roundf.
Tensor round_half_away(const Tensor& x) {
  const auto a = x.abs(), whole = a.floor();
  return x.sign() * (whole + (2 * (a - whole)).floor());
}

// 1 / x, and 0 for 0.
Tensor inverse_or_zero(const Tensor& x) { return torch::where(x.eq(0), 0.0, 1 / x); }

// Largest magnitude of each sequence [batch, 1, 1, 1]: a layer's scale is made of it.
Tensor sequence_absmax(const Tensor& x) { return x.abs().amax({1, 2, 3}, true); }

// vLLM (v1/attention/ops, csrc).

// Constants of vLLM's calc_kv_scales: a scale brings the largest magnitude to them.
constexpr double kKeyRange = 200, kValueRange = 100;

Tensor fp8_scaled(const Tensor& x, double range) {
  const auto scale = sequence_absmax(x).clamp_min(1e-12) / range;
  return as_e4m3(x / scale) * scale;
}

Tensor fp8_per_token_head(const Tensor& x) {
  const auto scale = (absmax(x) / kLargestE4m3).clamp_min(1e-6);
  return as_e4m3(x * (1 / scale)) * scale;
}

// Signs of vLLM's randomized Hadamard transform (single_rht).
Tensor rht_signs(int64_t n) {
  constexpr uint64_t kSeed = 0x9E3779B9;
  const auto generator = at::detail::createCPUGenerator(kSeed);
  return 2 * torch::bernoulli(torch::full({n}, 0.5), generator) - 1;
}

// signs [d]; h over sqrt(d), where vLLM's is not: rows are rounded to bf16 in between, which does
// not depend on it for d = 64 and 256, and by one rounding for d = 128.
Tensor int4_per_token_head(const Tensor& x, const Tensor& signs, const Tensor& h) {
  const double norm = std::sqrt(static_cast<double>(h.size(0)));
  const auto y = (turned(x * signs, h) * norm).to(torch::kBFloat16).to(torch::kFloat32);
  const auto low = y.amin(-1, true);
  const auto scale = ((y.amax(-1, true) - low) / 15).clamp_min(1e-6);
  const auto zero = round_half_away(-low / scale).clamp(0, 15);
  const auto codes = (y * (1 / scale) + zero + 0.5).floor().clamp(0, 15);
  // The zero takes the place of the scale's four low bits.
  const auto stored = scale.view(torch::kInt32).bitwise_and(-16).view(torch::kFloat32);
  return turned((codes - zero) * stored / norm, h) * signs;
}

constexpr int64_t kNvfp4Block = 16;

// scale: of the tensor.
Tensor nvfp4(const Tensor& x, const Tensor& scale) {
  const auto blocks = blocks_of(x, kNvfp4Block);
  const auto of_tensor = scale.unsqueeze(-1);
  const auto of_block = as_e4m3(absmax(blocks) / 6 / of_tensor) * of_tensor;
  return (as_e2m1(blocks * inverse_or_zero(of_block)) * of_block).flatten(-2);
}

Tensor nvfp4_scaled(const Tensor& x) {
  return nvfp4(x, sequence_absmax(x).clamp_min(1e-12) / kLargestE4m3);
}

// levels [n] and the middles between them, of N(0, 1 / d).
Tensor turboquant_keys(const Tensor& x, const Tensor& h, const Tensor& levels,
                       const Tensor& middles) {
  const auto norm = x.square().sum(-1, true).sqrt();
  const auto codes = torch::bucketize(turned(x / (norm + 1e-8), h), middles, false, /*right=*/true);
  const auto y = levels.index_select(0, codes.flatten()).view(codes.sizes());
  const auto unit = y * (y.square().sum(-1, true) + 1e-16).rsqrt();
  return turned(unit * as_fp16(norm), h);
}

Tensor turboquant_values(const Tensor& x, int bits) {
  const double top = (1 << bits) - 1;
  const auto low = x.amin(-1, true);
  const auto scale = ((x.amax(-1, true) - low) / top).clamp_min(1e-8);
  const auto codes = ((x - low) / scale + 0.5).floor().clamp(0, top);
  return codes * as_fp16(scale) + as_fp16(low);
}

// llama.cpp (ggml-quants.c; llama-kv-cache.cpp for the rotation).

constexpr int64_t kGgmlBlock = 32;
constexpr int64_t kGgmlRotation = 64;  // smallest; other head dims are not rotated

// Keys by the largest power of two that divides d, values by 64.
int64_t ggml_rotation(Side side, int64_t d) {
  if (d % kGgmlRotation != 0) return 1;
  int64_t n = kGgmlRotation;
  while (side == Side::kKey && d % (2 * n) == 0) n *= 2;
  return n;
}

Tensor q8_0(const Tensor& x) {
  const auto blocks = blocks_of(x, kGgmlBlock);
  const auto scale = absmax(blocks) / 127;
  return (round_half_away(blocks * inverse_or_zero(scale)) * as_fp16(scale)).flatten(-2);
}

// The first value of largest magnitude becomes level -8.
Tensor q4_0(const Tensor& x) {
  const auto blocks = blocks_of(x, kGgmlBlock);
  const auto place = torch::arange(kGgmlBlock, torch::dtype(torch::kInt64).device(x.device()));
  const auto first =
      torch::where(blocks.abs().eq(absmax(blocks)), place, kGgmlBlock - 1).amin(-1, true);
  const auto scale = blocks.gather(-1, first) / -8;
  const auto codes = (blocks * inverse_or_zero(scale) + 8.5).floor().clamp(0, 15);
  return ((codes - 8) * as_fp16(scale)).flatten(-2);
}

// KIVI: min and max of `groups` [.., group], halves to even.

Tensor kivi(const Tensor& groups, int bits) {
  constexpr double kSmallestScale = 0x1p-24;  // where KIVI divides by zero
  const double top = (1 << bits) - 1;
  const auto low = as_fp16(groups.amin(-1, true));
  const auto scale = as_fp16((groups.amax(-1, true) - low) / top).clamp_min(kSmallestScale);
  return ((groups - low) / scale).clamp(0, top).round() * scale + low;
}

constexpr int64_t kKiviGroup = 32;

// KVarN: tiles [.., rows, columns] divided by scales of rows and columns until their standard
// deviations are even, then coded row by row.

constexpr int kKvarnRounds = 16;

// The log of a scale with that of one more deviation.
Tensor more_log_scale(const Tensor& log_scale, const Tensor& deviation) {
  return (log_scale + deviation.clamp(1e-3, 1e3).log()).clamp(-0.3, 10);
}

Tensor unevenness(const Tensor& tiles) {
  const auto spread = [&](int64_t dim) {
    const auto deviations = tiles.std(dim, /*unbiased=*/true, /*keepdim=*/true);
    return deviations.amax({-2, -1}, true) / deviations.amin({-2, -1}, true).clamp_min(1e-8);
  };
  return spread(-2) + spread(-1);
}

Tensor kvarn(const Tensor& tiles, int bits) {
  auto log_column = torch::zeros_like(tiles.select(-2, 0)).unsqueeze(-2);
  auto log_row = torch::zeros_like(tiles.select(-1, 0)).unsqueeze(-1);
  auto column = log_column.exp(), row = log_row.exp();
  auto least = unevenness(tiles);
  Tensor now = tiles;
  const auto divided = [&] { return tiles / log_column.exp() / log_row.exp(); };
  for (int round = 0; round < kKvarnRounds; ++round) {
    log_column = more_log_scale(log_column, now.std(-2, true, true));
    now = divided();
    log_row = more_log_scale(log_row, now.std(-1, true, true));
    now = divided();
    const auto found = unevenness(now);
    const auto better = found.le(least);
    column = torch::where(better, log_column.exp(), column);
    row = torch::where(better, log_row.exp(), row);
    least = torch::where(better, found, least);
  }
  const auto even = tiles / column / row;
  const double top = (1 << bits) - 1;
  const auto low = even.amin(-1, true);
  const auto scale = ((even.amax(-1, true) - low) / top).clamp_min(1e-10);
  const auto codes = ((even - low) / scale).round().clamp(0, top);
  return (codes * as_fp16(row * scale) + as_fp16(row * low)) * as_fp16(column);
}

// Whole tiles of x from token `sink` on, [batch, Hkv, tiles, tile, d], through `code`.
template <typename Code>
Tensor in_tiles(const Tensor& x, int64_t sink, int64_t tile, const Code& code) {
  const int64_t tokens = x.size(2), count = std::max<int64_t>(0, tokens - sink) / tile;
  if (count == 0) return x;
  const int64_t end = sink + count * tile;
  const auto coded = code(x.slice(2, sink, end).unflatten(2, {count, tile})).flatten(2, 3);
  return torch::cat({x.slice(2, 0, sink), coded, x.slice(2, end)}, 2);
}

Tensor transposed(const Tensor& x) { return x.transpose(-2, -1); }

void require_head_dim(const RivalFormat& rival, int head_dim, bool fits,
                      const std::string& expected) {
  if (fits) return;
  throw Error({.what = fmt::format("the codec {} cannot code rows of this head_dim", rival.name),
               .where = "--compare",
               .expected = expected,
               .found = std::to_string(head_dim)});
}

void require_multiple(const RivalFormat& rival, int head_dim, int64_t size) {
  require_head_dim(rival, head_dim, head_dim % size == 0, fmt::format("a multiple of {}", size));
}

void require_power_of_two(const RivalFormat& rival, int head_dim) {
  require_head_dim(rival, head_dim, (head_dim & (head_dim - 1)) == 0, "a power of two");
}

RowCodec turboquant_codec(Side side, int d, int key_bits, int value_bits, torch::Device device) {
  if (side == Side::kValue) {
    return [=](const Tensor& x) { return turboquant_values(x, value_bits); };
  }
  auto levels =
      torch::tensor(lloyd_max_levels(key_bits), torch::kFloat64) / std::sqrt(double{1} * d);
  const auto middles =
      ((levels.slice(0, 1) + levels.slice(0, 0, -1)) / 2).to(torch::kFloat32).to(device);
  levels = levels.to(torch::kFloat32).to(device);
  return [=, h = hadamard_matrix(d, device)](const Tensor& x) {
    return turboquant_keys(x, h, levels, middles);
  };
}

RowCodec kvarn_codec(Side side, int d, int bits, int64_t sink, int64_t tile, torch::Device device) {
  const auto code = [=](const Tensor& tiles) {
    return side == Side::kKey ? transposed(kvarn(transposed(tiles), bits)) : kvarn(tiles, bits);
  };
  return [=, h = hadamard_matrix(d, device)](const Tensor& x) {
    // Exact rows are not turned back and forth: attention reads them as they are anyway.
    return turned(in_tiles(turned(x, h), sink, tile, code), h);
  };
}

RowCodec kivi_codec(Side side, int bits, int64_t sink, int64_t tile) {
  if (side == Side::kValue) {
    return [=](const Tensor& x) { return kivi(blocks_of(x, kKiviGroup), bits).flatten(-2); };
  }
  return [=](const Tensor& x) {
    return in_tiles(x, sink, tile,
                    [&](const Tensor& tiles) { return transposed(kivi(transposed(tiles), bits)); });
  };
}

}  // namespace

std::vector<double> lloyd_max_levels(int bits) {
  constexpr double kReach = 3.5, kEnd = 3 * kReach, kTolerance = 1e-10;
  constexpr int kRounds = 200, kSteps = 200;
  const int count = 1 << bits;
  // Of N(0, 1) between two edges, by trapezoids.
  const auto mean_between = [](double low, double high) {
    double sum = 0, weights = 0;
    for (int i = 0; i <= kSteps; ++i) {
      const double x = low + (high - low) * i / kSteps;
      const double weight = std::exp(-x * x / 2) * (i == 0 || i == kSteps ? 0.5 : 1);
      sum += weight * x;
      weights += weight;
    }
    return sum / weights;
  };
  std::vector<double> levels;
  for (int i = 0; i < count; ++i) levels.push_back(kReach * (2 * (i + 0.5) / count - 1));
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> edges = {-kEnd};
    for (int i = 1; i < count; ++i) edges.push_back((levels[i - 1] + levels[i]) / 2);
    edges.push_back(kEnd);
    double moved = 0;
    for (int i = 0; i < count; ++i) {
      const double mean = mean_between(edges[i], edges[i + 1]);
      moved = std::max(moved, std::abs(mean - levels[i]));
      levels[i] = mean;
    }
    if (moved < kTolerance) break;
  }
  return levels;
}

RowCodec rival_codec(const RivalFormat& rival, Side side, int d, int64_t sink,
                     torch::Device device) {
  const std::string name = rival.name;
  if (name == "fp8") return as_e4m3;
  if (name == "fp8-scaled") {
    const double range = side == Side::kKey ? kKeyRange : kValueRange;
    return [=](const Tensor& x) { return fp8_scaled(x, range); };
  }
  if (name == "fp8-per-token-head") return fp8_per_token_head;
  if (name == "int4-per-token-head") {
    require_power_of_two(rival, d);
    return [signs = rht_signs(d).to(device), h = hadamard_matrix(d, device)](const Tensor& x) {
      return int4_per_token_head(x, signs, h);
    };
  }
  if (name == "nvfp4" || name == "nvfp4-scaled") {
    require_multiple(rival, d, kNvfp4Block);
    if (name == "nvfp4-scaled") return nvfp4_scaled;
    return [one = torch::ones({1, 1, 1, 1}).to(device)](const Tensor& x) { return nvfp4(x, one); };
  }
  if (name == "q8_0" || name == "q4_0") {
    require_multiple(rival, d, kGgmlBlock);
    const auto code = name == "q8_0" ? q8_0 : q4_0;
    return [code, h = hadamard_matrix(ggml_rotation(side, d), device)](const Tensor& x) {
      return turned(code(turned(x, h)), h);
    };
  }
  if (name == "kivi-2") {
    require_multiple(rival, d, kKiviGroup);
    return kivi_codec(side, 2, sink, rival.tile_tokens);
  }
  require_power_of_two(rival, d);
  if (name == "turboquant-k8v4" && side == Side::kKey) return as_e4m3;
  if (name == "turboquant-4" || name == "turboquant-k8v4")
    return turboquant_codec(side, d, 4, 4, device);
  if (name == "turboquant-3") return turboquant_codec(side, d, 3, 3, device);
  const int bits = name == "kvarn-k4v2" && side == Side::kKey ? 4 : 2;
  return kvarn_codec(side, d, bits, sink, rival.tile_tokens, device);
}

}  // namespace oscar
