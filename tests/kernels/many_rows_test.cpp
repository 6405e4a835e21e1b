// Many random rows written by the GPU and by the CPU codec, compared byte for byte.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "cache/codec_ref.h"
#include "kernels/device_memory.h"
#include "oscar/cache/pages.h"
#include "oscar/cache/quantize_rows.h"
#include "oscar_kernels/append.h"
#include "support/slowed.h"

namespace {

using oscar_test::DeviceBuffer;

constexpr int kDim = 128, kHeads = 8;
const int kPages = oscar_test::unless_slowed(256, 16);  // 16: of each head more than a thread block
const int kTokens = kPages * oscar::kPageTokens;
const int64_t kRowsPerRound = 2LL * kHeads * kTokens;

// OSCAR_TEST_ROWS=10000000 for the full count; a modest one otherwise.
int rounds() {
  const char* text = std::getenv("OSCAR_TEST_ROWS");
  const int64_t rows = text ? std::atoll(text) : kRowsPerRound;
  return static_cast<int>(std::max<int64_t>(1, (rows + kRowsPerRound - 1) / kRowsPerRound));
}

void on_all_cores(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> pool;
  for (int64_t t = 0; t < threads; ++t) {
    pool.emplace_back(work, count * t / threads, count * (t + 1) / threads);
  }
  for (std::thread& thread : pool) thread.join();
}

struct Random {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  float normal() {  // nearly: the sum of four uniform values
    const uint64_t x = next();
    const float sum = static_cast<float>(x & 0xffff) + static_cast<float>(x >> 16 & 0xffff) +
                      static_cast<float>(x >> 32 & 0xffff) + static_cast<float>(x >> 48);
    return (sum / 65536.0f - 2.0f) * 1.7320508f;
  }
};

// Rows of many sizes and shapes; one in eight is odd: outliers, few values, a tiny range, zeros.
void random_rows(std::vector<uint16_t>& x, uint64_t seed) {
  on_all_cores(static_cast<int64_t>(x.size()) / kDim, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      Random rng{seed * 0x100000001b3u + row};
      const float scale = std::exp2(2.0f * rng.normal()), shift = 0.3f * rng.normal();
      const uint64_t kind = rng.next() % 64;
      for (int i = 0; i < kDim; ++i) {
        float value = scale * (rng.normal() + shift);
        if (kind == 0 && rng.next() % 32 == 0) value *= 50.0f;
        if (kind == 1) value = scale * std::round(2.0f * rng.normal());
        if (kind == 2) value = 100.0f + 0.5f * static_cast<float>(i % 2);
        if (kind == 3 && rng.next() % 2) value = 0.0f;
        if (kind == 4) value = i == 77 ? scale : 0.0f;
        if (kind == 5) value = scale;
        if (kind == 6) value = std::exp2(4.0f * rng.normal());
        if (kind == 7) value = scale * static_cast<float>(rng.next() % 2);
        x[row * kDim + i] = oscar::float_to_bf16(value);
      }
    }
  });
}

struct Matrices {
  std::vector<double> metric;   // of one head; all heads share it
  std::vector<float> feedback;  // [kDim, kDim]
};

Matrices random_matrices() {
  std::mt19937 rng(5);
  std::normal_distribution<double> normal;
  Matrices m;
  std::vector<double> factor(kDim * 16);
  for (int i = 0; i < kDim * 16; ++i) factor[i] = normal(rng) / (1 + i % 16);
  m.metric.assign(kDim * kDim, 0.0);
  for (int i = 0; i < kDim; ++i) {
    for (int j = 0; j < kDim; ++j) {
      for (int k = 0; k < 16; ++k)
        m.metric[i * kDim + j] += factor[i * 16 + k] * factor[j * 16 + k];
    }
    m.metric[i * kDim + i] += 0.05;
  }
  const std::vector<double> u = oscar_test::feedback_ref(m.metric, kDim, 0.01);
  m.feedback.assign(u.begin(), u.end());
  return m;
}

struct Difference {
  int64_t rows = 0, different = 0;
  int64_t other_scale = 0;                   // the same codes, one unit in the last place apart
  double loss_gap = 0.0;                     // e M e^T of rows that differ, GPU minus CPU
  double sampled_loss = 0.0, sampled = 0.0;  // e M e^T of some rows of the CPU
};

// Writes rounds() times kRowsPerRound rows and compares codes and metadata. corrected: with metric
// scales.
void compare(const Matrices* matrices, bool corrected, Difference& sum) {
  const oscar::PageFormat format{.head_dim = kDim, .rows = {.quant_group_size = kDim}};
  const int bytes_of_page = page_bytes(format), row_bytes = code_row_bytes(format);
  std::vector<int32_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  const DeviceBuffer<int32_t> table(pages);
  const DeviceBuffer<int32_t> rows(std::vector<int32_t>{0, kTokens}), zero(std::vector<int32_t>{0});
  const DeviceBuffer<int32_t> now(std::vector<int32_t>{kTokens});
  DeviceBuffer<uint8_t> pool(static_cast<size_t>(kPages) * kHeads * bytes_of_page);
  DeviceBuffer<uint16_t> k(static_cast<size_t>(kTokens) * kHeads * kDim), v(k.count());
  DeviceBuffer<float> feedback(static_cast<size_t>(kHeads) * kDim * kDim);
  DeviceBuffer<float> metric(feedback.count());
  std::vector<float> head_metric;
  DeviceBuffer<int> status(1);
  status.fill(0);
  oscar::AppendParams p{.format = format,
                        .history = {pool.get(), table.get(), kPages, nullptr},
                        .windows = {nullptr, nullptr, nullptr, 0, 1},
                        .k = oscar::contiguous_rows(k.get(), kHeads, kDim),
                        .v = oscar::contiguous_rows(v.get(), kHeads, kDim),
                        .query_start_loc = rows.get(),
                        .old_len = zero.get(),
                        .old_history = zero.get(),
                        .new_history = now.get(),
                        .key = {.clip_ratio = .96f},
                        .value = {.clip_ratio = .92f},
                        .status = status.get(),
                        .batch = 1,
                        .num_kv_heads = kHeads};
  if (matrices) {
    std::vector<float> all;
    for (int h = 0; h < kHeads; ++h) {
      all.insert(all.end(), matrices->feedback.begin(), matrices->feedback.end());
    }
    feedback.upload(all);
    p.key.feedback = p.value.feedback = feedback.get();
    head_metric.assign(matrices->metric.begin(), matrices->metric.end());
    all.clear();
    for (int h = 0; h < kHeads; ++h) all.insert(all.end(), head_metric.begin(), head_metric.end());
    metric.upload(all);
    if (corrected) p.key.metric = p.value.metric = metric.get();
  }
  std::vector<uint16_t> host[2] = {std::vector<uint16_t>(k.count()),
                                   std::vector<uint16_t>(k.count())};
  std::vector<float> x(static_cast<size_t>(kTokens) * kDim), y(matrices ? x.size() : 0);
  std::vector<uint8_t> packed(static_cast<size_t>(kTokens) * row_bytes);
  std::vector<uint16_t> metadata(static_cast<size_t>(kTokens) * 2);
  std::vector<float> row(kDim);
  for (int round = 0; round < rounds(); ++round) {
    random_rows(host[0], 2 * round + 1);
    random_rows(host[1], 2 * round + 2);
    k.upload(host[0]);
    v.upload(host[1]);
    pool.fill(0xee);
    ASSERT_CUDA(append_rows(p, 0, kTokens, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> got = pool.download();
    for (int at = 0; at < 2 * kHeads; ++at) {
      const int head = at / 2, side = at % 2;
      on_all_cores(kTokens, [&](int64_t first, int64_t end) {
        for (int64_t i = first * kDim; i < end * kDim; ++i) {
          x[i] = oscar::bf16_to_float(host[side][(i / kDim * kHeads + head) * kDim + i % kDim]);
        }
      });
      const oscar::RowQuantizer quantizer{
          .head_dim = kDim,
          .format = {.quant_group_size = kDim},
          .recipe = head_recipe(writer_of(p, side), head),
          .feedback = matrices ? matrices->feedback.data() : nullptr,
          .metric = head_metric.data()};
      const oscar::RowsStatus done =
          quantize_rows(quantizer, x.data(), kTokens,
                        {packed.data(), metadata.data(), matrices ? y.data() : nullptr}, 0);
      ASSERT_EQ(done.status, oscar::RowStatus::kOk);
      for (int token = 0; token < kTokens; ++token) {
        const uint8_t* page =
            &got[(static_cast<size_t>(pages[token / 64]) * kHeads + head) * bytes_of_page];
        const int in_page = token % 64;
        if (matrices && token % 512 == 0) {
          sum.sampled_loss +=
              oscar_test::metric_loss(&x[token * kDim], &y[token * kDim], matrices->metric, kDim);
          sum.sampled += 1.0;
        }
        const uint8_t* scale_zero = page + metadata_offset(format, side, in_page);
        if (memcmp(page + code_offset(format, side, in_page), &packed[token * row_bytes],
                   row_bytes) == 0) {
          uint16_t pair[2];
          memcpy(pair, scale_zero, 4);
          if (pair[0] == metadata[2 * token] && pair[1] == metadata[2 * token + 1]) continue;
          if (corrected && pair[1] == metadata[2 * token + 1] &&
              std::abs(pair[0] - metadata[2 * token]) == 1) {
            ++sum.other_scale;
            continue;
          }
        }
        ++sum.different;
        if (!matrices) continue;
        for (int i = 0; i < kDim; ++i) {
          row[i] = oscar::dequantize(unpack_code(page + code_offset(format, side, in_page), i, kDim,
                                                 oscar::PackOrder::kConsecutive),
                                     {load_metadata(scale_zero, 0, format.rows.metadata),
                                      load_metadata(scale_zero, 1, format.rows.metadata)});
        }
        const double theirs =
            oscar_test::metric_loss(&x[token * kDim], &y[token * kDim], matrices->metric, kDim);
        const double ours =
            oscar_test::metric_loss(&x[token * kDim], row.data(), matrices->metric, kDim);
        sum.loss_gap += std::fabs(ours - theirs);
      }
      sum.rows += kTokens;
    }
  }
  EXPECT_EQ(status.download()[0], 0);
  EXPECT_TRUE(pool.guards_intact());
}

TEST(ManyRows, PlainRoundingWritesTheBytesOfTheCpuCodec) {
  OSCAR_NEEDS_DEVICE();
  Difference sum;
  ASSERT_NO_FATAL_FAILURE(compare(nullptr, false, sum));
  printf("plain: %lld of %lld rows differ\n", static_cast<long long>(sum.different),
         static_cast<long long>(sum.rows));
  EXPECT_EQ(sum.different, 0);
}

TEST(ManyRows, ShapedRoundingDiffersInOneOfTenThousandAtMost) {
  OSCAR_NEEDS_DEVICE();
  const Matrices matrices = random_matrices();
  Difference sum;
  ASSERT_NO_FATAL_FAILURE(compare(&matrices, false, sum));
  const double loss = sum.sampled_loss / sum.sampled * static_cast<double>(sum.rows);
  printf("shaped: %lld of %lld rows differ, their e M e^T by %.1e of all\n",
         static_cast<long long>(sum.different), static_cast<long long>(sum.rows),
         sum.loss_gap / loss);
  EXPECT_LE(sum.different, sum.rows / 10000);
  EXPECT_LE(sum.loss_gap, 1e-4 * loss);
}

TEST(ManyRows, MetricScalesDifferByAUnitInOneOfAThousandAtMost) {
  OSCAR_NEEDS_DEVICE();
  const Matrices matrices = random_matrices();
  Difference sum;
  ASSERT_NO_FATAL_FAILURE(compare(&matrices, true, sum));
  printf("shaped, metric scales: of %lld rows the codes of %lld differ, the scales of %lld\n",
         static_cast<long long>(sum.rows), static_cast<long long>(sum.different),
         static_cast<long long>(sum.other_scale));
  EXPECT_LE(sum.different, sum.rows / 10000);
  EXPECT_LE(sum.other_scale, sum.rows / 1000);
}

}  // namespace
