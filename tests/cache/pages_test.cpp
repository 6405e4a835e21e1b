#include "oscar/cache/pages.h"

#include <gtest/gtest.h>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cache/transform_case.h"
#include "oscar/cache/quantize_rows.h"

// The paged CPU cache against a flat one: appending in any split gives the same bytes and outputs.

namespace {

constexpr int kHeads = 2, kSink = 4, kRecent = 10;

// One request whose cache grows by append calls.
struct Cache {
  oscar::PageFormat format;
  int demote_block;
  std::vector<uint8_t> pool;
  std::vector<uint16_t> wk, wv;
  std::vector<int32_t> indices;
  int32_t len = 0, history = 0;
  int32_t written = 0;  // INT2 tokens that have a page
  bool ahead = false;   // pages are written once they are full, however exact their rows stay
  int ring;
  oscar::KeyCenters centers = {};
  float clip_k = .96f;

  Cache(oscar::PageFormat f, int block, int max_append)
      : format(f), demote_block(block), ring(kRecent + block + max_append) {
    indices = {5, 2, 7, 0, 3, 1, 6, 4};  // shuffled pages
    pool.assign(indices.size() * kHeads * page_bytes(f), 0xff);
    wk.assign(kHeads * (kSink + ring) * f.head_dim, 0x7fc0);  // NaN until written
    wv = wk;
  }
  oscar::PagedHistory pages() {
    return {pool.data(), indices.data(), static_cast<int64_t>(indices.size()), &history};
  }
  oscar::ExactWindows windows() { return {wk.data(), wv.data(), nullptr, kSink, ring}; }

  void append(const uint16_t* k, const uint16_t* v, int count) {
    const int32_t rows[2] = {0, count};
    const int32_t old_len = len, old_written = written;
    const int32_t now = oscar::history_for_length(len + count, kSink, kRecent, demote_block);
    const int32_t full = std::max(0, len + count - kSink) / oscar::kPageTokens * oscar::kPageTokens;
    const int32_t now_written = ahead ? std::max(now, full) : now;
    oscar::AppendParams p{.format = format,
                          .history = pages(),
                          .windows = windows(),
                          .centers = centers,
                          .k = oscar::contiguous_rows(k, kHeads, format.head_dim),
                          .v = oscar::contiguous_rows(v, kHeads, format.head_dim),
                          .query_start_loc = rows,
                          .old_len = &old_len,
                          .old_history = &old_written,
                          .new_history = &now_written,
                          .read_history = ahead ? &now : nullptr,
                          .key = {.clip_ratio = clip_k},
                          .value = {.clip_ratio = .92f},
                          .batch = 1,
                          .num_kv_heads = kHeads};
    ASSERT_EQ(append_ref(p), oscar::RowStatus::kOk);
    len += count;
    history = now;
    written = now_written;
  }
};

std::vector<uint16_t> random_rows(int count, int seed, float sigma = 1.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<uint16_t> rows(count);
  for (uint16_t& value : rows) value = oscar::float_to_bf16(normal(rng));
  return rows;
}

TEST(PageLayout, PageOfTheDefaultFormatIs72BytesPerTokenAndHead) {
  EXPECT_EQ(oscar::page_bytes({}), 4608);
  EXPECT_EQ(oscar::page_bytes({.head_dim = 64, .rows = {.quant_group_size = 64}}), 64 * 40);
  EXPECT_EQ(oscar::page_bytes({.rows = {.metadata = oscar::MetadataDtype::kFp32}}), 5120);
  EXPECT_EQ(oscar::page_bytes({.rows = {.quant_group_size = 64}}), 5120);
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
  const oscar::PageFormat format{.head_dim = 64, .rows = {.quant_group_size = 64}};
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

TEST(PagedAppend, RowsThatHaveAPageAlreadyStayInTheWindowsAsLongAsOthers) {
  const oscar::PageFormat format{.head_dim = 64, .rows = {.quant_group_size = 64}};
  const int total = 300, step = kHeads * 64;
  const auto k = random_rows(total * step, 1), v = random_rows(total * step, 2);
  Cache plain(format, 4, 4), ahead(format, 4, 4);
  ahead.ahead = true;
  const auto page = static_cast<int64_t>(kHeads) * page_bytes(format);
  const auto same_page = [&](int index) {
    return std::equal(&plain.pool[page * plain.indices[index]],
                      &plain.pool[page * plain.indices[index]] + page,
                      &ahead.pool[page * ahead.indices[index]]);
  };
  for (int count = 90; plain.len + count <= total; count = 1 + plain.len % 4) {
    const int row = plain.len * step;
    plain.append(&k[row], &v[row], count);
    ahead.append(&k[row], &v[row], count);
    EXPECT_EQ(ahead.wk, plain.wk) << "with tokens " << plain.len;
    EXPECT_EQ(ahead.wv, plain.wv) << "with tokens " << plain.len;
    EXPECT_EQ(ahead.written, std::max(plain.history, (plain.len - kSink) / oscar::kPageTokens *
                                                         oscar::kPageTokens));
  }
  EXPECT_EQ(plain.history / oscar::kPageTokens, 4);
  for (int index = 0; index < 4; ++index) EXPECT_TRUE(same_page(index)) << "page " << index;
}

class PagedAttention : public testing::TestWithParam<int> {};

TEST_P(PagedAttention, EqualsAttentionOverTheFlatDequantizedRows) {
  const int total = GetParam(), d = 64, q_len = std::min(3, total), qo_heads = 6;
  const oscar::PageFormat format{.head_dim = d, .rows = {.quant_group_size = d}};
  const auto k = random_rows(total * kHeads * d, 3), v = random_rows(total * kHeads * d, 4);
  const auto q = random_rows(q_len * qo_heads * d, 5, 3.0f);
  Cache cache(format, 4, 4);
  cache.append(k.data(), v.data(), total);
  const int32_t seq_len = total;
  const oscar::AttentionParams p{.format = format,
                                 .history = cache.pages(),
                                 .windows = cache.windows(),
                                 .seq_lens = &seq_len,
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
  const oscar::PageFormat format{.head_dim = 64, .rows = {.quant_group_size = 64}};
  Cache cache(format, 1, 1);
  const auto q = random_rows(2 * 64, 6);
  const int32_t seq_len = 0;
  const oscar::AttentionParams p{.format = format,
                                 .history = cache.pages(),
                                 .windows = cache.windows(),
                                 .seq_lens = &seq_len,
                                 .q = q.data(),
                                 .batch = 1,
                                 .num_qo_heads = 2,
                                 .num_kv_heads = kHeads};
  std::vector<double> o(2 * 64, 7.0), lse(2);
  decode_attention_ref(p, o.data(), lse.data());
  for (const double value : o) EXPECT_EQ(value, 0.0);
  EXPECT_EQ(lse[0], -std::numeric_limits<double>::infinity());
}

constexpr int kCenteredDim = 64;

// Tables of centers far apart, and rows of noise around them.
struct Centered {
  static constexpr int kRow = kHeads * kCenteredDim, kSegments = 3;
  oscar::PageFormat format;
  std::vector<uint16_t> table = random_rows(kSegments * 2 * kRow, 21, 8.0f);
  int32_t first_position = 1800;  // pages before 2048, after it, and after 3072 (none)

  oscar::KeyCenters centers(int segments = kSegments) const {
    return {table.data(), segments, &first_position};
  }
  // The center that position `position` of the history has, as the definition says it in words.
  const uint16_t* center(int segments, int position, int head, int which) const {
    const int middle = first_position + kSink + (position - kSink) / 64 * 64 + 32;
    const int segment = std::min(middle / 1024, segments - 1);
    return &table[((segment * kHeads + head) * 2 + which) * kCenteredDim];
  }
  // Keys of positions [0, total), each the nearer of its centers plus noise.
  std::vector<uint16_t> keys(int segments, int total, float noise) const {
    std::vector<uint16_t> k = random_rows(total * kRow, 22, noise);
    for (int i = 0; i < total * kRow; ++i) {
      const int position = i / kRow, head = i / kCenteredDim % kHeads, dim = i % kCenteredDim;
      const uint16_t* o = center(segments, std::max(position, kSink), head, position % 3 == 0);
      k[i] = oscar::float_to_bf16(oscar::bf16_to_float(k[i]) + oscar::bf16_to_float(o[dim]));
    }
    return k;
  }
};

class PagedCenters : public testing::TestWithParam<oscar::MetadataDtype> {
 protected:
  Centered centered{.format = {.head_dim = kCenteredDim,
                               .rows = {.quant_group_size = 32, .metadata = GetParam()}}};

  const uint8_t* page_data(const Cache& cache, int token, int head) const {
    return &cache.pool[(cache.indices[token / 64] * kHeads + head) * page_bytes(cache.format)];
  }
  int stored_center(const Cache& cache, int token, int head) const {
    const uint8_t* at =
        page_data(cache, token, head) + metadata_offset(cache.format, 0, token % 64);
    return oscar::center_of_scale(load_metadata(at, 0, cache.format.rows.metadata));
  }
};

TEST_P(PagedCenters, RowsComeBackAroundTheCenterOfTheirSegment) {
  const int total = 420;
  for (const int segments : {2, 3}) {  // 2: positions from 2048 on belong to the last one
    const auto k = centered.keys(segments, total, 0.3f),
               v = random_rows(total * Centered::kRow, 23);
    Cache cache(centered.format, 1, 4);
    cache.centers = centered.centers(segments), cache.clip_k = 0.0f;
    cache.append(k.data(), v.data(), total);
    std::vector<float> row(kCenteredDim);
    for (int token = 0; token < cache.history; ++token) {
      const int position = kSink + token;
      for (int head = 0; head < kHeads; ++head) {
        ASSERT_EQ(stored_center(cache, token, head), position % 3 == 0);
        const uint16_t* o = centered.center(segments, position, head, position % 3 == 0);
        const uint8_t* at = page_data(cache, token, head);
        dequantize_row(cache.format, at, 0, token % 64, row.data());
        const uint8_t* metadata = at + metadata_offset(cache.format, 0, token % 64);
        for (int i = 0; i < kCenteredDim; ++i) {
          const float scale = std::fabs(load_metadata(metadata, i / 32 * 2, GetParam()));
          const float z = oscar::bf16_to_float(k[(position * kHeads + head) * kCenteredDim + i]);
          // Half a step, what rounding the zero moves, and z - o in bf16.
          ASSERT_NEAR(row[i] + oscar::bf16_to_float(o[i]), z, 0.52f * scale + 0.01f);
        }
      }
    }
  }
}

TEST_P(PagedCenters, OfZerosGiveTheBytesWithoutAny) {
  const int total = 300;
  const auto k = random_rows(total * Centered::kRow, 24),
             v = random_rows(total * Centered::kRow, 25);
  const std::vector<uint16_t> zeros(centered.table.size(), 0);
  Cache plain(centered.format, 1, 4), around_zero(centered.format, 1, 4);
  around_zero.centers = {zeros.data(), Centered::kSegments, nullptr};
  plain.append(k.data(), v.data(), total);
  around_zero.append(k.data(), v.data(), total);
  EXPECT_EQ(plain.pool, around_zero.pool);
  for (int token = 0; token < plain.history; ++token) EXPECT_EQ(stored_center(plain, token, 0), 0);
}

TEST_P(PagedCenters, AttentionIsThatOverRowsWithTheirCentersAdded) {
  const int total = 420, qo_heads = 4, d = kCenteredDim, segments = Centered::kSegments;
  const auto k = centered.keys(segments, total, 0.3f), v = random_rows(total * Centered::kRow, 23);
  const auto q = random_rows(qo_heads * d, 26, 0.2f);
  Cache cache(centered.format, 1, 4);
  cache.centers = centered.centers();
  cache.append(k.data(), v.data(), total);
  const int32_t seq_len = total;
  const oscar::AttentionParams p{.format = cache.format,
                                 .history = cache.pages(),
                                 .windows = cache.windows(),
                                 .centers = cache.centers,
                                 .seq_lens = &seq_len,
                                 .q = q.data(),
                                 .sm_scale = 0.125f,
                                 .batch = 1,
                                 .num_qo_heads = qo_heads,
                                 .num_kv_heads = kHeads};
  std::vector<double> o(q.size()), lse(qo_heads);
  std::vector<float> o32(q.size()), lse32(qo_heads);
  decode_attention_ref(p, o.data(), lse.data());
  decode_attention_ref(p, o32.data(), lse32.data());
  for (int qo = 0; qo < qo_heads; ++qo) {
    const int head = qo / (qo_heads / kHeads);
    std::vector<double> expected(d, 0.0), logits(total);
    std::vector<std::vector<float>> values(total, std::vector<float>(d));
    double largest = -1e30, sum = 0.0;
    for (int position = 0; position < total; ++position) {
      const int token = position - kSink;
      std::vector<float> key(d);
      for (int i = 0; i < d; ++i) {
        key[i] = oscar::bf16_to_float(k[(position * kHeads + head) * d + i]);
        values[position][i] = oscar::bf16_to_float(v[(position * kHeads + head) * d + i]);
      }
      const uint16_t* center = nullptr;
      if (token >= 0 && token < cache.history) {
        dequantize_row(cache.format, page_data(cache, token, head), 0, token % 64, key.data());
        dequantize_row(cache.format, page_data(cache, token, head), 1, token % 64,
                       values[position].data());
        center = centered.center(segments, position, head, stored_center(cache, token, head));
      }
      for (int i = 0; i < d; ++i) {
        const double whole = double{key[i]} + (center ? oscar::bf16_to_float(center[i]) : 0.0);
        logits[position] += 0.125 * oscar::bf16_to_float(q[qo * d + i]) * whole;
      }
      largest = std::max(largest, logits[position]);
    }
    for (int position = 0; position < total; ++position) {
      const double weight = std::exp(logits[position] - largest);
      sum += weight;
      for (int i = 0; i < d; ++i) expected[i] += weight * values[position][i];
    }
    for (int i = 0; i < d; ++i) {
      ASSERT_NEAR(o[qo * d + i], expected[i] / sum, 1e-9);
      ASSERT_NEAR(o32[qo * d + i], expected[i] / sum, 1e-4);
    }
    ASSERT_NEAR(lse[qo], largest + std::log(sum), 1e-9);
    ASSERT_NEAR(lse32[qo], largest + std::log(sum), 1e-4);
  }
}
TEST_P(PagedCenters, RowsReadBackAreTheDequantizedOnesWithTheirCentersAdded) {
  const int total = 420, d = kCenteredDim, first = 30, tokens = 500;
  const auto k = centered.keys(Centered::kSegments, total, 0.3f);
  const auto v = random_rows(total * Centered::kRow, 23);
  Cache cache(centered.format, 1, 4);
  cache.centers = centered.centers();
  cache.append(k.data(), v.data(), total);
  const size_t count = static_cast<size_t>(tokens) * kHeads * d;
  std::vector<float> keys(count, 7.0f), values(count, 7.0f);
  std::vector<uint16_t> keys16(count, 9), values16(count, 9);
  oscar::HistoryRowsParams p{.format = cache.format,
                             .history = cache.pages(),
                             .centers = cache.centers,
                             .sink_tokens = kSink,
                             .k = {keys.data(), 0, kHeads * d, d},
                             .v = {values.data(), 0, d, tokens * d},  // by head
                             .bf16 = false,
                             .first_token = first,
                             .tokens = tokens,
                             .batch = 1,
                             .num_kv_heads = kHeads};
  dequantize_history_ref(p);
  p.bf16 = true, p.k.data = keys16.data(), p.v.data = values16.data();
  dequantize_history_ref(p);
  std::vector<float> row(d);
  for (int at = 0; at < tokens; ++at) {
    const int token = first + at;
    for (int head = 0; head < kHeads; ++head) {
      for (int side = 0; side < 2; ++side) {
        const bool there = token < cache.history;
        const int64_t to = side ? (head * tokens + at) * d : (at * kHeads + head) * d;
        if (there) {
          dequantize_row(cache.format, page_data(cache, token, head), side, token % 64, row.data());
        }
        for (int i = 0; i < d; ++i) {
          float expected = there ? row[i] : 7.0f;
          if (there && side == 0) {
            expected += oscar::bf16_to_float(centered.center(
                Centered::kSegments, kSink + token, head, stored_center(cache, token, head))[i]);
          }
          ASSERT_EQ((side ? values : keys)[to + i], expected) << token;
          ASSERT_EQ((side ? values16 : keys16)[to + i], there ? oscar::float_to_bf16(expected) : 9)
              << token;
        }
      }
    }
  }
}

TEST(PagedAttention, OfAnUnusedPlaceOfTheBatchNothingElseIsRead) {
  const oscar::PageFormat format{.head_dim = 64, .rows = {.quant_group_size = 64}};
  Cache cache(format, 1, 1);
  const auto q = random_rows(2 * 2 * 64, 6);
  const int32_t seq_len = 0, history = 1 << 30;
  const oscar::AttentionParams p{.format = format,
                                 .history = {cache.pool.data(), nullptr, 0, &history},
                                 .windows = cache.windows(),
                                 .seq_lens = &seq_len,
                                 .q = q.data(),
                                 .batch = 1,
                                 .q_len = 2,
                                 .num_qo_heads = 2,
                                 .num_kv_heads = kHeads};
  std::vector<float> o(q.size(), 7.0f), lse(4);
  decode_attention_ref(p, o.data(), lse.data());
  for (const float value : o) EXPECT_EQ(value, 0.0f);
  for (const float value : lse) EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
}

INSTANTIATE_TEST_SUITE_P(Metadata, PagedCenters,
                         testing::Values(oscar::MetadataDtype::kFp16, oscar::MetadataDtype::kBf16,
                                         oscar::MetadataDtype::kFp32));

}  // namespace

// Rows in and out of the cache's basis against float64 loops.

namespace {

using oscar_test::TransformCase;

class Transform : public testing::TestWithParam<TransformCase> {};

TEST_P(Transform, EqualsFloat64UpToTheRoundingOfItsOutput) {
  oscar_test::TransformSetup setup(GetParam());
  transform_ref(setup.params());
  setup.expect_outputs();
}
INSTANTIATE_TEST_SUITE_P(Shapes, Transform, testing::ValuesIn(oscar_test::transform_cases()));

TEST(TransformOrder, VectorsAreRowsAndHeadsOfAGroupShareAMatrix) {
  // Two KV heads of two heads each. The first matrix moves entry 0 to place 1, the second doubles.
  constexpr int d = 8;
  std::vector<float> matrix(2 * d * d, 0.0f), before(2 * d, 0.0f), after(2 * d, 0.0f);
  matrix[1] = 1.0f;
  for (int i = 0; i < d; ++i) matrix[d * d + i * d + i] = 2.0f;
  before[d] = 1.0f, after[1] = 10.0f;
  std::vector<uint16_t> x(4 * d, oscar::float_to_bf16(3.0f)), out(4 * d);
  oscar::TransformParams p{.num_tensors = 1, .rows = 1, .num_kv_heads = 2, .head_dim = d};
  p.tensors[0] = {.x = oscar::contiguous_rows(x.data(), 4, d),
                  .out = out.data(),
                  .matrix = matrix.data(),
                  .subtracted = before.data(),
                  .added = after.data(),
                  .num_heads = 4};
  transform_ref(p);
  for (int head = 0; head < 4; ++head) {
    for (int i = 0; i < d; ++i) {
      const float expected = head < 2 ? (i == 1 ? 13.0f : 0.0f) : i == 0 ? 4.0f : 6.0f;
      EXPECT_EQ(oscar::bf16_to_float(out[head * d + i]), expected) << head << " " << i;
    }
  }
}

}  // namespace
