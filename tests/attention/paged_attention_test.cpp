// The paged engine on the CPU: its bytes against the codec, its outputs against the block-wise one.
#include "oscar/attention/paged_attention.h"

#include <gtest/gtest.h>
#include <cmath>
#include <cstring>

#include "attention/random_codec.h"
#include "oscar/base/error.h"
#include "oscar/cache/pages.h"
#include "oscar/cache/quantize_rows.h"

namespace {

using oscar::CacheModeKind;
using oscar::CacheView;
using oscar::Int2Attention;
using oscar::LayerCodec;
using oscar::PagedAttention;
using oscar::PagedMethod;
using oscar_test::random_codec;
using oscar_test::random_sequences;
using oscar_test::Sequences;

constexpr double kUnit = 1.0 / 256;  // largest relative error of rounding to bf16
constexpr double kScale = 0.125;

using Codecs = std::vector<std::shared_ptr<const LayerCodec>>;

PagedAttention reference_engine(const Codecs& codecs, const CacheView& view, int num_qo_heads) {
  PagedMethod method{"test", codecs, view, std::vector<int>(codecs.size(), 0), num_qo_heads};
  return PagedAttention(std::move(method), oscar::make_reference_ops());
}

torch::Tensor bf16_rounded(const torch::Tensor& x) {
  return x.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
}

// The bytes that the codec makes of one head's rows [tokens, d].
struct Bytes {
  std::vector<uint8_t> codes, metadata;
};
Bytes encode(const oscar::SideCodec& side, int64_t head, const torch::Tensor& rows) {
  const int64_t d = rows.size(1), tokens = rows.size(0);
  Bytes out;
  out.codes.resize(tokens * d / 4);
  out.metadata.resize(tokens * d / side.format.quant_group_size * 2 *
                      oscar::metadata_bytes(side.format.metadata));
  const auto contiguous = rows.contiguous();
  const auto status = quantize_rows(row_quantizer(side, head), contiguous.data_ptr<float>(), tokens,
                                    {out.codes.data(), out.metadata.data(), nullptr});
  EXPECT_EQ(status.status, oscar::RowStatus::kOk);
  return out;
}

// Every byte of the history and every exact row of a cache against the codec's and the bf16 rows.
// `rows` [batch, Hkv, tokens, d]: bf16-rounded, in the cache's basis.
void expect_bytes(PagedAttention& engine, const LayerCodec& codec, const torch::Tensor& k_rows,
                  const torch::Tensor& v_rows) {
  oscar::PagedCache& cache = engine.cache(0);
  const int64_t tokens = k_rows.size(2), heads = k_rows.size(1), d = k_rows.size(3);
  ASSERT_EQ(cache.length(), tokens);
  const int history = cache.history_at(tokens);
  ASSERT_GT(history, 2 * oscar::kPageTokens) << "this case would show nothing";
  const auto pages = cache.history();
  const auto windows = cache.windows();
  const auto& format = cache.format();
  for (int side = 0; side < 2; ++side) {
    const auto& side_codec = side ? codec.value : codec.key;
    const auto& rows = side ? v_rows : k_rows;
    const auto simulated = quantize_dequantize(side_codec, rows, "test");
    for (int64_t b = 0; b < rows.size(0); ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const Bytes bytes = encode(side_codec, h, rows[b][h].slice(0, windows.sink_tokens));
        const int code_bytes = code_row_bytes(format), meta_bytes = metadata_row_bytes(format);
        std::vector<float> row(d);
        for (int token = 0; token < history; ++token) {
          const int64_t page = page_of_token(pages, static_cast<int>(b), token);
          const uint8_t* page_data = pages.pool + (page * heads + h) * page_bytes(format);
          const int at = token % 64;
          ASSERT_EQ(memcmp(page_data + code_offset(format, side, at),
                           &bytes.codes[token * code_bytes], code_bytes),
                    0)
              << "codes, side " << side << ", token " << token;
          ASSERT_EQ(memcmp(page_data + metadata_offset(format, side, at),
                           &bytes.metadata[token * meta_bytes], meta_bytes),
                    0)
              << "metadata, side " << side << ", token " << token;
          oscar::dequantize_row(format, page_data, side, at, row.data());
          ASSERT_EQ(
              memcmp(row.data(), simulated[b][h][windows.sink_tokens + token].data_ptr<float>(),
                     d * sizeof(float)),
              0);
        }
        for (int64_t p = 0; p < tokens; ++p) {
          if (p >= windows.sink_tokens && p < windows.sink_tokens + history) continue;
          const auto* exact =
              (side ? windows.v : windows.k) +
              window_offset(windows, windows.slot[b], static_cast<int>(h), static_cast<int>(heads),
                            window_row(windows, static_cast<int>(p)), static_cast<int>(d));
          for (int64_t i = 0; i < d; ++i) {
            ASSERT_EQ(oscar::bf16_to_float(exact[i]), rows[b][h][p][i].item<float>()) << p;
          }
        }
      }
    }
  }
}

TEST(PagedAttention, PagesHoldTheCodecsBytesAndWindowsTheRoundedRows) {
  const c10::InferenceMode guard;
  torch::manual_seed(5);
  const auto in = random_sequences(3, 2, 2, 230, 16);
  for (const bool shaped : {false, true}) {
    for (const CacheView& view :
         {CacheView{.sink = 4, .recent = 20}, CacheView{.sink = 0, .recent = 9, .demote_block = 16},
          CacheView{.sink = 4, .recent = 20, .mode = CacheModeKind::kPrefill, .prompt = 180}}) {
      SCOPED_TRACE(testing::Message()
                   << "shaped " << shaped << ", sink " << view.sink << ", prompt " << view.prompt);
      const auto codec = random_codec(2, 16, {.shaped = shaped, .group = shaped ? 8 : 16});
      auto engine = reference_engine({codec}, view, 2);
      engine.attend(0, in.q, in.k, in.v, kScale);
      expect_bytes(engine, *codec, bf16_rounded(to_cache_basis(codec->key, in.k)),
                   bf16_rounded(to_cache_basis(codec->value, in.v)));
    }
  }
}

// Heads as a search may leave them, every pair of rounding and correction once: keys in the arrays
// that composed layers have, values without any.
std::shared_ptr<LayerCodec> mixed_codec(int64_t d) {
  using enum oscar::ScaleCorrection;
  const auto codec = random_codec(5, d, {.shaped = true, .group = d / 2});
  codec->key.recipe.scale_correction = {kMetric, kNone, kUnbiased, kNone, kMetric};
  for (const size_t plain : {2, 3, 4}) codec->key.recipe.rounding[plain] = oscar::Rounding::kPlain;
  for (const int64_t unread : {2, 3, 4}) codec->key.feedback[unread].fill_(7.0);
  for (const int64_t unread : {1, 2, 3}) codec->key.metric[unread].fill_(7.0);
  codec->value.recipe.scale_correction = {kNone, kUnbiased, kUnbiased, kNone, kUnbiased};
  codec->value.recipe.rounding.assign(5, oscar::Rounding::kPlain);
  codec->value.feedback = codec->value.metric = torch::Tensor();
  return codec;
}

TEST(PagedAttention, HeadsThatRoundAndCorrectInDifferentWaysGiveTheCodecsBytes) {
  const c10::InferenceMode guard;
  torch::manual_seed(11);
  const auto in = random_sequences(2, 5, 5, 230, 16);
  const auto codec = mixed_codec(16);
  const auto k = bf16_rounded(to_cache_basis(codec->key, in.k));
  const auto v = bf16_rounded(to_cache_basis(codec->value, in.v));
  // Each correction matters: without it some byte of its head would be another one.
  for (int64_t head = 0; head < 5; ++head) {
    for (const auto& [side, rows] : {std::pair{&codec->key, &k}, std::pair{&codec->value, &v}}) {
      auto uncorrected = *side;
      uncorrected.recipe.scale_correction.assign(5, oscar::ScaleCorrection::kNone);
      const bool equal = encode(*side, head, (*rows)[0][head]).metadata ==
                         encode(uncorrected, head, (*rows)[0][head]).metadata;
      EXPECT_EQ(equal, side->recipe[head].scale_correction == oscar::ScaleCorrection::kNone)
          << head;
    }
  }
  auto engine = reference_engine({codec}, {.sink = 4, .recent = 20}, 5);
  engine.attend(0, in.q, in.k, in.v, kScale);
  expect_bytes(engine, *codec, k, v);
}

TEST(PagedAttention, PagesAndSlotsAreNotInOrder) {
  oscar::PagedCache cache({.head_dim = 16, .rows = {.quant_group_size = 16}},
                          {.sink = 4, .recent = 20}, 1, {.batch = 8, .longest = 600}, torch::kCPU);
  const auto table = cache.history();
  const auto windows = cache.windows();
  int pages_in_order = 0, slots_in_order = 0;
  for (int i = 0; i < 8 * 9; ++i) pages_in_order += table.block_table[i] == i;
  for (int i = 0; i < 8; ++i) slots_in_order += windows.slot[i] == i;
  EXPECT_EQ(table.table_stride, 9);
  EXPECT_LT(pages_in_order, 8);
  EXPECT_LT(slots_in_order, 8);
}

// What the block-wise attention gives when queries and exact rows are rounded to bf16 before it:
// the paged engine differs from that by the rounding of its output and fp32 sums alone.
torch::Tensor rounded_simulation(const LayerCodec& codec, const CacheView& view,
                                 const Sequences& in, int64_t first_position) {
  const auto k = bf16_rounded(to_cache_basis(codec.key, in.k));
  const auto v = bf16_rounded(to_cache_basis(codec.value, in.v));
  const auto runs = oscar::segment_runs(codec.key, {0, first_position, view.sink}, k.size(2));
  return attend_cache_rows(view, bf16_rounded(to_query_basis(codec, in.q)),
                           {k, quantize_dequantize(codec.key, k, "k", runs), v,
                            quantize_dequantize(codec.value, v, "v")},
                           kScale);
}

TEST(PagedAttention, OutputsEqualBlockwiseAttentionOnRoundedRowsAtBoundaryLengths) {
  const c10::InferenceMode guard;
  torch::manual_seed(6);
  auto codec = random_codec(2, 32, {.shaped = true});
  // Outputs are compared as the cache gives them: in the values' basis, without means.
  codec->value.partner = torch::eye(32).repeat({2, 1, 1});
  codec->value.mean = torch::Tensor();
  const auto all = random_sequences(2, 6, 2, 450, 32);
  int64_t first_position = 0;
  const auto expect_equal = [&](const CacheView& view, int64_t tokens) {
    const auto part = [&](const torch::Tensor& t) { return t.slice(2, 0, tokens); };
    const Sequences in{part(all.q), part(all.k), part(all.v)};
    auto engine = reference_engine({codec}, view, 6);
    engine.set_first_position(first_position);
    const auto got = engine.attend(0, in.q, in.k, in.v, kScale);
    const auto expected = rounded_simulation(*codec, view, in, first_position);
    const auto excess = (got - expected).abs() - kUnit * expected.abs() - 1e-5;
    EXPECT_LE(excess.max().item<double>(), 0.0) << tokens << " tokens";
  };
  for (const int64_t tokens : {1, 63, 64, 65, 319, 320, 321, 383, 384, 385, 450}) {
    expect_equal({.sink = 64, .recent = 256}, tokens);
  }
  expect_equal({.sink = 64, .recent = 128, .demote_block = 32}, 450);
  expect_equal({.sink = 0, .recent = 1}, 200);
  const CacheView prefill{
      .sink = 64, .recent = 128, .mode = CacheModeKind::kPrefill, .prompt = 390};
  expect_equal(prefill, 450);
  expect_equal(prefill, 390);
  // Keys about the nearer of two centers, in the last of three segments from page 2 on.
  codec->key.centers = torch::randn({3, 2, 2, 32}).to(torch::kBFloat16).to(torch::kFloat32);
  first_position = 2048 - 64 - 128;
  expect_equal({.sink = 64, .recent = 128, .demote_block = 32}, 450);
  expect_equal(prefill, 450);
}

// Largest difference that rounding q', exact rows and the output to bf16 can make, per element.
// With u = kUnit every logit moves by at most D = sm_scale (2 u + u^2) max_j sum_i |q_i k_ji|, so a
// weight changes by a factor within exp(+-2 D), a value by 1 + u and the output by 1 + u:
// |o^ - o| <= (exp(2 D) (1 + u)^2 - 1) sum_j p_j |v_j|.
torch::Tensor rounding_bound(const LayerCodec& codec, const CacheView& view, const Sequences& in) {
  const int64_t tokens = in.q.size(2), group = in.q.size(1) / in.k.size(1);
  const auto k = to_cache_basis(codec.key, in.k), v = to_cache_basis(codec.value, in.v);
  const auto rows = [&](const torch::Tensor& t) {
    return t.to(torch::kFloat64).repeat_interleave(group, 1);
  };
  const auto q = to_query_basis(codec, in.q).to(torch::kFloat64);
  const auto k0 = rows(k), k2 = rows(quantize_dequantize(codec.key, k, "k"));
  const auto v0 = rows(v), v2 = rows(quantize_dequantize(codec.value, v, "v"));
  auto int2 = torch::zeros({tokens, tokens}, torch::kBool);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t end = std::min(int2_end(view, i), i + 1);
    if (end > view.sink) int2[i].slice(0, view.sink, end).fill_(true);
  }
  const auto future = torch::ones({tokens, tokens}, torch::kBool).triu(1);
  const auto times = [](const torch::Tensor& a, const torch::Tensor& b) {
    return torch::matmul(a, b.transpose(2, 3));
  };
  auto logits = torch::where(int2, times(q, k2), times(q, k0)) * kScale;
  auto size = torch::where(int2, times(q.abs(), k2.abs()), times(q.abs(), k0.abs())) * kScale;
  const auto p = logits.masked_fill(future, -INFINITY).softmax(-1);
  const auto moved = size.masked_fill(future, 0.0).amax(-1, true) * (2 * kUnit + kUnit * kUnit);
  const auto energy =
      torch::matmul(p * int2, v2.abs()) + torch::matmul(p * int2.logical_not(), v0.abs());
  const auto bound = ((2 * moved).exp() * (1 + kUnit) * (1 + kUnit) - 1) * energy;
  const auto back = codec.value.partner.to(torch::kFloat64).abs().repeat_interleave(group, 0);
  return torch::matmul(bound, back) + 1e-4;
}

TEST(PagedAttention, DiffersFromTheSimulationByRoundingAlone) {
  const c10::InferenceMode guard;
  torch::manual_seed(7);
  const CacheView view{.sink = 8, .recent = 40};
  for (const bool shaped : {false, true}) {
    const auto codec = random_codec(2, 64, {.shaped = shaped});
    const auto in = random_sequences(1, 4, 2, 300, 64);
    auto engine = reference_engine({codec}, view, 4);
    Int2Attention simulation({codec}, view, {0});
    const auto got = engine.attend(0, in.q, in.k, in.v, kScale).to(torch::kFloat64);
    const auto expected = simulation.attend(0, in.q, in.k, in.v, kScale).to(torch::kFloat64);
    const auto bound = rounding_bound(*codec, view, in);
    const auto difference = (got - expected).abs();
    EXPECT_LE((difference / bound).max().item<double>(), 1.0);
    EXPECT_GT((difference / bound).max().item<double>(), 1e-3) << "nothing was rounded";
  }
}

TEST(PagedAttention, ACacheThatGrowsCallByCallHoldsWhatOneCallWrites) {
  const c10::InferenceMode guard;
  torch::manual_seed(8);
  const auto codec = random_codec(2, 16, {.identity = true});
  const auto in = random_sequences(2, 4, 2, 150, 16);
  for (const auto mode : {CacheModeKind::kDecode, CacheModeKind::kPrefill}) {
    const CacheView view{.sink = 4, .recent = 20, .mode = mode, .prompt = 100};
    auto whole = reference_engine({codec}, view, 4);
    const auto expected = whole.attend(0, in.q, in.k, in.v, kScale);
    auto growing = reference_engine({codec, codec}, view, 4);
    for (int repeat = 0; repeat < 2; ++repeat) {
      growing.keep_cache(150);
      for (int64_t begin = 0; begin < 150; begin = begin == 0 ? 100 : begin + 1) {
        const int64_t end = begin == 0 ? 100 : begin + 1;
        const auto part = [&](const torch::Tensor& t) { return t.slice(2, begin, end); };
        for (int layer = 0; layer < 2; ++layer) {
          const auto got = growing.attend(layer, part(in.q), part(in.k), part(in.v), kScale);
          ASSERT_LT((got - part(expected)).abs().max().item<double>(), 1e-6) << begin;
        }
      }
    }
  }
}

TEST(PagedAttention, ASmallerBatchInUsedMemoryGivesTheRowsOfAFreshEngine) {
  const c10::InferenceMode guard;
  torch::manual_seed(9);
  const auto codec = random_codec(2, 16, {.identity = true});
  const CacheView view{.sink = 4, .recent = 20};
  const auto large = random_sequences(3, 4, 2, 300, 16), small = random_sequences(2, 4, 2, 170, 16);
  auto used = reference_engine({codec}, view, 4), fresh = reference_engine({codec}, view, 4);
  used.attend(0, large.q, large.k, large.v, kScale);
  const auto got = used.attend(0, small.q, small.k, small.v, kScale);
  EXPECT_TRUE(torch::equal(got, fresh.attend(0, small.q, small.k, small.v, kScale)));
}

TEST(PagedAttention, LayersWithoutCodecRunExactly) {
  const c10::InferenceMode guard;
  torch::manual_seed(10);
  const auto codec = random_codec(2, 16, {});
  const auto in = random_sequences(1, 4, 2, 90, 16);
  auto engine = reference_engine({nullptr, codec}, {.sink = 4, .recent = 20}, 4);
  Int2Attention exact({nullptr}, {.sink = 4, .recent = 20}, {0});
  EXPECT_FALSE(engine.quantizes(0));
  EXPECT_TRUE(torch::equal(engine.attend(0, in.q, in.k, in.v, kScale),
                           exact.attend(0, in.q, in.k, in.v, kScale)));
}

std::string refusal(const Codecs& codecs, const CacheView& view, std::vector<int> windows) {
  try {
    PagedAttention(PagedMethod{"asked", codecs, view, std::move(windows), 4},
                   oscar::make_reference_ops());
  } catch (const oscar::Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(PagedAttention, WhatPagesCanNotHoldIsRefusedWithTheWayOut) {
  const auto refused = [&](const std::shared_ptr<LayerCodec>& codec, const CacheView& view,
                           int window, const std::string& word) {
    const std::string text = refusal({nullptr, codec}, view, {0, window});
    EXPECT_NE(text.find(word), std::string::npos) << text;
    EXPECT_NE(text.find("--engine simulate"), std::string::npos) << text;
  };
  const auto codec = [] { return random_codec(2, 16, {}); };
  const CacheView view{.sink = 4, .recent = 20};
  EXPECT_EQ(refusal({nullptr, codec()}, view, {0, 0}), "accepted");
  refused(codec(), view, 100, "layer 1");
  refused(codec(), {.mode = CacheModeKind::kChunked, .prefill_chunk = 64}, 0, "chunked:64");
  auto changed = codec();
  changed->int2_keys = false;
  refused(changed, view, 0, "exact keys");
  changed = codec();
  changed->int2_values = false;
  refused(changed, view, 0, "exact values");
  refused(changed, view, 0, "method 'asked', layer 1");
}

TEST(PagedAttention, RowsThatAreNotFiniteAreRefusedByLayer) {
  const c10::InferenceMode guard;
  const auto codec = random_codec(1, 16, {.identity = true});
  auto in = random_sequences(1, 1, 1, 60, 16);
  in.k[0][0][10][3] = INFINITY;
  auto engine = reference_engine({codec}, {.sink = 4, .recent = 20}, 1);
  try {
    engine.attend(0, in.q, in.k, in.v, kScale);
    FAIL() << "accepted";
  } catch (const oscar::Error& error) {
    EXPECT_NE(std::string(error.what()).find("layer 0"), std::string::npos) << error.what();
  }
}

}  // namespace
