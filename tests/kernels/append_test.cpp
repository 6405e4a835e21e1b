// Quantize and append on the GPU against the CPU codec, byte for byte.
#include "oscar_kernels/append.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "cache/codec_ref.h"
#include "kernels/random_cache.h"
#include "oscar/cache/pages.h"

namespace {

using oscar_test::DeviceBuffer;

constexpr int kNonFinite = static_cast<int>(oscar::RowStatus::kNonFinite);
constexpr int kOverflow = static_cast<int>(oscar::RowStatus::kMetadataOverflow);
const std::vector<int> kAllWritten{0, 0};  // of each request its status

struct AppendSetup {
  int head_dim = 128, quant_group_size = 128;
  oscar::MetadataDtype metadata = oscar::MetadataDtype::kFp16;
  int heads = 3, sink = 4, recent = 10, demote_block = 1;
  bool shaped = false, metric = false, mixed = false;  // mixed: each head in a way of its own
  float clip_k = .96f, clip_v = .92f;
  int center_segments = 0;  // of key centers; 0: none
  bool ahead = false;       // pages are written once they are full, however exact their rows stay
};

// Two requests' caches, kept on host and device in step.
class TwoCaches {
 public:
  static constexpr int kBatch = 2, kPages = 64, kMaxNew = 8;
  AppendSetup setup;
  oscar::PageFormat format;
  int ring;
  std::vector<int32_t> table, lens{0, 0}, histories{0, 0}, slots{1, 0};  // histories: in pages
  std::vector<uint8_t> pool;
  std::vector<uint16_t> wk, wv;
  std::vector<float> feedback, metric;
  std::vector<uint8_t> kinds;  // corrections of the heads, then their roundings
  DeviceBuffer<uint8_t> device_pool;
  DeviceBuffer<uint16_t> device_wk, device_wv;
  DeviceBuffer<int32_t> device_table, device_slots;
  DeviceBuffer<float> device_feedback, device_metric;
  std::vector<uint16_t> centers;
  std::vector<int32_t> first_position{700, 1900};
  DeviceBuffer<uint16_t> device_centers;
  DeviceBuffer<int32_t> device_first_position;

  explicit TwoCaches(const AppendSetup& s)
      : setup(s),
        format{s.head_dim, {s.quant_group_size, s.metadata}},
        ring(s.recent + s.demote_block + kMaxNew),
        table(shuffled(kPages)),
        pool(static_cast<size_t>(kPages) * s.heads * page_bytes(format), 0xee),
        wk(static_cast<size_t>(kBatch) * s.heads * (s.sink + ring) * s.head_dim, 0x7fc0),
        wv(wk),
        device_pool(pool),
        device_wk(wk),
        device_wv(wv),
        device_table(table),
        device_slots(slots),
        device_feedback(static_cast<size_t>(s.heads) * s.head_dim * s.head_dim),
        device_metric(device_feedback.count()),
        centers(random_centers(s)),
        device_centers(centers),
        device_first_position(first_position) {
    for (int h = 0; h < s.heads; ++h) kinds.push_back(static_cast<uint8_t>(h % 3));
    for (int h = 0; h < s.heads; ++h) kinds.push_back(static_cast<uint8_t>(h % 2));
    const int d = s.head_dim;
    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    for (int h = 0; h < s.heads; ++h) {  // a metric of low rank plus a diagonal
      std::vector<double> m(d * d, 0.0), factor(d * 8);
      for (double& x : factor) x = normal(rng);
      for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) {
          for (int k = 0; k < 8; ++k) m[i * d + j] += factor[i * 8 + k] * factor[j * 8 + k] / 8;
        }
        m[i * d + i] += 0.1;
      }
      const std::vector<double> u = oscar_test::feedback_ref(m, d, 0.01);
      feedback.insert(feedback.end(), u.begin(), u.end());
      metric.insert(metric.end(), m.begin(), m.end());
    }
    device_feedback.upload(feedback);
    device_metric.upload(metric);
  }

  static std::vector<uint16_t> random_centers(const AppendSetup& s) {
    std::vector<uint16_t> rows(static_cast<size_t>(s.center_segments) * s.heads * 2 * s.head_dim);
    std::mt19937 rng(6);
    std::normal_distribution<float> normal;
    for (uint16_t& x : rows) x = oscar::float_to_bf16(normal(rng));
    return rows;
  }
  static std::vector<int32_t> shuffled(int n) {
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    return order;
  }

  // Appends `counts` new rows per request on both sides; returns the status of each request, which
  // is the same on both.
  std::vector<int> append(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                          const std::vector<int>& counts) {
    const std::vector<int32_t> rows{0, counts[0], counts[0] + counts[1]};
    std::vector<int32_t> read(2), now(2);
    int max_history = 0;
    for (int b = 0; b < 2; ++b) {
      const int tokens = lens[b] + counts[b], behind = std::max(0, tokens - setup.sink);
      read[b] = oscar::history_for_length(tokens, setup.sink, setup.recent, setup.demote_block);
      now[b] = setup.ahead ? std::max(read[b], behind / oscar::kPageTokens * oscar::kPageTokens)
                           : read[b];
      max_history = std::max(max_history, now[b] - histories[b]);
    }
    oscar::AppendParams p{.format = format,
                          .history = {pool.data(), table.data(), kPages / 2, nullptr},
                          .windows = {wk.data(), wv.data(), slots.data(), setup.sink, ring},
                          .k = oscar::contiguous_rows(k.data(), setup.heads, setup.head_dim),
                          .v = oscar::contiguous_rows(v.data(), setup.heads, setup.head_dim),
                          .query_start_loc = rows.data(),
                          .old_len = lens.data(),
                          .old_history = histories.data(),
                          .new_history = now.data(),
                          .read_history = setup.ahead ? read.data() : nullptr,
                          .key = {.clip_ratio = setup.clip_k},
                          .value = {.clip_ratio = setup.clip_v},
                          .batch = 2,
                          .num_kv_heads = setup.heads};
    const auto write_with = [&](const float* u, const float* m, const uint8_t* of_heads) {
      for (oscar::SideWriter* side : {&p.key, &p.value}) {
        side->feedback = setup.shaped ? u : nullptr;
        side->metric = setup.metric ? m : nullptr;
        side->corrections = setup.mixed ? of_heads : nullptr;
        side->roundings = setup.mixed && setup.shaped ? of_heads + setup.heads : nullptr;
      }
    };
    write_with(feedback.data(), metric.data(), kinds.data());
    if (setup.center_segments > 0) {
      p.centers = {centers.data(), setup.center_segments, first_position.data()};
    }
    std::vector<int> expected(2), bits(2);
    p.status = expected.data();
    append_ref(p);
    const DeviceBuffer<uint16_t> fused(fused_rows(k, v));
    const DeviceBuffer<int32_t> drows(rows), dlens(lens), dold(histories), dnow(now), dread(read);
    const DeviceBuffer<int> status(bits);
    p.history = {device_pool.get(), device_table.get(), kPages / 2, nullptr};
    p.windows.k = device_wk.get(), p.windows.v = device_wv.get();
    p.windows.slot = device_slots.get();
    p.k = fused_side(fused.get(), 0), p.v = fused_side(fused.get(), 1);
    p.query_start_loc = drows.get(), p.old_len = dlens.get();
    p.old_history = dold.get(), p.new_history = dnow.get();
    if (p.read_history) p.read_history = dread.get();
    const DeviceBuffer<uint8_t> device_kinds(kinds);
    write_with(device_feedback.get(), device_metric.get(), device_kinds.get());
    if (p.centers.rows) {
      p.centers.rows = device_centers.get();
      p.centers.first_position = device_first_position.get();
    }
    p.status = status.get();
    EXPECT_EQ(append_rows(p, std::max(counts[0], counts[1]), max_history, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int b = 0; b < 2; ++b) lens[b] += counts[b];
    histories = now;
    EXPECT_TRUE(status.guards_intact());
    bits = status.download();
    if (!setup.shaped) {  // whose matrices only the device checks
      EXPECT_EQ(bits, expected);
    }
    return {bits[slots[0]], bits[slots[1]]};
  }

  // Keys and values of a row beside each other with a query head before them, as a model's fused
  // projection leaves them; the CPU reference gets each side by itself.
  std::vector<uint16_t> fused_rows(const std::vector<uint16_t>& k,
                                   const std::vector<uint16_t>& v) const {
    const size_t d = setup.head_dim, side = setup.heads * d;
    std::vector<uint16_t> rows(k.size() / side * (2 * side + d), 0x7fc0);
    for (size_t row = 0; row < k.size() / side; ++row) {
      const auto to = rows.begin() + static_cast<int64_t>(row * (2 * side + d) + d);
      std::copy_n(&k[row * side], side, to);
      std::copy_n(&v[row * side], side, to + static_cast<int64_t>(side));
    }
    return rows;
  }
  oscar::HeadRows fused_side(const uint16_t* rows, int side) const {
    const int64_t d = setup.head_dim;
    return {rows + d + side * setup.heads * d, (2 * setup.heads + 1) * d, d};
  }

  bool guards_intact() const {
    return device_pool.guards_intact() && device_wk.guards_intact() && device_wv.guards_intact();
  }
};

std::vector<uint16_t> random_rows(int rows, int heads, int d, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(static_cast<size_t>(rows) * heads * d);
  for (int r = 0; r < rows * heads; ++r) {
    const float scale = std::exp(2.0f * normal(rng)), shift = normal(rng);
    for (int i = 0; i < d; ++i) {
      float value = scale * (normal(rng) + shift);
      if (r % 97 == 5) value = 0.0f;                      // zero rows
      if (r % 89 == 7) value = scale;                     // constant rows
      if (r % 83 == 11) value = 100.0f + 0.5f * (i % 2);  // tiny range on a large mean
      if (r % 79 == 13 && i == 3) value = 300.0f * scale;
      if (r % 73 == 17) value = static_cast<float>(static_cast<int>(2 * normal(rng)));  // ties
      x[static_cast<size_t>(r) * d + i] = oscar::float_to_bf16(value);
    }
  }
  return x;
}

// Whether a row's metadata at `at` is other than what the pool was filled with.
bool pool_row_written(const std::vector<uint8_t>& pool, size_t at) {
  return pool[at] != 0xee || pool[at + 1] != 0xee;
}

struct Case {
  const char* name;
  AppendSetup setup;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Append : public testing::TestWithParam<Case> {};

TEST_P(Append, PrefillThenDecodeWritesTheBytesOfTheCpuReference) {
  OSCAR_NEEDS_DEVICE();
  TwoCaches caches(GetParam().setup);
  const int h = caches.setup.heads, d = caches.setup.head_dim;
  std::vector<std::vector<int>> steps = {{700, 13}, {1, 1}, {1, 4}, {0, 2}, {8, 3}, {260, 90}};
  for (int i = 0; i < 20; ++i) steps.push_back({1, 1 + i % 2});
  int seed = 100;
  for (const std::vector<int>& counts : steps) {
    const auto k = random_rows(counts[0] + counts[1], h, d, seed++);
    const auto v = random_rows(counts[0] + counts[1], h, d, seed++);
    EXPECT_EQ(caches.append(k, v, counts), kAllWritten);
  }
  EXPECT_EQ(caches.device_wk.download(), caches.wk);
  EXPECT_EQ(caches.device_wv.download(), caches.wv);
  EXPECT_TRUE(caches.guards_intact());
  const std::vector<uint8_t> got = caches.device_pool.download();
  const bool centered = caches.setup.center_segments > 0;
  if (!caches.setup.shaped && !caches.setup.metric && !centered) {
    EXPECT_TRUE(got == caches.pool);
    return;
  }
  // Shaped rounding: fused sums may turn a code in a few rows. Metric scales: a unit in the last
  // place, or what fp32 sums leave open. Key centers: where two are as near but for rounding, sums
  // in another order may choose the other one.
  const oscar::PageFormat& f = caches.format;
  const int bytes_of_page = page_bytes(f), row = code_row_bytes(f), groups = groups_per_row(f);
  const float unit = f.rows.metadata == oscar::MetadataDtype::kFp32   ? 1e-5f
                     : f.rows.metadata == oscar::MetadataDtype::kBf16 ? 1.0f / 128
                                                                      : 1.0f / 1024;
  int64_t rows = 0, different = 0, other_scale = 0, other_center = 0, second_center = 0;
  for (size_t at = 0; at < got.size(); at += bytes_of_page) {
    for (int i = 0; i < 128; ++i, ++rows) {
      const int offset = metadata_offset(f, i / 64, i % 64), bytes = metadata_row_bytes(f);
      const auto center = [&](const std::vector<uint8_t>& pool) {
        return oscar::center_of_scale(load_metadata(&pool[at + offset], 0, f.rows.metadata));
      };
      if (pool_row_written(caches.pool, at + offset)) second_center += center(caches.pool);
      if (center(got) != center(caches.pool)) {
        ++other_center;
        continue;
      }
      if (memcmp(&got[at + i * row], &caches.pool[at + i * row], row) != 0) {
        ++different;
        continue;
      }
      if (memcmp(&got[at + offset], &caches.pool[at + offset], bytes) == 0) continue;
      ++other_scale;
      for (int g = 0; g < 2 * groups; ++g) {
        const float ours = load_metadata(&got[at + offset], g, f.rows.metadata);
        const float theirs = load_metadata(&caches.pool[at + offset], g, f.rows.metadata);
        EXPECT_LE(std::fabs(ours - theirs), g % 2 == 0 ? unit * std::fabs(theirs) : 0.0f);
      }
    }
  }
  printf("%s: of %lld rows the codes of %lld differ, the scales of %lld, the centers of %lld\n",
         GetParam().name, static_cast<long long>(rows), static_cast<long long>(different),
         static_cast<long long>(other_scale), static_cast<long long>(other_center));
  EXPECT_LE(other_center, centered ? rows / 10000 : 0);
  EXPECT_EQ(second_center > rows / 100, centered);
  EXPECT_LE(different, caches.setup.shaped ? rows / 10000 : 0);
  if (f.rows.metadata != oscar::MetadataDtype::kFp32) {
    EXPECT_LE(other_scale, caches.setup.metric ? rows / 1000 : 0);
  }
}

std::vector<Case> cases() {
  using oscar::MetadataDtype;
  std::vector<Case> all = {{"plain d 128", {}}};
  AppendSetup s;
  s = {}, s.quant_group_size = 64, s.metadata = MetadataDtype::kFp32;
  all.push_back({"group 64, fp32", s});
  s = {}, s.head_dim = s.quant_group_size = 64, s.metadata = MetadataDtype::kBf16;
  all.push_back({"d 64, bf16", s});
  s = {}, s.head_dim = 256, s.quant_group_size = 128;
  all.push_back({"d 256, group 128", s});
  s = {}, s.clip_k = 0.0f, s.clip_v = 1.0f, s.demote_block = 8;
  all.push_back({"no clip, demote block 8", s});
  s = {}, s.ahead = true;
  all.push_back({"pages ahead of the windows", s});
  s.demote_block = 8, s.recent = 90, s.shaped = true;
  all.push_back({"pages ahead of the windows, shaped, demote block 8", s});
  s = {}, s.shaped = true;
  all.push_back({"shaped", s});
  s.metric = true;
  all.push_back({"shaped, metric scales", s});
  s.quant_group_size = 32, s.metadata = MetadataDtype::kFp32, s.clip_k = 0.0f;
  all.push_back({"shaped, metric scales, group 32, fp32", s});
  s = {}, s.metric = true, s.head_dim = s.quant_group_size = 256;
  all.push_back({"plain with metric scales, d 256", s});
  s.shaped = true, s.quant_group_size = 128;
  all.push_back({"shaped, metric scales, d 256, group 128", s});
  s = {}, s.shaped = s.metric = true, s.head_dim = s.quant_group_size = 64;
  all.push_back({"shaped, metric scales, d 64", s});
  for (const int d : {64, 128, 256}) {  // every pair of correction and rounding
    s = {}, s.shaped = s.metric = s.mixed = true, s.head_dim = d, s.heads = 6;
    s.quant_group_size = d / 2;
    all.push_back({"heads in ways of their own", s});
  }
  s = {}, s.metric = s.mixed = true;
  all.push_back({"plain heads corrected in different ways", s});
  const auto centered = [&](const char* name, AppendSetup setup) {
    setup.center_segments = 3;  // positions to some 2900
    all.push_back({name, setup});
  };
  centered("key centers", {});
  s = {}, s.quant_group_size = 32, s.metadata = MetadataDtype::kFp32, s.clip_k = 0.0f;
  centered("key centers, group 32, fp32, no clip", s);
  s = {}, s.head_dim = s.quant_group_size = 64, s.metadata = MetadataDtype::kBf16;
  centered("key centers, d 64, bf16", s);
  s = {}, s.head_dim = 256, s.quant_group_size = 128;
  centered("key centers, d 256, group 128", s);
  for (const int d : {64, 128, 256}) {
    s = {}, s.shaped = true, s.head_dim = s.quant_group_size = d;
    centered("key centers, shaped", s);
    s.metric = true;
    centered("key centers, shaped, metric scales", s);
    s.mixed = true, s.heads = 6, s.quant_group_size = d / 2;
    centered("key centers, heads in ways of their own", s);
  }
  s = {}, s.metric = s.mixed = true;
  centered("key centers, plain heads corrected in different ways", s);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Settings, Append, testing::ValuesIn(cases()));

TEST(AppendPlaces, OfARequestWithoutRowsNothingIsRead) {
  OSCAR_NEEDS_DEVICE();
  for (const bool shaped : {false, true}) {
    AppendSetup setup;
    setup.shaped = shaped;
    TwoCaches caches(setup);
    const auto rows = [&](int count, unsigned seed) {
      return random_rows(count, setup.heads, setup.head_dim, seed);
    };
    EXPECT_EQ(caches.append(rows(200, 1), rows(200, 2), {200, 0}), kAllWritten);
    std::vector<int32_t> table = caches.table;
    std::fill(table.begin() + TwoCaches::kPages / 2, table.end(), 0x70000007);
    caches.device_table.upload(table);
    const std::vector<uint8_t> before = caches.device_pool.download();
    EXPECT_EQ(caches.append(rows(5, 3), rows(5, 4), {5, 0}), kAllWritten);
    EXPECT_EQ(caches.append({}, {}, {0, 0}), kAllWritten);
    EXPECT_FALSE(caches.device_pool.download() == before);
    if (!shaped) {
      EXPECT_TRUE(caches.device_pool.download() == caches.pool);
    }
    EXPECT_EQ(caches.device_wk.download(), caches.wk);
    EXPECT_TRUE(caches.guards_intact());
  }
}

TEST(AppendErrors, RefusedRowsAreNanInTheirPagesAndReportedByWindowSlot) {
  OSCAR_NEEDS_DEVICE();
  for (const int way : {0, 1, 2, 3}) {  // plain or shaped, without and with key centers
    AppendSetup setup;
    setup.shaped = way % 2 == 1;
    setup.center_segments = way / 2;
    TwoCaches caches(setup);
    auto k = random_rows(200, setup.heads, setup.head_dim, 1);
    auto v = random_rows(200, setup.heads, setup.head_dim, 2);
    const auto first = [&](int row, int head) {
      return (row * setup.heads + head) * setup.head_dim;
    };
    k[first(50, 1) + 77] = 0x7f80;              // infinity
    k[first(60, 2) + 3] = 0x7fc1;               // NaN
    for (int i = 0; i < setup.head_dim; ++i) {  // beyond fp16, however it is clipped
      v[first(170, 0) + i] = oscar::float_to_bf16(i % 2 ? 1e9f : -1e9f);
    }
    EXPECT_EQ(caches.append(k, v, {150, 50}), (std::vector<int>{kNonFinite, kOverflow}));
    const std::vector<uint8_t> pool = caches.device_pool.download();
    const auto words = [&](int b, int row, int head, int side) {
      const int token = row - setup.sink;
      const int page = caches.table[b * TwoCaches::kPages / 2 + token / oscar::kPageTokens];
      std::vector<uint32_t> found(metadata_row_bytes(caches.format) / 4);
      memcpy(found.data(),
             &pool[static_cast<size_t>(page * setup.heads + head) * page_bytes(caches.format) +
                   metadata_offset(caches.format, side, token % oscar::kPageTokens)],
             found.size() * 4);
      return found;
    };
    const std::vector<uint32_t> refused{oscar::kRefusedMetadata};
    EXPECT_EQ(words(0, 50, 1, 0), refused);
    EXPECT_EQ(words(0, 60, 2, 0), refused);
    EXPECT_EQ(words(1, 20, 0, 1), refused);
    EXPECT_NE(words(0, 50, 0, 0), refused);
    if (way == 0) {
      EXPECT_TRUE(pool == caches.pool);
    }
    EXPECT_TRUE(caches.guards_intact());
  }
}

TEST(AppendErrors, RowsOfTheWindowsAreReportedWhenTheyAreNotFinite) {
  OSCAR_NEEDS_DEVICE();
  for (const int row : {2, 145, 149}) {  // of the sink, the first and the last of the recent ones
    for (const uint16_t value : {0x7f80, 0xff80, 0x7fc1, 0xffff}) {
      TwoCaches caches({});
      auto k = random_rows(200, 3, 128, 1), v = random_rows(200, 3, 128, 2);
      (row == 145 ? k : v)[(row * 3 + 2) * 128 + 127] = value;
      EXPECT_EQ(caches.append(k, v, {150, 50}), (std::vector<int>{kNonFinite, 0}));
      EXPECT_EQ(caches.device_wk.download(), caches.wk);
      EXPECT_EQ(caches.device_wv.download(), caches.wv);
    }
  }
  TwoCaches caches({});
  auto k = random_rows(200, 3, 128, 1);
  k[(149 * 3) * 128] = 0x7f7f;  // the largest finite value: windows are exact
  EXPECT_EQ(caches.append(k, random_rows(200, 3, 128, 2), {150, 50}), kAllWritten);
}

TEST(AppendErrors, MatricesThatNoMetricGivesAreReported) {
  OSCAR_NEEDS_DEVICE();
  for (const bool metric : {false, true}) {
    AppendSetup setup;
    setup.shaped = setup.metric = true;
    TwoCaches caches(setup);
    const int d = setup.head_dim, at = d * d + 2 * d + 77;  // above the diagonal of head 1
    (metric ? caches.metric : caches.feedback)[at] = metric ? 100.0f : 5000.0f;
    caches.device_metric.upload(caches.metric);
    caches.device_feedback.upload(caches.feedback);
    const auto k = random_rows(200, setup.heads, d, 1), v = random_rows(200, setup.heads, d, 2);
    EXPECT_EQ(caches.append(k, v, {150, 50}), (std::vector<int>{kNonFinite, kNonFinite}));
  }
}

}  // namespace
