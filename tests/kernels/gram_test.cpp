// The calibration sums of the GPU against plain float64 loops, over strided rows of every head_dim.
#include "oscar_kernels/gram.h"

#include <array>
#include <cmath>
#include <memory>
#include <random>

#include "kernels/device_memory.h"
#include "oscar/cache/numeric.h"
#include "support/relative_error.h"
#include "support/slowed.h"

namespace {

using oscar_test::DeviceBuffer;
using oscar_test::relative_error;

constexpr uint16_t kNan = 0x7fc0;

// Where the rows of [batch, heads, tokens, d] lie: beside those of others, or heads apart.
enum class Layout { kHeadsThenTokens, kTokensThenHeads, kPartOfWiderRows };

struct Shape {
  int head_dim = 128, batch = 1, num_heads = 1, num_kv_heads = 1, tokens = 1;
  Layout layout = Layout::kHeadsThenTokens;
};

// Random rows on both sides, with NaN everywhere that is not a row.
class Rows {
 public:
  Rows(const Shape& s, uint64_t seed, float scale = 1, float mean = 0) : shape(s) {
    const int64_t d = s.head_dim, wide = s.num_heads + 3;
    switch (s.layout) {
      case Layout::kHeadsThenTokens:
        strides_ = {s.num_heads * s.tokens * d, s.tokens * d, d};
        break;
      case Layout::kTokensThenHeads:
        strides_ = {s.tokens * s.num_heads * d, d, s.num_heads * d};
        break;
      case Layout::kPartOfWiderRows:
        strides_ = {(s.tokens + 2) * wide * d, d, wide * d};
        offset_ = 2 * d;
        break;
    }
    host.assign(static_cast<size_t>((s.batch + 1) * (s.tokens + 2) * wide * d), kNan);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(mean, 1);
    for (int b = 0; b < s.batch; ++b) {
      for (int h = 0; h < s.num_heads; ++h) {
        for (int t = 0; t < s.tokens; ++t) {
          for (int i = 0; i < d; ++i) {
            // Channels of very different size, as attention has them.
            const float channel = i % 16 == 3 ? 64.f : i % 16 == 5 ? 1.f / 64 : 1.f;
            host[at(b, h, t) + i] = oscar::float_to_bf16(scale * channel * normal(random));
          }
        }
      }
    }
    device = std::make_unique<DeviceBuffer<uint16_t>>(host);
  }

  size_t at(int b, int h, int t) const {
    return static_cast<size_t>(offset_ + b * strides_[0] + h * strides_[1] + t * strides_[2]);
  }
  oscar::GramRows describe(int first_batch, int batch) const {
    return {.rows = device->get() + at(first_batch, 0, 0),
            .batch_stride = strides_[0],
            .head_stride = strides_[1],
            .token_stride = strides_[2],
            .batch = batch,
            .num_heads = shape.num_heads,
            .tokens = shape.tokens};
  }

  Shape shape;
  std::vector<uint16_t> host;
  std::unique_ptr<DeviceBuffer<uint16_t>> device;

 private:
  std::array<int64_t, 3> strides_{};
  int64_t offset_ = 0;
};

struct Sums {
  std::vector<double> moment, sum;  // [num_kv_heads, d, d], [num_kv_heads, d]
  bool operator==(const Sums&) const = default;
};

Sums float64_sums(const Rows& rows) {
  const Shape& s = rows.shape;
  const size_t d = s.head_dim, group = s.num_heads / s.num_kv_heads;
  Sums out{std::vector<double>(s.num_kv_heads * d * d), std::vector<double>(s.num_kv_heads * d)};
  std::vector<double> x(d);
  for (int b = 0; b < s.batch; ++b) {
    for (int h = 0; h < s.num_heads; ++h) {
      double* moment = out.moment.data() + h / group * d * d;
      double* sum = out.sum.data() + h / group * d;
      for (int t = 0; t < s.tokens; ++t) {
        for (size_t i = 0; i < d; ++i) {
          x[i] = oscar::bf16_to_float(rows.host[rows.at(b, h, t) + i]);
          sum[i] += x[i];
        }
        for (size_t i = 0; i < d; ++i) {
          for (size_t j = 0; j < d; ++j) moment[i * d + j] += x[i] * x[j];
        }
      }
    }
  }
  return out;
}

// What gram_add leaves for all of `rows` in one call, in outputs that held `before`, with guards
// around everything it writes.
std::vector<Sums> gpu_sums(const std::vector<const Rows*>& rows, int first_batch, int batch,
                           const std::vector<Sums>* before = nullptr) {
  const Shape& s = rows[0]->shape;
  const size_t d = s.head_dim;
  std::vector<std::unique_ptr<DeviceBuffer<double>>> moments, sums;
  oscar::GramParams params{.head_dim = s.head_dim, .num_kv_heads = s.num_kv_heads};
  for (size_t i = 0; i < rows.size(); ++i) {
    moments.push_back(std::make_unique<DeviceBuffer<double>>(
        before ? (*before)[i].moment : std::vector<double>(s.num_kv_heads * d * d)));
    sums.push_back(std::make_unique<DeviceBuffer<double>>(
        before ? (*before)[i].sum : std::vector<double>(s.num_kv_heads * d)));
    oscar::GramRows& t = params.tensors[params.num_tensors++] =
        rows[i]->describe(first_batch, std::min(batch, rows[i]->shape.batch));
    t.moment = moments.back()->get();
    t.sum = sums.back()->get();
  }
  size_t bytes = 0;
  EXPECT_EQ(oscar::gram_workspace(params, &bytes), cudaSuccess);
  DeviceBuffer<uint8_t> workspace(bytes);
  workspace.fill(0xff);  // NaN: whatever is read was written before
  EXPECT_EQ(oscar::gram_add(params, workspace.get(), bytes, nullptr), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(workspace.guards_intact());
  std::vector<Sums> out;
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_TRUE(moments[i]->guards_intact() && sums[i]->guards_intact());
    out.push_back({moments[i]->download(), sums[i]->download()});
  }
  return out;
}

Sums gpu_sums(const Rows& rows) { return gpu_sums({&rows}, 0, rows.shape.batch)[0]; }

// What calibration promises. A sum of x may cancel: it is judged by sqrt(rows * sum of x^2).
constexpr double kTolerance = 1e-6;

void expect_equal(const Sums& found, const Sums& expected, const Shape& s) {
  EXPECT_LT(relative_error(found.moment, expected.moment), kTolerance);
  const double rows = static_cast<double>(s.batch) * s.num_heads / s.num_kv_heads * s.tokens;
  const size_t d = s.head_dim;
  for (size_t i = 0; i < expected.sum.size(); ++i) {
    const double energy = expected.moment[i / d * d * d + i % d * (d + 1)];
    EXPECT_LE(std::abs(found.sum[i] - expected.sum[i]), kTolerance * std::sqrt(rows * energy)) << i;
  }
  for (size_t h = 0; h < found.moment.size(); h += d * d) {
    for (size_t i = 0; i < d; ++i) {
      for (size_t j = 0; j < i; ++j) {
        ASSERT_EQ(found.moment[h + i * d + j], found.moment[h + j * d + i]) << "not symmetric";
      }
    }
  }
}

class EveryHeadDim : public testing::TestWithParam<int> {};

// Four tensors of one call as calibration has them: q with grouped heads, k and v inside wider
// rows, o token by token, and lengths that are no multiple of anything.
TEST_P(EveryHeadDim, FourStridedTensorsAreAddedToWhatWasThere) {
  OSCAR_NEEDS_DEVICE();
  const int d = GetParam();
  std::vector<Rows> rows;
  rows.emplace_back(Shape{d, 2, 6, 2, 333, Layout::kHeadsThenTokens}, 1);
  rows.emplace_back(Shape{d, 2, 2, 2, 333, Layout::kPartOfWiderRows}, 2);
  rows.emplace_back(Shape{d, 2, 2, 2, 333, Layout::kPartOfWiderRows}, 3, 1.f, 2.f);
  rows.emplace_back(Shape{d, 2, 6, 2, 333, Layout::kTokensThenHeads}, 4);
  std::vector<const Rows*> all;
  std::vector<Sums> expected;
  for (const Rows& r : rows) {
    all.push_back(&r);
    expected.push_back(float64_sums(r));
  }
  const std::vector<Sums> once = gpu_sums(all, 0, 2), twice = gpu_sums(all, 0, 2, &once);
  for (size_t i = 0; i < rows.size(); ++i) {
    expect_equal(once[i], expected[i], rows[i].shape);
    for (double& x : expected[i].moment) x *= 2;
    EXPECT_LT(relative_error(twice[i].moment, expected[i].moment), kTolerance);
  }
}
TEST_P(EveryHeadDim, LengthsAroundABlockLoseNoRowAndReadNoOther) {
  OSCAR_NEEDS_DEVICE();
  for (const int tokens : {1, 2, 63, 64, 65, 127, 128, 129, 191, 257}) {
    const Rows rows({GetParam(), 1, 2, 1, tokens, Layout::kPartOfWiderRows}, 10 + tokens);
    expect_equal(gpu_sums(rows), float64_sums(rows), rows.shape);
  }
}
INSTANTIATE_TEST_SUITE_P(, EveryHeadDim, testing::Values(64, 80, 96, 128, 192, 256));

TEST(Gram, MoreKvHeadsThanThreadBlocks) {
  OSCAR_NEEDS_DEVICE();
  const Rows rows({128, 1, 640, 320, 3, Layout::kTokensThenHeads}, 5);
  expect_equal(gpu_sums(rows), float64_sums(rows), rows.shape);
}

TEST(Gram, AMillionRowsWithALargeMeanStayWithinTheTolerance) {
  OSCAR_NEEDS_DEVICE();
  // Or so many that each thread block has several blocks of rows to add up.
  const int tokens = oscar_test::unless_slowed(1 << 20, 1 << 16) + 17;
  const Rows rows({64, 1, 1, 1, tokens, Layout::kHeadsThenTokens}, 6, 1.f, 3.f);
  const Sums found = gpu_sums(rows), expected = float64_sums(rows);
  expect_equal(found, expected, rows.shape);
  RecordProperty("relative_error", std::to_string(relative_error(found.moment, expected.moment)));
}

TEST(Gram, HugeAndTinyRowsKeepTheirRelativeAccuracy) {
  OSCAR_NEEDS_DEVICE();
  for (const float scale : {1e-15f, 1e-8f, 1e8f, 1e15f}) {
    const Rows rows({128, 1, 2, 1, 1000, Layout::kHeadsThenTokens}, 7, scale);
    expect_equal(gpu_sums(rows), float64_sums(rows), rows.shape);
  }
}

TEST(Gram, ANanInARowReachesTheSums) {
  OSCAR_NEEDS_DEVICE();
  Rows rows({128, 1, 1, 1, 500, Layout::kHeadsThenTokens}, 8);
  rows.host[rows.at(0, 0, 499) + 7] = kNan;
  rows.device->upload(rows.host);
  const Sums sums = gpu_sums(rows);
  EXPECT_TRUE(std::isnan(sums.moment[7 * 128 + 7]) && std::isnan(sums.sum[7]));
  EXPECT_TRUE(std::isfinite(sums.moment[6 * 128 + 6]) && std::isfinite(sums.sum[6]));
}

TEST(Gram, BatchingDoesNotChangeTheSumsAndRepeatingNotABit) {
  OSCAR_NEEDS_DEVICE();
  const Rows rows({128, 5, 4, 2, 777, Layout::kTokensThenHeads}, 9);
  const std::vector<Sums> together = gpu_sums({&rows}, 0, 5);
  EXPECT_EQ(together, gpu_sums({&rows}, 0, 5));
  std::vector<Sums> apart = gpu_sums({&rows}, 0, 1);
  for (int b = 1; b < 5; ++b) apart = gpu_sums({&rows}, b, 1, &apart);
  EXPECT_LT(relative_error(apart[0].moment, together[0].moment), 1e-9);
}

TEST(Gram, NoRowsAddNothing) {
  OSCAR_NEEDS_DEVICE();
  const Rows none({128, 1, 2, 1, 0}, 11), some({128, 1, 1, 1, 70}, 12);
  const std::vector<Sums> found = gpu_sums({&none, &some}, 0, 1);
  EXPECT_EQ(found[0].moment, std::vector<double>(128 * 128));
  expect_equal(found[1], float64_sums(some), some.shape);
  EXPECT_EQ(gpu_sums(none).sum, std::vector<double>(128));
}

TEST(Gram, RefusesWhatItCannotReadAndAWorkspaceTooSmall) {
  OSCAR_NEEDS_DEVICE();
  const Rows rows({128, 1, 2, 1, 70}, 13);
  DeviceBuffer<double> moment(128 * 128), sum(128);
  oscar::GramParams params{.head_dim = 128, .num_kv_heads = 1, .num_tensors = 1};
  params.tensors[0] = rows.describe(0, 1);
  params.tensors[0].moment = moment.get();
  params.tensors[0].sum = sum.get();
  size_t bytes = 0;
  ASSERT_EQ(oscar::gram_workspace(params, &bytes), cudaSuccess);
  DeviceBuffer<uint8_t> workspace(bytes);
  const auto add = [&](const oscar::GramParams& p, size_t size) {
    return oscar::gram_add(p, workspace.get(), size, nullptr);
  };
  EXPECT_EQ(add(params, bytes - 1), cudaErrorInvalidValue);
  oscar::GramParams bad = params;
  bad.head_dim = 112;
  EXPECT_EQ(add(bad, bytes), cudaErrorNotSupported);
  bad = params;
  bad.tensors[0].rows = rows.device->get() + 1;
  EXPECT_EQ(add(bad, bytes), cudaErrorNotSupported);
  bad = params;
  bad.tensors[0].token_stride = 132;
  EXPECT_EQ(add(bad, bytes), cudaErrorNotSupported);
  bad = params;
  bad.num_kv_heads = 3;
  EXPECT_EQ(add(bad, bytes), cudaErrorInvalidValue);
  bad = params;
  bad.tensors[0].sum = nullptr;
  EXPECT_EQ(add(bad, bytes), cudaErrorInvalidValue);
}

}  // namespace
