// The BF16 baseline of decode attention on the GPU against float64 attention over the same rows.
#include <gtest/gtest.h>

#include "kernels/attention_outcome.h"
#include "kernels/prepared_workspace.h"

namespace {

using oscar::kPageTokens;
using oscar_test::CacheShape;
using oscar_test::DeviceBuffer;
using oscar_test::DeviceCache;
using oscar_test::Outcome;
using oscar_test::PreparedWorkspace;
using oscar_test::RandomCache;
using oscar_test::Reference;

// A cache of the same lengths and tables whose pages hold bf16 rows, K [64][d] then V [64][d], and
// all of those rows once more in windows that hold every position: for the reference, which has no
// such pages.
struct Bf16Cache {
  RandomCache cache;
  std::vector<uint16_t> pool, k, v;
  std::vector<int32_t> no_history;
  oscar::ExactWindows all_rows;

  explicit Bf16Cache(const CacheShape& shape)
      : cache(shape, 41), no_history(shape.seq_lens.size()) {
    const int d = shape.head_dim, heads = shape.num_kv_heads, sink = shape.sink;
    const int batch = static_cast<int>(shape.seq_lens.size());
    const int pages = static_cast<int>(cache.pool.size() / page_bytes(cache.format)) / heads;
    const int longest = *std::max_element(shape.seq_lens.begin(), shape.seq_lens.end());
    pool.assign(static_cast<size_t>(pages) * heads * 2 * kPageTokens * d, 0x7fc0);  // NaN
    k.assign(static_cast<size_t>(batch) * heads * (longest + 1) * d, 0x7fc0);
    v = k;
    all_rows = {k.data(), v.data(), cache.slots.data(), longest, 1};
    const oscar::ExactWindows windows = cache.windows(cache.wk.data(), cache.wv.data(), nullptr);
    std::mt19937 rng(43);
    std::normal_distribution<float> normal;
    for (int b = 0; b < batch; ++b) {
      const int slot = cache.slots[b];
      for (int position = 0; position < cache.lens[b]; ++position) {
        const int token = position - sink;
        const bool paged = token >= 0 && token < cache.history[b];
        for (int head = 0; head < heads; ++head) {
          const int64_t to = window_offset(all_rows, slot, head, heads, position, d);
          if (!paged) {
            const int64_t from =
                window_offset(windows, slot, head, heads, window_row(windows, position), d);
            std::copy_n(&cache.wk[from], d, &k[to]);
            std::copy_n(&cache.wv[from], d, &v[to]);
            continue;
          }
          const int64_t head_page = cache.row(b)[token / kPageTokens] * int64_t{heads} + head;
          for (int side = 0; side < 2; ++side) {
            const int64_t row = (head_page * 2 + side) * kPageTokens + token % kPageTokens;
            for (int i = 0; i < d; ++i) {
              pool[row * d + i] = (side ? v : k)[to + i] = oscar::float_to_bf16(normal(rng));
            }
          }
        }
      }
    }
  }

  oscar::AttentionParams reference_params() {
    oscar::AttentionParams p = cache.host_params();
    p.windows = all_rows;
    p.history.history_len = no_history.data();
    return p;
  }
};

struct Case {
  std::string name;
  CacheShape shape;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Bf16Attention : public testing::TestWithParam<Case> {};

TEST_P(Bf16Attention, EqualsFloat64AttentionAndRepeatsBitForBit) {
  OSCAR_NEEDS_DEVICE();
  Bf16Cache host(GetParam().shape);
  DeviceCache device(host.cache);
  const DeviceBuffer<uint16_t> pool(host.pool);
  device.params.history.pool = reinterpret_cast<uint8_t*>(pool.get());
  PreparedWorkspace workspace(device.params);
  Outcome outcomes[2];
  for (Outcome& outcome : outcomes) {
    device.o.fill(0xff);  // NaN, so that an unwritten output shows
    device.lse.fill(0xff);
    ASSERT_CUDA(
        oscar::decode_attention_bf16(device.params, workspace.get(), workspace.count(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    outcome = {device.o.download(), device.lse.download()};
  }
  EXPECT_EQ(outcomes[0].o, outcomes[1].o);
  EXPECT_EQ(0, memcmp(outcomes[0].lse.data(), outcomes[1].lse.data(), outcomes[0].lse.size() * 4));
  double output_error = 0.0, lse_error = 0.0;
  ASSERT_NO_FATAL_FAILURE(
      compare(Reference(host.reference_params()), outcomes[0], &output_error, &lse_error));
  printf("%s: output %.2e lse %.2e\n", GetParam().name.c_str(), output_error, lse_error);
  EXPECT_LE(output_error, oscar_test::kOutputBound);
  EXPECT_LE(lse_error, oscar_test::kLseBound);
  EXPECT_TRUE(device.guards_intact() && pool.guards_intact() && workspace.guards_intact());
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<int> lens, int qo, int kv, int q_len = 1,
                       int head_dim = 128) {
    CacheShape shape;
    shape.seq_lens = std::move(lens);
    shape.num_qo_heads = qo, shape.num_kv_heads = kv, shape.q_len = q_len;
    shape.head_dim = shape.quant_group_size = head_dim;
    all.push_back({name, shape});
  };
  add("boundary lengths", {1, 63, 64, 65, 319, 320, 321, 322}, 8, 2);
  add("page tails", {383, 384, 385, 391, 392, 393, 447, 449}, 8, 2);
  add("one long request", {9000}, 8, 1);
  add("ragged batch with unused places", {2000, 0, 1, 700, 330, 0}, 8, 2);
  add("GQA 1", {900, 350}, 4, 4);
  add("GQA 16", {900, 350}, 32, 2);
  add("four queries of GQA 5", {900, 350, 4, 66}, 10, 2, 4);
  CacheShape no_sink = all[0].shape;
  no_sink.seq_lens = {1000, 20, 300}, no_sink.sink = 0;
  all.push_back({"no sink", no_sink});
#if OSCAR_KERNELS_FULL
  add("d 64", {1500, 350, 1, 400}, 8, 2, 1, 64);
  add("d 256", {1500, 350, 1, 400}, 8, 2, 1, 256);
#endif
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, Bf16Attention, testing::ValuesIn(cases()));

}  // namespace
