// Rows of the history read back on the GPU against the CPU reference, bit for bit.
#include "oscar_kernels/history.h"

#include <gtest/gtest.h>

#include "kernels/random_cache.h"
#include "oscar/cache/pages.h"

namespace {

using oscar_test::CacheShape;
using oscar_test::DeviceBuffer;
using oscar_test::DeviceCache;
using oscar_test::RandomCache;

constexpr uint8_t kUntouched = 0xff;

struct Range {
  int first_token = 0, tokens = 0;
  bool bf16 = true;
  bool by_head = false;  // [batch][heads][tokens + 3][d] instead of [batch][tokens][heads][d]
};

oscar::RowsOut rows_out(void* data, const RandomCache& cache, const Range& range) {
  const int64_t d = cache.shape.head_dim, heads = cache.shape.num_kv_heads;
  if (!range.by_head) return {data, range.tokens * heads * d, heads * d, d};
  return {data, heads * (range.tokens + 3) * d, d, (range.tokens + 3) * d};
}

size_t out_bytes(const RandomCache& cache, const Range& range) {
  return cache.lens.size() * (range.tokens + 3) * cache.shape.num_kv_heads * cache.shape.head_dim *
         (range.bf16 ? 2 : 4);
}

// Without k and v.
oscar::HistoryRowsParams params_of(const oscar::AttentionParams& p, const Range& range) {
  return {.format = p.format,
          .history = p.history,
          .centers = p.centers,
          .sink_tokens = p.windows.sink_tokens,
          .k = {},
          .v = {},
          .bf16 = range.bf16,
          .first_token = range.first_token,
          .tokens = range.tokens,
          .batch = p.batch,
          .num_kv_heads = p.num_kv_heads};
}

struct BothSides {
  std::vector<uint8_t> k, v;
};

BothSides expected_rows(RandomCache& cache, const Range& range) {
  BothSides out{std::vector<uint8_t>(out_bytes(cache, range), kUntouched), {}};
  out.v = out.k;
  oscar::HistoryRowsParams p = params_of(cache.host_params(), range);
  p.k = rows_out(out.k.data(), cache, range);
  p.v = rows_out(out.v.data(), cache, range);
  dequantize_history_ref(p);
  return out;
}

void expect_same(const DeviceBuffer<uint8_t>& k, const DeviceBuffer<uint8_t>& v,
                 const BothSides& expected) {
  EXPECT_TRUE(k.download() == expected.k);
  EXPECT_TRUE(v.download() == expected.v);
  EXPECT_TRUE(k.guards_intact() && v.guards_intact());
}

void check(RandomCache& cache, const Range& range) {
  const DeviceCache device(cache);
  DeviceBuffer<uint8_t> k(out_bytes(cache, range)), v(k.count());
  k.fill(kUntouched), v.fill(kUntouched);
  oscar::HistoryRowsParams p = params_of(device.params, range);
  p.k = rows_out(k.get(), cache, range);
  p.v = rows_out(v.get(), cache, range);
  ASSERT_CUDA(dequantize_history(p, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  expect_same(k, v, expected_rows(cache, range));
}

struct Case {
  std::string name;
  CacheShape shape;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class DequantizeHistory : public testing::TestWithParam<Case> {};

TEST_P(DequantizeHistory, WritesTheRowsOfTheCpuReferenceAndNoOthers) {
  OSCAR_NEEDS_DEVICE();
  RandomCache cache(GetParam().shape, 13);
  for (const Range& range :
       {Range{0, 800}, Range{0, 700, false}, Range{64, 64}, Range{70, 150, true, true},
        Range{63, 2, false, true}, Range{650, 400}, Range{0, 1}, Range{100000, 50}}) {
    SCOPED_TRACE("first " + std::to_string(range.first_token) + " of " +
                 std::to_string(range.tokens));
    ASSERT_NO_FATAL_FAILURE(check(cache, range));
  }
}

std::vector<Case> cases() {
  using oscar::MetadataDtype;
  std::vector<Case> all;
  const auto add = [&](const char* name, int d, int group, MetadataDtype metadata) {
    CacheShape shape;
    shape.head_dim = d, shape.quant_group_size = group;
    shape.metadata = metadata;
    shape.num_kv_heads = 3, shape.num_qo_heads = 3;
    shape.seq_lens = {1000, 300, 385, 1};  // of history: 680, none, a page and a token, none
    all.push_back({name, shape});
    shape.center_segments = 2;
    all.push_back({std::string(name) + ", key centers", shape});
  };
  add("d 128", 128, 128, MetadataDtype::kFp16);
  add("d 128 group 32 fp32", 128, 32, MetadataDtype::kFp32);
  add("d 64 bf16", 64, 64, MetadataDtype::kBf16);
  add("d 64 group 16", 64, 16, MetadataDtype::kFp16);
  add("d 256", 256, 256, MetadataDtype::kFp16);
  add("d 256 group 128 fp32", 256, 128, MetadataDtype::kFp32);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Formats, DequantizeHistory, testing::ValuesIn(cases()));

TEST(DequantizeHistoryGraph, ReplaysOneKernelWithLengthsAndTablesThatChangedAfterCapture) {
  OSCAR_NEEDS_DEVICE();
  const auto with_lengths = [](std::vector<int> lens) {
    CacheShape shape;
    shape.seq_lens = std::move(lens);
    shape.center_segments = 3;
    shape.table_pages = 70;
    return shape;
  };
  RandomCache first(with_lengths({4000, 900, 700}), 3);
  DeviceCache device(first);
  const Range range{0, 4000};
  DeviceBuffer<uint8_t> k(out_bytes(first, range)), v(k.count());
  oscar::HistoryRowsParams p = params_of(device.params, range);
  p.k = rows_out(k.get(), first, range);
  p.v = rows_out(v.get(), first, range);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_CUDA(dequantize_history(p, stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  ASSERT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  cudaGraphExec_t exec;
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (const std::vector<int>& lens : {std::vector<int>{4000, 900, 700}, {321, 1, 4300}}) {
    RandomCache now(with_lengths(lens), 29);
    ASSERT_LE(now.pool.size(), device.pool.count());
    device.pool.upload(now.pool);
    device.table.upload(now.table);
    device.history.upload(now.history);
    device.centers.upload(now.centers);
    device.first_position.upload(now.first_position);
    k.fill(kUntouched), v.fill(kUntouched);
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    expect_same(k, v, expected_rows(now, range));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(DequantizeHistoryArguments, ShapesThatCannotWorkAreRefusedBeforeAnyLaunch) {
  CacheShape shape;
  shape.seq_lens = {400};
  RandomCache cache(shape, 1);
  const auto status = [&](auto change) {
    oscar::HistoryRowsParams p = params_of(cache.host_params(), {0, 10});
    change(p);
    return dequantize_history(p, nullptr);
  };
  EXPECT_EQ(status([](auto& p) { p.format.head_dim = 96; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.format.rows.quant_group_size = 16; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.first_token = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.v.token_stride = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.tokens = 0; }), cudaSuccess);
}

}  // namespace
