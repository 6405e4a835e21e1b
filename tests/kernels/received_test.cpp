// Weights by received attention on the GPU against plain float64 loops.
#include "oscar_kernels/received.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/device_memory.h"
#include "oscar/cache/numeric.h"

namespace {

using oscar_test::DeviceBuffer;

constexpr double kEvenShare = 0.1;
constexpr int kStride = 16, kSink = 5, kRecent = 20;

struct Shape {
  int head_dim = 128, group = 1, num_kv_heads = 1, tokens = 1, window = 0;
  float scale = 1;  // of keys: how much the rows that a query sees differ
};

struct Weights {
  std::vector<double> key, value, attention;  // [num_kv_heads, tokens]
  std::vector<double> query;                  // [num_qo_heads, queries]
};

class Case {
 public:
  explicit Case(const Shape& s) : shape(s) {
    std::mt19937_64 random(static_cast<uint64_t>(s.head_dim * 1000 + s.tokens));
    q = rows(random, heads(), 1);
    k = rows(random, s.num_kv_heads, s.scale);
    std::vector<int32_t> seen, begin, end;
    for (int m = 0; m * kStride < s.tokens; ++m) {
      const int i = m * kStride + 7 * m % kStride;
      const int first = s.window > 0 ? std::max(0, i - s.window + 1) : 0;
      if (i >= s.tokens || i + 1 - kRecent <= std::max(kSink, first)) continue;
      reach.push_back(i);
      seen.push_back(first);
      begin.push_back(std::max(kSink, first));
      end.push_back(i + 1 - kRecent);
    }
    queries = static_cast<int>(reach.size());
    for (const auto& more : {seen, begin, end}) reach.insert(reach.end(), more.begin(), more.end());
  }

  int heads() const { return shape.group * shape.num_kv_heads; }

  Weights expected() const {
    const size_t n = static_cast<size_t>(shape.num_kv_heads * shape.tokens);
    Weights w{.key = std::vector<double>(n),
              .value = std::vector<double>(n),
              .attention = std::vector<double>(n),
              .query = {}};
    for (int h = 0; h < heads(); ++h) {
      for (int m = 0; m < queries; ++m) add_query(h, m, w);
    }
    return w;
  }

  oscar::ReceivedParams params() const {
    oscar::ReceivedParams params;
    params.head_dim = shape.head_dim;
    params.num_qo_heads = heads();
    params.num_kv_heads = shape.num_kv_heads;
    params.tokens = shape.tokens;
    params.queries = queries;
    params.sm_scale = sm_scale();
    params.even_share = static_cast<float>(kEvenShare);
    return params;
  }

  // As the layers have them: tokens of a head lie apart.
  oscar::ReceivedRows describe(const DeviceBuffer<uint16_t>& rows, int count) const {
    return {.rows = rows.get(),
            .head_stride = shape.head_dim,
            .token_stride = int64_t{count} * shape.head_dim};
  }

  Shape shape;
  std::vector<uint16_t> q, k;  // [tokens, heads, head_dim]
  std::vector<int32_t> reach;
  int queries = 0;

 private:
  std::vector<uint16_t> rows(std::mt19937_64& random, int count, float scale) const {
    std::normal_distribution<float> normal(0, scale);
    std::vector<uint16_t> values(static_cast<size_t>(shape.tokens * count * shape.head_dim));
    for (uint16_t& value : values) value = oscar::float_to_bf16(normal(random));
    return values;
  }

  float sm_scale() const { return 1 / std::sqrt(static_cast<float>(shape.head_dim)); }

  double score(int head, int query, int key) const {
    const size_t d = static_cast<size_t>(shape.head_dim);
    const uint16_t* a = &q[static_cast<size_t>(query * heads() + head) * d];
    const uint16_t* b = &k[static_cast<size_t>(key * shape.num_kv_heads + head / shape.group) * d];
    double sum = 0;
    for (size_t i = 0; i < d; ++i) {
      sum += double{oscar::bf16_to_float(a[i])} * double{oscar::bf16_to_float(b[i])};
    }
    return sum * double{sm_scale()};
  }

  void add_query(int head, int m, Weights& w) const {
    const auto bound = [&](int row) { return reach[static_cast<size_t>(row * queries + m)]; };
    const int at = bound(0), seen = bound(1), begin = bound(2), end = bound(3);
    std::vector<double> p;
    double most = -INFINITY, total = 0, rest = 0, squares = 0;
    for (int t = seen; t <= at; ++t) {
      p.push_back(score(head, at, t));
      most = std::max(most, p.back());
    }
    for (double& x : p) total += x = std::exp(x - most);
    for (double& x : p) x /= total;
    const auto weight = [&](int t) { return p[static_cast<size_t>(t - seen)]; };
    for (int t = begin; t < end; ++t) {
      rest += weight(t) * (1 - weight(t));
      squares += weight(t) * weight(t);
    }
    w.query.push_back(rest);
    for (int t = begin; t < end; ++t) {
      const auto i = static_cast<size_t>(head / shape.group * shape.tokens + t);
      const double x = weight(t), even = kEvenShare / (end - begin);
      w.key[i] += (1 - kEvenShare) * x * (1 - x) + even * rest;
      w.value[i] += (1 - kEvenShare) * x * x + even * squares;
      w.attention[i] += x;
    }
  }
};

void expect_near(const std::vector<float>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  const double most = *std::ranges::max_element(expected);
  for (size_t i = 0; i < found.size(); ++i) {
    // fp32 throughout: of each sum 1e-4, and of the largest what 1 - p loses.
    ASSERT_NEAR(double{found[i]}, expected[i], 1e-4 * expected[i] + 2e-6 * most) << i;
  }
}

class ReceivedKernel : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { OSCAR_NEEDS_DEVICE(); }
};

TEST_P(ReceivedKernel, EqualsFloat64) {
  const Case c(GetParam());
  ASSERT_GT(c.queries, 0);
  const DeviceBuffer<uint16_t> q(c.q), k(c.k);
  const DeviceBuffer<int32_t> reach(c.reach);
  const auto n = static_cast<size_t>(c.shape.num_kv_heads * c.shape.tokens);
  const DeviceBuffer<float> key(n), value(n), attention(n);
  const DeviceBuffer<float> query(static_cast<size_t>(c.heads() * c.queries));
  oscar::ReceivedParams params = c.params();
  params.q = c.describe(q, c.heads());
  params.k = c.describe(k, c.shape.num_kv_heads);
  params.reach = reach.get();
  params.key = key.get(), params.value = value.get();
  params.attention = attention.get(), params.query = query.get();
  const DeviceBuffer<uint8_t> workspace(oscar::received_workspace(params));
  ASSERT_CUDA(oscar::received_weights(params, workspace.get(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  const Weights expected = c.expected();
  expect_near(key.download(), expected.key);
  expect_near(value.download(), expected.value);
  expect_near(attention.download(), expected.attention);
  expect_near(query.download(), expected.query);
  for (const auto* buffer : {&key, &value, &attention, &query}) {
    EXPECT_TRUE(buffer->guards_intact());
  }
  EXPECT_TRUE(workspace.guards_intact());

  const auto first = key.download();
  ASSERT_CUDA(oscar::received_weights(params, workspace.get(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(key.download(), first) << "the same call gives other bits";
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ReceivedKernel,
    testing::Values(Shape{.tokens = 64}, Shape{.head_dim = 64, .group = 3, .tokens = 300},
                    Shape{.head_dim = 80, .group = 2, .num_kv_heads = 2, .tokens = 129},
                    Shape{.head_dim = 96, .num_kv_heads = 3, .tokens = 257, .window = 90},
                    Shape{.group = 4, .num_kv_heads = 2, .tokens = 1100, .scale = 3},
                    Shape{.head_dim = 192, .group = 2, .tokens = 200, .window = 64},
                    Shape{.head_dim = 256, .group = 2, .num_kv_heads = 2, .tokens = 500},
                    // More queries than one tile, keys that take nearly all.
                    Shape{.head_dim = 64, .group = 2, .tokens = 2300, .scale = 8}));

TEST(ReceivedKernelErrors, RefusesWhatItCannotRead) {
  uint16_t row = 0;
  float out = 0;
  int32_t reach = 0;
  oscar::ReceivedParams params{.head_dim = 128,
                               .num_qo_heads = 2,
                               .num_kv_heads = 1,
                               .tokens = 64,
                               .queries = 1,
                               .q = {&row, 64, 64},
                               .k = {&row, 64, 64},
                               .reach = &reach,
                               .key = &out,
                               .value = &out,
                               .attention = &out,
                               .query = &out};
  params.num_kv_heads = 3;
  EXPECT_EQ(oscar::received_weights(params, &out, nullptr), cudaErrorInvalidValue);
  params.num_kv_heads = 1;
  params.queries = 65;
  EXPECT_EQ(oscar::received_weights(params, &out, nullptr), cudaErrorInvalidValue);
  params.queries = 1;
  params.q.token_stride = 60;
  EXPECT_EQ(oscar::received_weights(params, &out, nullptr), cudaErrorNotSupported);
}

}  // namespace
