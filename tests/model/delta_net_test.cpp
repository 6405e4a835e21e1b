// Gated DeltaNet against the recurrence, token by token in double.
#include "oscar/model/delta_net.h"

#include <gtest/gtest.h>
#include <cmath>
#include <utility>
#include <vector>

namespace {

using namespace oscar;

constexpr auto kF64 = torch::kFloat64;

// The rule as it is written, one head at a time: rows [tokens, d], of one sequence.
std::pair<torch::Tensor, torch::Tensor> recurrence(const DeltaRows& rows, int64_t sequence,
                                                   int64_t head, torch::Tensor state) {
  const int64_t key_head = head / (rows.v.size(1) / rows.k.size(1));
  const auto q = rows.q[sequence][key_head].to(kF64), k = rows.k[sequence][key_head].to(kF64);
  const auto v = rows.v[sequence][head].to(kF64);
  const auto decay = rows.log_decay[sequence][head].to(kF64).exp();
  const auto beta = rows.write_share[sequence][head].to(kF64);
  std::vector<torch::Tensor> out;
  for (int64_t t = 0; t < v.size(0); ++t) {
    state = state * decay[t];
    const auto error = beta[t] * (v[t] - torch::mv(state.t(), k[t]));
    state = state + torch::outer(k[t], error);
    out.push_back(torch::mv(state.t(), q[t]));
  }
  return {torch::stack(out), state};
}

double relative(const torch::Tensor& x, const torch::Tensor& y) {
  return ((x.to(kF64) - y).abs().max() / y.abs().max()).item<double>();
}

torch::Tensor unit(const torch::Tensor& x) { return x / x.square().sum(-1, true).sqrt(); }

DeltaRows random_rows(int64_t tokens) {
  return {.q = unit(torch::randn({2, 2, tokens, 16})) / 4,
          .k = unit(torch::randn({2, 2, tokens, 16})),
          .v = torch::randn({2, 6, tokens, 8}),
          .log_decay = -torch::rand({2, 6, tokens}).square() * 3,
          .write_share = torch::rand({2, 6, tokens})};
}

void expect_rule(const DeltaRows& rows, double bound) {
  const auto start = torch::randn({2, 6, 16, 8});
  auto state = start;
  const auto out = gated_delta_rule(rows, state);
  for (int64_t sequence = 0; sequence < 2; ++sequence) {
    for (int64_t head = 0; head < 6; ++head) {
      const auto [expected, last] =
          recurrence(rows, sequence, head, start[sequence][head].to(kF64));
      EXPECT_LT(relative(out[sequence][head], expected), bound);
      EXPECT_LT(relative(state[sequence][head], last), bound);
    }
  }
}

TEST(GatedDeltaRule, IsTheRecurrenceForEveryLength) {
  torch::manual_seed(2);
  for (const int64_t tokens : {1, 2, 63, 64, 65, 128, 200}) {
    SCOPED_TRACE(tokens);
    expect_rule(random_rows(tokens), 1e-5);
  }
}

// Powers of a chunk's matrix would reach binomials of 63 here, which no float32 cancels.
TEST(GatedDeltaRule, KeepsItsDigitsWhereAllKeysAreAlikeAndNothingDecays) {
  torch::manual_seed(3);
  DeltaRows rows = random_rows(130);
  rows.k = unit(torch::ones_like(rows.k) + 1e-3 * torch::randn_like(rows.k));
  rows.log_decay = torch::full_like(rows.log_decay, -1e-4);
  rows.write_share = torch::full_like(rows.write_share, 0.999);
  expect_rule(rows, 1e-5);
}

TEST(GatedDeltaRule, AStateThatIsForgottenAtOnceDoesNotOverflow) {
  torch::manual_seed(4);
  DeltaRows rows = random_rows(100);
  rows.log_decay = torch::full_like(rows.log_decay, -80);
  expect_rule(rows, 1e-5);
}

DeltaNetWeights random_weights(const DeltaNetSpec& spec, int64_t hidden) {
  const double scale = 1 / std::sqrt(static_cast<double>(hidden));
  return {.in = torch::randn({spec.input_rows(), hidden}) * scale,
          .conv = torch::randn({spec.channels(), spec.taps}) * 0.5,
          .log_rate = torch::randn({spec.num_value_heads}),
          .dt_bias = torch::randn({spec.num_value_heads}),
          .norm = 1 + 0.3 * torch::randn({spec.value_dim}),
          .out = torch::randn({hidden, spec.value_rows()}) * 0.1};
}

// The layer in double: convolution, rule, norm and gate each as its formula reads.
torch::Tensor layer_ref(const torch::Tensor& x, const DeltaNetWeights& w, const DeltaNetSpec& spec,
                        double eps) {
  const int64_t tokens = x.size(1), heads = spec.num_value_heads, c = spec.channels();
  const auto all = torch::linear(x.to(kF64), w.in.to(kF64));
  const auto before = torch::zeros({x.size(0), spec.taps - 1, c}, kF64);
  const auto columns = torch::cat({before, all.narrow(2, 0, c)}, 1);
  auto u = torch::zeros({x.size(0), tokens, c}, kF64);
  for (int64_t j = 0; j < spec.taps; ++j) {
    u += columns.narrow(1, j, tokens) * w.conv.select(1, j).to(kF64);
  }
  u = torch::silu(u);
  const auto rows_of = [&](int64_t first, int64_t count, int64_t d) {
    return u.narrow(2, first, count * d).unflatten(2, {count, d}).transpose(1, 2);
  };
  const auto normal = [](const torch::Tensor& t) {
    return t / (t.square().sum(-1, true) + 1e-6).sqrt();
  };
  const int64_t keys = int64_t{spec.num_key_heads} * spec.key_dim, z = spec.value_rows();
  const auto shares = [&](int64_t first) { return all.narrow(2, first, heads).transpose(1, 2); };
  const DeltaRows rows{
      .q = normal(rows_of(0, spec.num_key_heads, spec.key_dim)) / std::sqrt(spec.key_dim),
      .k = normal(rows_of(keys, spec.num_key_heads, spec.key_dim)),
      .v = rows_of(2 * keys, heads, spec.value_dim),
      .log_decay = -w.log_rate.to(kF64).exp().unsqueeze(1) *
                   torch::softplus(shares(c + z + heads) + w.dt_bias.to(kF64).unsqueeze(1)),
      .write_share = shares(c + z).sigmoid()};
  std::vector<torch::Tensor> sequences;
  for (int64_t i = 0; i < x.size(0); ++i) {
    std::vector<torch::Tensor> out;
    for (int64_t head = 0; head < heads; ++head) {
      const auto o =
          recurrence(rows, i, head, torch::zeros({spec.key_dim, spec.value_dim}, kF64)).first;
      const auto normed = o / (o.square().mean(-1, true) + eps).sqrt() * w.norm.to(kF64);
      const auto gate = all[i].narrow(1, c + head * spec.value_dim, spec.value_dim);
      out.push_back(normed * torch::silu(gate));
    }
    sequences.push_back(torch::cat(out, 1));
  }
  return torch::linear(torch::stack(sequences), w.out.to(kF64));
}

constexpr DeltaNetSpec kSmall{
    .num_key_heads = 2, .num_value_heads = 6, .key_dim = 16, .value_dim = 8, .taps = 4};

TEST(GatedDeltaNet, IsTheLayerInDouble) {
  torch::manual_seed(5);
  const DeltaNetWeights weights = random_weights(kSmall, 24);
  for (const int64_t tokens : {1, 3, 63, 64, 65, 200}) {
    const auto x = torch::randn({2, tokens, 24});
    EXPECT_LT(
        relative(gated_delta_net(x, weights, kSmall, 1e-6), layer_ref(x, weights, kSmall, 1e-6)),
        1e-5)
        << tokens;
  }
}

TEST(GatedDeltaNet, HeadsInSetsAreTheLayerToo) {
  torch::manual_seed(6);
  const DeltaNetSpec spec{
      .num_key_heads = 2, .num_value_heads = 8, .key_dim = 128, .value_dim = 128, .taps = 4};
  constexpr int64_t kTokens = 3000;
  ASSERT_EQ(delta_heads_together(spec, kTokens, /*on_gpu=*/false), 1);
  const DeltaNetWeights weights = random_weights(spec, 8);
  const auto x = torch::randn({1, kTokens, 8});
  EXPECT_LT(relative(gated_delta_net(x, weights, spec, 1e-6), layer_ref(x, weights, spec, 1e-6)),
            1e-5);
}

TEST(GatedDeltaNet, ASequenceThatIsCutGoesOnFromItsState) {
  torch::manual_seed(7);
  const DeltaNetWeights weights = random_weights(kSmall, 24);
  const auto x = torch::randn({2, 150, 24});
  const auto whole = gated_delta_net(x, weights, kSmall, 1e-6).to(kF64);
  DeltaState state;
  std::vector<torch::Tensor> parts;
  int64_t begin = 0;
  for (const int64_t end : {1, 2, 70, 149, 150}) {
    parts.push_back(gated_delta_net(x.slice(1, begin, end), weights, kSmall, 1e-6, &state));
    begin = end;
  }
  EXPECT_LT(relative(torch::cat(parts, 1), whole), 1e-5);
}

TEST(GatedDeltaNet, GivesEachSequenceTheSameAloneAndInABatch) {
  torch::manual_seed(8);
  const DeltaNetWeights weights = random_weights(kSmall, 24);
  const auto x = torch::randn({3, 100, 24});
  const auto batch = gated_delta_net(x, weights, kSmall, 1e-6).to(kF64);
  for (int64_t i = 0; i < 3; ++i) {
    const auto alone = gated_delta_net(x.slice(0, i, i + 1), weights, kSmall, 1e-6);
    EXPECT_LT(relative(alone[0], batch[i]), 1e-6);
  }
}

TEST(GatedDeltaNet, ReadsRowsThatAreStoredHeadByHead) {
  const DeltaNetSpec spec{
      .num_key_heads = 2, .num_value_heads = 4, .key_dim = 1, .value_dim = 1, .taps = 4};
  // Of each key head q, k, two v, two z; then of each two beta and two decays.
  const std::vector<int64_t> expected = {0,  6,  1,  7,  2,  3,  8,  9,  4,  5,
                                         10, 11, 12, 13, 16, 17, 14, 15, 18, 19};
  EXPECT_EQ(delta_row_order(spec), expected);
}

TEST(GatedDeltaNet, MemoryGrowsWithTokensOnlyInWhatAllHeadsShare) {
  const DeltaNetSpec spec{
      .num_key_heads = 16, .num_value_heads = 48, .key_dim = 128, .value_dim = 128, .taps = 4};
  const auto bytes = [&](int64_t tokens) { return delta_net_bytes(spec, tokens, 2, true); };
  EXPECT_EQ(delta_heads_together(spec, 1, true), 16);
  EXPECT_GT(delta_heads_together(spec, 1 << 14, true), 1);
  const int64_t shared = 2 * (spec.input_rows() + spec.value_rows()) + 16 * 48;
  // At most the limit for the rule, and what heads share.
  EXPECT_LE(bytes(1 << 14), (int64_t{4} << 29) + shared * (1 << 14));
}

}  // namespace
