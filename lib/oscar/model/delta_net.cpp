// Gated DeltaNet: the linear attention of hybrid models (arXiv 2412.06464), in chunks.
#include "oscar/model/delta_net.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/model/transformer.h"

namespace oscar {

// The rule, chunk by chunk.

namespace {

// x [batch, heads, tokens, ..] with zeros behind, as [batch, heads, chunks, chunk, ..]. Rows of
// zeros leave the state as it is.
torch::Tensor in_chunks(const torch::Tensor& x, int64_t chunk) {
  const int64_t tokens = x.size(2), missing = (chunk - tokens % chunk) % chunk;
  torch::Tensor whole = x;
  if (missing > 0) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape[2] = missing;
    whole = torch::cat({x, torch::zeros(shape, x.options())}, 2);
  }
  return whole.unflatten(2, {-1, chunk});
}

// x of key heads as of the value heads that read them: [batch, value heads, ..].
torch::Tensor for_value_heads(const torch::Tensor& x, int64_t value_heads) {
  return x.repeat_interleave(value_heads / x.size(1), 1);
}

torch::Tensor power_of_e(const torch::Tensor& x) {
  return by_pieces(x, [](torch::Tensor& out, const torch::Tensor& in) { at::exp_out(out, in); });
}

// exp(c_i - c_j) for j <= i, else 0: the difference above the diagonal would overflow. c [.., n].
torch::Tensor decay_between(const torch::Tensor& c) {
  const int64_t n = c.size(-1);
  const torch::Tensor later = torch::ones({n, n}, c.options().dtype(torch::kBool)).triu(1);
  return power_of_e((c.unsqueeze(-1) - c.unsqueeze(-2))
                        .masked_fill_(later, -std::numeric_limits<float>::infinity()));
}

}  // namespace

torch::Tensor gated_delta_rule(const DeltaRows& rows, torch::Tensor& state, int64_t together) {
  const int64_t tokens = rows.v.size(2), heads = rows.v.size(1);
  const int64_t key_dim = rows.k.size(3), value_dim = rows.v.size(3);
  const int64_t chunk = std::min(together, tokens);
  const torch::Tensor q = in_chunks(rows.q, chunk), k = in_chunks(rows.k, chunk);
  const torch::Tensor share = in_chunks(rows.write_share, chunk).unsqueeze(-1);
  const torch::Tensor c = in_chunks(rows.log_decay, chunk).cumsum(-1);
  const torch::Tensor between = decay_between(c), since_begin = power_of_e(c).unsqueeze(-1);

  // What each token writes, were the state before the chunk zero, and what that state takes off:
  // (I + strictly lower (beta k k^T decay))^-1 of beta v and of beta decay k.
  torch::Tensor written, taken;
  {
    const torch::Tensor system =
        for_value_heads(torch::matmul(k, k.transpose(-1, -2)), heads) * between * share;
    const torch::Tensor sides = torch::cat(
        {in_chunks(rows.v, chunk) * share, for_value_heads(k, heads) * (share * since_begin)}, -1);
    const torch::Tensor solved = torch::linalg_solve_triangular(
        system, sides, /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
    written = solved.narrow(-1, 0, value_dim);
    taken = solved.narrow(-1, value_dim, key_dim);
  }
  const torch::Tensor scores =
      for_value_heads(torch::matmul(q, k.transpose(-1, -2)), heads) * between;
  const torch::Tensor reading = for_value_heads(q, heads) * since_begin;
  const torch::Tensor last = c.narrow(-1, chunk - 1, 1);
  const torch::Tensor kept_keys = for_value_heads(k, heads) * power_of_e(last - c).unsqueeze(-1);
  const torch::Tensor whole_decay = power_of_e(last).unsqueeze(-1);

  torch::Tensor out = torch::empty_like(written);
  for (int64_t i = 0; i < out.size(2); ++i) {
    const torch::Tensor news = written.select(2, i) - torch::matmul(taken.select(2, i), state);
    out.select(2, i).copy_(torch::matmul(reading.select(2, i), state) +
                           torch::matmul(scores.select(2, i), news));
    state = state * whole_decay.select(2, i) +
            torch::matmul(kept_keys.select(2, i).transpose(-1, -2), news);
  }
  return out.flatten(2, 3).narrow(2, 0, tokens);
}

// From the layer's input to the rows of some heads, and from their outputs to the layer's.

namespace {

// What the heads share: the products of the input, and the columns before it.
struct DeltaInputs {
  torch::Tensor channels;  // [batch, tokens, channels]
  torch::Tensor z;         // [batch, tokens, value_rows]
  torch::Tensor beta;      // [batch, num_value_heads, tokens] float32
  torch::Tensor decay;     // [batch, num_value_heads, tokens] float32
  torch::Tensor before;    // [batch, taps - 1, channels]
};

torch::Tensor smooth_step(const torch::Tensor& x) {
  return by_pieces(x,
                   [](torch::Tensor& out, const torch::Tensor& in) { at::softplus_out(out, in); });
}

DeltaInputs read_inputs(const torch::Tensor& x, const DeltaNetWeights& weights,
                        const DeltaNetSpec& spec, const DeltaState* state) {
  const torch::Tensor all = torch::linear(x, weights.in);
  const int64_t channels = spec.channels(), values = spec.value_rows();
  const int64_t heads = spec.num_value_heads;
  const auto of_heads = [&](int64_t first) {
    return all.narrow(2, first, heads).transpose(1, 2).contiguous();
  };
  DeltaInputs in;
  in.channels = all.narrow(2, 0, channels);
  in.z = all.narrow(2, channels, values);
  in.beta = logistic(of_heads(channels + values)).to(torch::kFloat32);
  const torch::Tensor step = smooth_step(of_heads(channels + values + heads).to(torch::kFloat32) +
                                         weights.dt_bias.unsqueeze(1));
  in.decay = step * weights.log_rate.exp().neg().unsqueeze(1);
  in.before = state != nullptr && state->columns.defined()
                  ? state->columns
                  : torch::zeros({x.size(0), spec.taps - 1, channels}, all.options());
  return in;
}

// Channels `first` on behind the causal convolution of `taps` tokens and SiLU, as rows of heads
// [batch, heads, tokens, d] float32. Taps are added in float32 and rounded once.
torch::Tensor convolved(const DeltaInputs& in, const DeltaNetWeights& weights, int64_t first,
                        int64_t heads, int64_t d) {
  const torch::Tensor columns = torch::cat(
      {in.before.narrow(2, first, heads * d), in.channels.narrow(2, first, heads * d)}, 1);
  const torch::Tensor taps = weights.conv.narrow(0, first, heads * d).to(torch::kFloat32);
  const int64_t tokens = in.channels.size(1);
  torch::Tensor sum = columns.narrow(1, 0, tokens).to(torch::kFloat32) * taps.select(1, 0);
  for (int64_t j = 1; j < taps.size(1); ++j) {
    sum.addcmul_(columns.narrow(1, j, tokens).to(torch::kFloat32), taps.select(1, j));
  }
  return activated(sum.to(columns.scalar_type()), Activation::kSilu)
      .to(torch::kFloat32)
      .unflatten(2, {heads, d})
      .transpose(1, 2)
      .contiguous();
}

// Of length 1, as transformers has it: x / sqrt(sum of x^2 + 1e-6).
torch::Tensor normalized(const torch::Tensor& x) {
  constexpr double kEps = 1e-6;
  return x * x.square().sum(-1, /*keepdim=*/true).add_(kEps).rsqrt_();
}

DeltaRows rows_of_heads(const DeltaInputs& in, const DeltaNetWeights& weights,
                        const DeltaNetSpec& spec, int64_t first, int64_t count) {
  const int64_t shared = spec.value_heads_per_key(), dk = spec.key_dim, dv = spec.value_dim;
  const int64_t all_keys = int64_t{spec.num_key_heads} * dk;
  const double scale = 1 / std::sqrt(static_cast<double>(dk));
  return {.q = normalized(convolved(in, weights, first * dk, count, dk)).mul_(scale),
          .k = normalized(convolved(in, weights, all_keys + first * dk, count, dk)),
          .v = convolved(in, weights, 2 * all_keys + first * shared * dv, count * shared, dv),
          .log_decay = in.decay.narrow(1, first * shared, count * shared),
          .write_share = in.beta.narrow(1, first * shared, count * shared)};
}

// Outputs o [batch, heads, tokens, value_dim] normed over each head and gated by z: [batch,
// tokens, heads * value_dim] in z's dtype, rounded where transformers rounds.
torch::Tensor normed_and_gated(const torch::Tensor& o, const torch::Tensor& z,
                               const torch::Tensor& weight, double eps) {
  const auto dtype = z.scalar_type();
  const torch::Tensor rows = o.transpose(1, 2).to(dtype).to(torch::kFloat32);
  const torch::Tensor normed = torch::rms_norm(rows, {rows.size(3)}, {}, eps).to(dtype) * weight;
  const torch::Tensor gate = activated(z.to(torch::kFloat32), Activation::kSilu);
  return (normed.flatten(2).to(torch::kFloat32) * gate).to(dtype);
}

}  // namespace

torch::Tensor gated_delta_net(const torch::Tensor& x, const DeltaNetWeights& weights,
                              const DeltaNetSpec& spec, double rms_norm_eps, DeltaState* state) {
  const int64_t batch = x.size(0), tokens = x.size(1);
  const int64_t shared = spec.value_heads_per_key(), dv = spec.value_dim;
  const DeltaInputs in = read_inputs(x, weights, spec, state);
  const int64_t together = delta_heads_together(spec, batch * tokens, x.is_cuda());
  torch::Tensor out = torch::empty({batch, tokens, spec.value_rows()}, x.options());
  std::vector<torch::Tensor> states;
  for (int64_t first = 0; first < spec.num_key_heads; first += together) {
    const int64_t count = std::min(together, spec.num_key_heads - first);
    const int64_t value = first * shared, values = count * shared;
    torch::Tensor rule = state != nullptr && state->rule.defined()
                             ? state->rule.narrow(1, value, values)
                             : torch::zeros({batch, values, spec.key_dim, dv}, in.beta.options());
    const torch::Tensor o = gated_delta_rule(rows_of_heads(in, weights, spec, first, count), rule);
    out.narrow(2, value * dv, values * dv)
        .copy_(normed_and_gated(o, in.z.narrow(2, value * dv, values * dv), weights.norm,
                                rms_norm_eps));
    if (state != nullptr) states.push_back(rule);
  }
  if (state != nullptr) {
    state->rule = torch::cat(states, 1);
    const torch::Tensor seen = torch::cat({in.before, in.channels}, 1);
    state->columns = seen.narrow(1, tokens, spec.taps - 1).contiguous();
  }
  return torch::linear(out, weights.out);
}

// Memory, and the order of rows.

namespace {

// Numbers in float32 that one key head with its value heads takes for each token, at the worst
// moment: rows of q and k, those of v, of both sides of the triangular system and of its solution,
// q and k once more for each value head, outputs, and three matrices of a chunk's tokens.
int64_t values_of_head(const DeltaNetSpec& spec) {
  const int64_t dk = spec.key_dim, dv = spec.value_dim;
  return 4 * dk + spec.value_heads_per_key() * (6 * dk + 6 * dv + 5 * kDeltaTokens);
}

constexpr int64_t kHostValues = int64_t{1} << 25, kDeviceValues = int64_t{1} << 29;

}  // namespace

int64_t delta_heads_together(const DeltaNetSpec& spec, int64_t batch_tokens, bool on_gpu) {
  const int64_t of_head = values_of_head(spec) * std::max<int64_t>(batch_tokens, 1);
  return std::clamp<int64_t>((on_gpu ? kDeviceValues : kHostValues) / of_head, 1,
                             spec.num_key_heads);
}

int64_t delta_net_bytes(const DeltaNetSpec& spec, int64_t batch_tokens, int64_t element_bytes,
                        bool on_gpu) {
  const int64_t of_rule =
      delta_heads_together(spec, batch_tokens, on_gpu) * values_of_head(spec) * 4;
  // Products of the input, outputs, and beta and decay of each head in float32, twice on the way.
  const int64_t shared = element_bytes * (spec.input_rows() + spec.value_rows()) +
                         int64_t{4} * 4 * spec.num_value_heads;
  return batch_tokens * (of_rule + shared);
}

int64_t delta_state_bytes(const DeltaNetSpec& spec, int64_t element_bytes) {
  return 4 * spec.value_rows() * spec.key_dim + (spec.taps - 1) * spec.channels() * element_bytes;
}

std::vector<int64_t> delta_row_order(const DeltaNetSpec& spec) {
  const int64_t shared = spec.value_heads_per_key(), keys = spec.num_key_heads;
  const int64_t dk = spec.key_dim, values = shared * spec.value_dim;
  const int64_t of_head = 2 * dk + 2 * values, heads_end = keys * of_head;
  std::vector<int64_t> order;
  const auto add = [&](int64_t begin, int64_t stride, int64_t first, int64_t rows) {
    for (int64_t head = 0; head < keys; ++head) {
      for (int64_t row = 0; row < rows; ++row) order.push_back(begin + head * stride + first + row);
    }
  };
  add(0, of_head, 0, dk);
  add(0, of_head, dk, dk);
  add(0, of_head, 2 * dk, values);
  add(0, of_head, 2 * dk + values, values);
  add(heads_end, 2 * shared, 0, shared);
  add(heads_end, 2 * shared, shared, shared);
  return order;
}

}  // namespace oscar
