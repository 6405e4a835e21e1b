// The paged CPU cache against a flat one: appending in any split gives the same bytes and outputs.
#include "oscar/cache/paged_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "oscar/cache/quantize_rows.h"

namespace {

constexpr int kHeads = 2, kSink = 4, kRecent = 10;

// One request whose cache grows by append calls.
struct Cache {
  oscar::PageFormat format;
  int demote_block;
  std::vector<uint8_t> pool;
  std::vector<uint16_t> wk, wv;
  std::vector<int32_t> indices;
  int len = 0, history = 0;
  int ring;

  Cache(oscar::PageFormat f, int block, int max_append)
      : format(f), demote_block(block), ring(kRecent + block + max_append) {
    indices = {5, 2, 7, 0, 3, 1, 6, 4};  // shuffled pages
    pool.assign(indices.size() * kHeads * chunk_bytes(f), 0xff);
    wk.assign(kHeads * (kSink + ring) * f.head_dim, 0x7fc0);  // NaN until written
    wv = wk;
  }
  oscar::ExactWindows windows() { return {wk.data(), wv.data(), nullptr, kSink, ring}; }

  void append(const uint16_t* k, const uint16_t* v, int count) {
    const int32_t rows[2] = {0, count};
    const int32_t old_len = len, old_history = history;
    const int32_t now = oscar::history_for_length(len + count, kSink, kRecent, demote_block);
    const int32_t pages = (now + 63) / 64;
    const int32_t indptr[2] = {0, pages}, last[1] = {now - (pages - 1) * 64};
    oscar::AppendParams p{.format = format,
                          .history = {pool.data(), indptr, indices.data(), last},
                          .windows = windows(),
                          .k = k,
                          .v = v,
                          .rows_indptr = rows,
                          .old_len = &old_len,
                          .old_history = &old_history,
                          .new_history = &now,
                          .key = {.clip_ratio = .96f},
                          .value = {.clip_ratio = .92f},
                          .batch = 1,
                          .num_kv_heads = kHeads};
    ASSERT_EQ(append_ref(p), oscar::RowStatus::kOk);
    len += count;
    history = now;
  }
};

std::vector<uint16_t> random_rows(int count, int seed, float sigma = 1.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<uint16_t> rows(count);
  for (uint16_t& value : rows) value = oscar::float_to_bf16(normal(rng));
  return rows;
}

TEST(PageLayout, ChunkOfTheDefaultFormatIs72BytesPerTokenAndHead) {
  EXPECT_EQ(oscar::chunk_bytes({}), 4608);
  EXPECT_EQ(oscar::chunk_bytes({.head_dim = 64, .quant_group_size = 64}), 64 * 40);
  EXPECT_EQ(oscar::chunk_bytes({.metadata = oscar::MetadataDtype::kFp32}), 5120);
  EXPECT_EQ(oscar::chunk_bytes({.quant_group_size = 64}), 5120);
  EXPECT_EQ(oscar::code_offset({}, 1, 3), 2048 + 96);
  EXPECT_EQ(oscar::metadata_offset({}, 1, 3), 4096 + 256 + 12);
}

TEST(PageLayout, HistoryGrowsByWholeDemoteBlocks) {
  EXPECT_EQ(oscar::history_for_length(320, 64, 256, 1), 0);
  EXPECT_EQ(oscar::history_for_length(321, 64, 256, 1), 1);
  EXPECT_EQ(oscar::history_for_length(383, 64, 256, 64), 0);
  EXPECT_EQ(oscar::history_for_length(384, 64, 256, 64), 64);
  EXPECT_EQ(oscar::history_for_length(3, 64, 256, 64), 0);
}

TEST(PagedAppend, AnySplitOfTheTokensGivesTheSameHistoryBytes) {
  const oscar::PageFormat format{.head_dim = 64, .quant_group_size = 64};
  const int total = 300;
  const auto k = random_rows(total * kHeads * 64, 1), v = random_rows(total * kHeads * 64, 2);
  Cache whole(format, 1, 4), single(format, 1, 4), mixed(format, 1, 4);
  whole.append(k.data(), v.data(), total);
  const auto grow = [&](Cache& cache, int count) {
    cache.append(&k[cache.len * kHeads * 64], &v[cache.len * kHeads * 64], count);
  };
  while (single.len < total) grow(single, 1);
  grow(mixed, 7);
  while (mixed.len + 4 <= total - 9) grow(mixed, 1 + mixed.len % 4);
  while (mixed.len < total) grow(mixed, 1);
  EXPECT_EQ(whole.history, total - kSink - kRecent);
  EXPECT_EQ(whole.pool, single.pool);
  EXPECT_EQ(whole.pool, mixed.pool);
}

class PagedAttention : public testing::TestWithParam<int> {};

TEST_P(PagedAttention, EqualsAttentionOverTheFlatDequantizedRows) {
  const int total = GetParam(), d = 64, q_len = std::min(3, total), qo_heads = 6;
  const oscar::PageFormat format{.head_dim = d, .quant_group_size = d};
  const auto k = random_rows(total * kHeads * d, 3), v = random_rows(total * kHeads * d, 4);
  const auto q = random_rows(q_len * qo_heads * d, 5, 3.0f);
  Cache cache(format, 4, 4);
  cache.append(k.data(), v.data(), total);
  const int32_t pages = (cache.history + 63) / 64;
  const int32_t indptr[2] = {0, pages}, last[1] = {cache.history - (pages - 1) * 64};
  const int32_t seq_len = total;
  const oscar::AttentionParams p{.format = format,
                                 .history = {cache.pool.data(), indptr, cache.indices.data(), last},
                                 .windows = cache.windows(),
                                 .seq_len = &seq_len,
                                 .q = q.data(),
                                 .sm_scale = 0.125f,
                                 .batch = 1,
                                 .q_len = q_len,
                                 .num_qo_heads = qo_heads,
                                 .num_kv_heads = kHeads};
  std::vector<double> o(q.size()), lse(q_len * qo_heads);
  std::vector<float> o32(q.size()), lse32(q_len * qo_heads);
  decode_attention_ref(p, o.data(), lse.data());
  decode_attention_ref(p, o32.data(), lse32.data());

  // A flat cache, dequantized row by row straight from the codec.
  std::vector<float> flat[2] = {std::vector<float>(k.size()), std::vector<float>(v.size())};
  for (int side = 0; side < 2; ++side) {
    for (int row = 0; row < total * kHeads; ++row) {
      const int position = row / kHeads;
      std::vector<float> x(d);
      for (int i = 0; i < d; ++i) x[i] = oscar::bf16_to_float((side ? v : k)[row * d + i]);
      float* to = &flat[side][row * d];
      if (position >= kSink && position < kSink + cache.history) {
        const oscar::RowQuantizer quantizer{.head_dim = d,
                                            .format = {.quant_group_size = d},
                                            .recipe = {.clip_ratio = side ? .92f : .96f}};
        quantize_rows_ref(quantizer, x.data(), 1, {nullptr, nullptr, to});
      } else {
        std::copy(x.begin(), x.end(), to);
      }
    }
  }
  for (int query = 0; query < q_len; ++query) {
    for (int head = 0; head < qo_heads; ++head) {
      const int kv = head / 3, visible = total - q_len + query + 1;
      const int index = query * qo_heads + head;
      std::vector<double> expected(d, 0.0);
      double sum = 0.0;
      for (int t = 0; t < visible; ++t) {
        double dot = 0.0;
        for (int i = 0; i < d; ++i) {
          dot += static_cast<double>(oscar::bf16_to_float(q[index * d + i])) *
                 flat[0][(t * kHeads + kv) * d + i];
        }
        const double weight = std::exp(dot * 0.125);
        sum += weight;
        for (int i = 0; i < d; ++i) expected[i] += weight * flat[1][(t * kHeads + kv) * d + i];
      }
      for (int i = 0; i < d; ++i) {
        ASSERT_NEAR(o[index * d + i], expected[i] / sum, 1e-9);
        ASSERT_NEAR(o32[index * d + i], expected[i] / sum, 2e-5);
      }
      ASSERT_NEAR(lse[index], std::log(sum), 1e-9);
      ASSERT_NEAR(lse32[index], std::log(sum), 1e-4);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Lengths, PagedAttention,
                         testing::Values(1, 3, 4, 5, 14, 15, 17, 18, 78, 82, 83, 150));

TEST(PagedAttention, WithoutKeysGivesZerosAndMinusInfinity) {
  const oscar::PageFormat format{.head_dim = 64, .quant_group_size = 64};
  Cache cache(format, 1, 1);
  const auto q = random_rows(2 * 64, 6);
  const int32_t indptr[2] = {0, 0}, last[1] = {0}, seq_len = 0;
  const oscar::AttentionParams p{.format = format,
                                 .history = {cache.pool.data(), indptr, cache.indices.data(), last},
                                 .windows = cache.windows(),
                                 .seq_len = &seq_len,
                                 .q = q.data(),
                                 .batch = 1,
                                 .num_qo_heads = 2,
                                 .num_kv_heads = kHeads};
  std::vector<double> o(2 * 64, 7.0), lse(2);
  decode_attention_ref(p, o.data(), lse.data());
  for (const double value : o) EXPECT_EQ(value, 0.0);
  EXPECT_EQ(lse[0], -std::numeric_limits<double>::infinity());
}

}  // namespace
