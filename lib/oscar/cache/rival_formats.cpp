// What a cached value takes, and the table of other projects' codecs.
#include "oscar/cache/rival_formats.h"

#include <algorithm>

namespace oscar {
namespace {

// A scale of each row in fp32, a scale and a minimum in fp16.
constexpr double kScale32 = 32, kScaleAndMinimum16 = 32, kNorm16 = 16;

// KVarN's tile of 128 tokens and d channels: codes, fp16 scale and minimum along the axis that is
// coded together, fp16 scale along the other.
constexpr RivalBits kvarn_key(double bits) { return {bits + 0.25, 16}; }
constexpr RivalBits kvarn_value(double bits) { return {bits + 0.125, 32}; }

constexpr RivalFormat kRivals[] = {
    {.name = "q8_0",
     .summary = "Hadamard; 8-bit integers in blocks of 32, fp16 scale",
     .source = "llama.cpp -ctk q8_0 -ctv q8_0",
     .key = {8.5},
     .value = {8.5}},
    {.name = "fp8-per-token-head",
     .summary = "e4m3 over a scale of each row, absmax / 448",
     .source = "vLLM fp8_per_token_head",
     .key = {8, kScale32},
     .value = {8, kScale32}},
    {.name = "fp8",
     .summary = "e4m3, scale 1",
     .source = "vLLM fp8, a checkpoint without scales",
     .key = {8},
     .value = {8}},
    {.name = "fp8-scaled",
     .summary = "e4m3, one scale a layer: absmax / 200 of keys, / 100 of values",
     .source = "vLLM fp8 with calibrated scales",
     .key = {8},
     .value = {8}},
    {.name = "turboquant-k8v4",
     .summary = "keys e4m3, scale 1; values 4 bits uniform",
     .source = "vLLM turboquant_k8v4",
     .key = {8},
     .value = {4, kScaleAndMinimum16},
     .exact_layers = 2},
    {.name = "nvfp4",
     .summary = "e2m1 in blocks of 16, e4m3 scale; tensor scale 1",
     .source = "vLLM nvfp4, a checkpoint without scales",
     .key = {4.5},
     .value = {4.5}},
    {.name = "nvfp4-scaled",
     .summary = "the same, tensor scale absmax / 448",
     .source = "vLLM nvfp4 with calibrated scales",
     .key = {4.5},
     .value = {4.5}},
    {.name = "q4_0",
     .summary = "Hadamard; 4 bits in blocks of 32, fp16 scale",
     .source = "llama.cpp -ctk q4_0 -ctv q4_0",
     .key = {4.5},
     .value = {4.5}},
    {.name = "int4-per-token-head",
     .summary = "signs and Hadamard; 16 levels of each row, integer zero",
     .source = "vLLM int4_per_token_head",
     .key = {4, kScale32},
     .value = {4, kScale32}},
    {.name = "turboquant-4",
     .summary = "keys Hadamard, 16 Gaussian levels; values 4 bits uniform",
     .source = "vLLM turboquant_4bit_nc",
     .key = {4, kNorm16},
     .value = {4, kScaleAndMinimum16},
     .exact_layers = 2},
    {.name = "kvarn-k4v2",
     .summary = "Hadamard; tiles of 128 tokens, variances evened; 4 and 2 bits",
     .source = "KVarN kvarn_k4v2_g128",
     .key = kvarn_key(4),
     .value = kvarn_value(2),
     .sink_tokens = 128,
     .recent_tokens = 1,
     .tile_tokens = 128},
    {.name = "turboquant-3",
     .summary = "keys Hadamard, 8 Gaussian levels; values 3 bits uniform",
     .source = "vLLM turboquant_3bit_nc",
     .key = {3, kNorm16},
     .value = {3, kScaleAndMinimum16},
     .exact_layers = 2},
    {.name = "kivi-2",
     .summary = "2 bits: keys by channel over 32 tokens, values over 32 channels",
     .source = "KIVI, group 32, residual 128",
     .key = {3},
     .value = {3},
     .recent_tokens = 128,
     .tile_tokens = 32},
    {.name = "kvarn-k2v2",
     .summary = "as kvarn-k4v2, 2 and 2 bits",
     .source = "KVarN with 2-bit keys",
     .key = kvarn_key(2),
     .value = kvarn_value(2),
     .sink_tokens = 128,
     .recent_tokens = 1,
     .tile_tokens = 128},
};

}  // namespace

double row_bits(const RowFormat& format, int code_bits) {
  return code_bits + 2.0 * 8 * metadata_bytes(format.metadata) / format.quant_group_size;
}

double bits_per_element(double row_bits, int64_t length, int64_t sink, int64_t recent) {
  if (length <= sink + recent) return 16.0;
  const double exact = 16.0 * static_cast<double>(sink + recent);
  const double coded = row_bits * static_cast<double>(length - sink - recent);
  return (exact + coded) / static_cast<double>(length);
}

std::span<const RivalFormat> rival_formats() { return kRivals; }

const RivalFormat* find_rival(std::string_view name) {
  const auto found = std::ranges::find_if(kRivals, [&](const auto& r) { return name == r.name; });
  return found == std::end(kRivals) ? nullptr : &*found;
}

bool is_exact_layer(const RivalFormat& rival, int layer, int num_layers) {
  const int count = std::min(rival.exact_layers, num_layers / 2);
  return layer < count || layer >= num_layers - count;
}

int mean_recent_tokens(const RivalFormat& rival) {
  return rival.recent_tokens + (rival.tile_tokens - 1) / 2;
}

}  // namespace oscar
