// The steps of the forward pass against float64 loops that round where they say they do.
#include "oscar_kernels/forward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/device_memory.h"
#include "oscar/cache/numeric.h"

namespace {

using oscar::bf16_to_float;
using oscar::float_to_bf16;
using oscar_test::DeviceBuffer;
using Rows = std::vector<uint16_t>;

constexpr uint16_t kNan = 0x7fc0;

Rows random_rows(int64_t count, uint64_t seed, float scale = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Rows rows(static_cast<size_t>(count));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = float_to_bf16(scale * (i % 16 == 3 ? 64.0f : 1.0f) * normal(random));
  }
  return rows;
}

double value(uint16_t bits) { return bf16_to_float(bits); }
double rounded(double x) { return value(float_to_bf16(static_cast<float>(x))); }

// Half a step of bf16 at x, and what fp32 loses before the rounding.
void expect_rounded(uint16_t found, double exact, const char* where, size_t index) {
  const double half_step = std::ldexp(1.0, std::ilogb(std::max(std::abs(exact), 1e-30)) - 8);
  ASSERT_LE(std::abs(value(found) - exact), half_step + 4e-6 * std::abs(exact))
      << where << " at " << index;
}

struct NormCase {
  int64_t rows;
  int width;
  bool adds;
};

void check_norm(const NormCase& c) {
  SCOPED_TRACE(testing::Message() << c.rows << " x " << c.width << (c.adds ? ", added" : ""));
  const int64_t count = c.rows * c.width;
  const Rows x = random_rows(count, 1), added = random_rows(count, 2),
             weight = random_rows(c.width, 3);
  const DeviceBuffer<uint16_t> on_x(x), on_added(added), on_weight(weight);
  DeviceBuffer<uint16_t> sum(Rows(x.size(), kNan)), out(Rows(x.size(), kNan));
  const float eps = 1e-5f;
  ASSERT_CUDA(oscar::add_and_norm({.rows = c.rows,
                                   .width = c.width,
                                   .eps = eps,
                                   .x = on_x.get(),
                                   .added = c.adds ? on_added.get() : nullptr,
                                   .sum = c.adds ? sum.get() : nullptr,
                                   .weight = on_weight.get(),
                                   .out = out.get()},
                                  nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(sum.guards_intact() && out.guards_intact() && on_x.guards_intact());
  const Rows sums = sum.download(), found = out.download();
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto first = static_cast<size_t>(row * c.width);
    std::vector<double> own(static_cast<size_t>(c.width));
    double squares = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      own[i] =
          c.adds ? rounded(value(x[first + i]) + value(added[first + i])) : value(x[first + i]);
      squares += own[i] * own[i];
      if (c.adds) {
        ASSERT_EQ(value(sums[first + i]), own[i]) << "sum at " << first + i;
      }
    }
    const double scale = 1 / std::sqrt(squares / c.width + eps);
    for (size_t i = 0; i < own.size(); ++i) {
      expect_rounded(found[first + i], own[i] * scale * value(weight[i]), "norm", first + i);
    }
  }
}

TEST(ForwardKernels, NormsOfAnyWidthAreThoseOfTheDefinition) {
  OSCAR_NEEDS_DEVICE();
  for (const int width : {8, 64, 576, 2040, 2048, 2056, 4096, 5120, 8192, 16384}) {
    check_norm({3, width, false});
    check_norm({3, width, true});
  }
  check_norm({1000, 4096, true});
}

TEST(ForwardKernels, ASumMayBeWrittenOverEitherOfItsTerms) {
  OSCAR_NEEDS_DEVICE();
  const Rows x = random_rows(4096, 1), added = random_rows(4096, 2), weight = random_rows(4096, 3);
  std::vector<Rows> sums, norms;
  for (const int over : {0, 1, 2}) {
    const DeviceBuffer<uint16_t> on_x(x), on_added(added), on_weight(weight), apart(4096),
        out(4096);
    uint16_t* const sum = over == 0 ? apart.get() : over == 1 ? on_x.get() : on_added.get();
    ASSERT_CUDA(oscar::add_and_norm({.rows = 1,
                                     .width = 4096,
                                     .eps = 1e-6f,
                                     .x = on_x.get(),
                                     .added = on_added.get(),
                                     .sum = sum,
                                     .weight = on_weight.get(),
                                     .out = out.get()},
                                    nullptr));
    sums.push_back((over == 0 ? apart : over == 1 ? on_x : on_added).download());
    norms.push_back(out.download());
  }
  EXPECT_TRUE(sums[1] == sums[0] && sums[2] == sums[0]);
  EXPECT_TRUE(norms[1] == norms[0] && norms[2] == norms[0]);
}

struct RotateCase {
  int64_t sequences, tokens;
  int heads, kv_heads, head_dim, rotary_dim;
  bool norms;
};

// The row of a head as q or k, in float64 between the roundings.
std::vector<double> expected_row(const RotateCase& c, const uint16_t* row, const Rows& weight,
                                 const float* cos, const float* sin, double eps) {
  std::vector<double> x(row, row + c.head_dim);
  double squares = 0;
  for (int i = 0; i < c.head_dim; ++i) {
    x[i] = value(row[i]);
    squares += x[i] * x[i];
  }
  const double scale = 1 / std::sqrt(squares / c.head_dim + eps);
  if (c.norms) {
    for (int i = 0; i < c.head_dim; ++i) x[i] = rounded(x[i] * scale * value(weight[i]));
  }
  std::vector<double> y = x;
  const int half = c.rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
  return y;
}

void check_rotation(const RotateCase& c) {
  SCOPED_TRACE(testing::Message() << c.heads << " + " << c.kv_heads << " heads of " << c.head_dim
                                  << ", " << c.rotary_dim << " turn" << (c.norms ? ", norms" : ""));
  const int64_t rows = c.sequences * c.tokens, in_row = c.heads + 2 * c.kv_heads;
  const int64_t half = c.rotary_dim / 2;
  const Rows qkv = random_rows(rows * in_row * c.head_dim, 4), q_norm = random_rows(c.head_dim, 5),
             k_norm = random_rows(c.head_dim, 6);
  std::vector<float> cos(static_cast<size_t>(c.tokens * half) + 1), sin(cos.size());
  std::mt19937_64 random(7);
  std::uniform_real_distribution<float> angle(-4, 4);
  for (size_t i = 0; i < cos.size(); ++i) {
    const float a = angle(random);
    cos[i] = std::cos(a), sin[i] = std::sin(a);
  }
  const DeviceBuffer<uint16_t> on_qkv(qkv), on_q_norm(q_norm), on_k_norm(k_norm);
  const DeviceBuffer<float> on_cos(cos), on_sin(sin);
  DeviceBuffer<uint16_t> q(Rows(static_cast<size_t>(rows * c.heads * c.head_dim), kNan)),
      k(Rows(static_cast<size_t>(rows * c.kv_heads * c.head_dim), kNan));
  const float eps = 1e-6f;
  ASSERT_CUDA(oscar::norm_and_rotate({.rows = rows,
                                      .tokens = c.tokens,
                                      .num_qo_heads = c.heads,
                                      .num_kv_heads = c.kv_heads,
                                      .head_dim = c.head_dim,
                                      .rotary_dim = c.rotary_dim,
                                      .eps = eps,
                                      .qkv = on_qkv.get(),
                                      .q_norm = c.norms ? on_q_norm.get() : nullptr,
                                      .k_norm = c.norms ? on_k_norm.get() : nullptr,
                                      .cos = on_cos.get(),
                                      .sin = on_sin.get(),
                                      .q = q.get(),
                                      .k = k.get()},
                                     nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(q.guards_intact() && k.guards_intact());
  const Rows found_q = q.download(), found_k = k.download();
  // A norm that fp32 puts on the other side of a rounding moves what is turned by a step of it.
  double off = 0;
  int64_t values = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int head = 0; head < c.heads + c.kv_heads; ++head) {
      const bool query = head < c.heads;
      const auto at = static_cast<size_t>((row * in_row + head) * c.head_dim);
      const auto place = static_cast<size_t>(row % c.tokens * half);
      const std::vector<double> exact =
          expected_row(c, &qkv[at], query ? q_norm : k_norm, &cos[place], &sin[place], eps);
      const uint16_t* const found =
          query ? &found_q[static_cast<size_t>((row * c.heads + head) * c.head_dim)]
                : &found_k[static_cast<size_t>((row * c.kv_heads + head - c.heads) * c.head_dim)];
      double largest = 0;
      for (const double y : exact) largest = std::max(largest, std::abs(y));
      for (int i = 0; i < c.head_dim; ++i, ++values) {
        const double error = std::abs(value(found[i]) - exact[i]);
        ASSERT_LE(error, largest / 128) << "row " << row << ", head " << head << ", " << i;
        off += error > std::abs(exact[i]) / 256 + 2e-6 * largest;
      }
    }
  }
  EXPECT_LE(off, 1e-3 * static_cast<double>(values));
}

TEST(ForwardKernels, HeadsAreNormedAndTurnedAsTheDefinitionSays) {
  OSCAR_NEEDS_DEVICE();
  for (const bool norms : {false, true}) {
    check_rotation({1, 1, 1, 1, 64, 64, norms});
    check_rotation({3, 37, 9, 3, 64, 64, norms});
    check_rotation({2, 65, 32, 8, 128, 128, norms});
    check_rotation({2, 33, 96, 8, 128, 64, norms});
    check_rotation({1, 20, 4, 1, 256, 256, norms});
    check_rotation({1, 20, 4, 1, 256, 80, norms});
    check_rotation({2, 5, 2, 2, 128, 0, norms});
  }
}

TEST(ForwardKernels, GatesAreRoundedTwice) {
  OSCAR_NEEDS_DEVICE();
  for (const int width : {8, 48, 1536, 2048, 12288}) {
    const int64_t rows = width == 48 ? 70000 : 5;  // more rows than a grid is high
    const Rows gate_up = random_rows(rows * 2 * width, 8, 0.5f);
    const DeviceBuffer<uint16_t> on_gate_up(gate_up);
    DeviceBuffer<uint16_t> out(Rows(static_cast<size_t>(rows * width), kNan));
    ASSERT_CUDA(oscar::gate(
        {.rows = rows, .width = width, .gate_up = on_gate_up.get(), .out = out.get()}, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(out.guards_intact());
    const Rows found = out.download();
    int64_t off = 0;
    for (int64_t row = 0; row < rows; ++row) {
      for (int i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(row * 2 * width + i);
        const double g = value(gate_up[at]), up = value(gate_up[at + static_cast<size_t>(width)]);
        const double silu = g / (1 + std::exp(-g)), exact = rounded(silu) * up;
        const double error = std::abs(value(found[static_cast<size_t>(row * width + i)]) - exact);
        // Below g = -88.7 exp(-g) is no float, and the kernel's silu is 0.
        const double beyond_float = std::abs(up) * 88.8 * std::exp(-88.7);
        // Where fp32 puts silu on the other side of a rounding, a step of it.
        ASSERT_LE(error, std::abs(exact) / 100 + beyond_float) << "row " << row << ", " << i;
        off += error > std::abs(exact) / 256 + beyond_float;
      }
    }
    EXPECT_LE(static_cast<double>(off), 1e-4 * static_cast<double>(rows * width));
  }
}

TEST(ForwardKernels, SizesThatNoneTakesAreRefused) {
  const uint16_t some[8] = {};
  uint16_t out[8];
  for (const int width : {0, 4, 12, 16392}) {
    EXPECT_EQ(oscar::add_and_norm(
                  {.rows = 1, .width = width, .x = some, .weight = some, .out = out}, nullptr),
              cudaErrorNotSupported);
  }
  EXPECT_EQ(
      oscar::add_and_norm(
          {.rows = 1, .width = 8, .x = some, .added = some, .weight = some, .out = out}, nullptr),
      cudaErrorInvalidValue);
  EXPECT_EQ(oscar::gate({.rows = 1, .width = 12, .gate_up = some, .out = out}, nullptr),
            cudaErrorNotSupported);
  for (const auto& [d, rotary] : {std::pair{80, 80}, {96, 96}, {192, 192}, {128, 132}, {128, 4}}) {
    EXPECT_EQ(oscar::norm_and_rotate({.rows = 1, .tokens = 1, .head_dim = d, .rotary_dim = rotary},
                                     nullptr),
              cudaErrorNotSupported)
        << d << ", " << rotary;
  }
  EXPECT_EQ(
      oscar::norm_and_rotate(
          {.rows = 1, .tokens = 1, .head_dim = 128, .rotary_dim = 128, .q_norm = some}, nullptr),
      cudaErrorInvalidValue);
  // Nothing to do needs no device.
  EXPECT_EQ(oscar::gate({.rows = 0, .width = 8}, nullptr), cudaSuccess);
}

}  // namespace
