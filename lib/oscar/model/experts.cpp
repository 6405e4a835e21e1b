// Scores, choice, and products grouped by expert.
#include "oscar/model/experts.h"

#include <limits>
#include <optional>

#include "oscar/model/layer_steps.h"

namespace oscar {
namespace {

// Scores with minus infinity for the experts outside the chosen sets.
torch::Tensor within_top_sets(const torch::Tensor& scores, const ExpertsSpec& spec) {
  const torch::Tensor sets = scores.view({scores.size(0), spec.num_sets, -1});
  const torch::Tensor of_set = std::get<0>(sets.topk(2, -1)).sum(-1);
  const torch::Tensor chosen = std::get<1>(of_set.topk(spec.top_sets, -1));
  const torch::Tensor left_out =
      torch::ones_like(of_set, torch::kBool).scatter(1, chosen, /*value=*/0);
  return sets.masked_fill(left_out.unsqueeze(-1), -std::numeric_limits<float>::infinity())
      .view(scores.sizes());
}

// The grouped kernel wants rows that begin at multiples of 16 bytes.
bool is_aligned(const torch::Tensor& x) {
  return x.size(-1) * static_cast<int64_t>(x.element_size()) % 16 == 0;
}

}  // namespace

Routing route(const torch::Tensor& x, const LayerWeights& weights, const ExpertsSpec& spec) {
  const torch::Tensor logits = torch::linear(x.to(torch::kFloat32), weights.router);
  const torch::Tensor scores =
      spec.score == RouterScore::kSoftmax ? logits.softmax(-1) : logits.sigmoid();
  torch::Tensor wanted = spec.choice_bias ? scores + weights.choice_bias : scores;
  if (spec.top_sets < spec.num_sets) wanted = within_top_sets(wanted, spec);
  Routing routing{std::get<1>(wanted.topk(spec.top_k, -1)), {}};
  routing.weights = scores.gather(1, routing.experts);
  // Sigmoids may all be 0 in float32; where they are not, the addend changes no bit.
  constexpr double kTiny = 1e-20;
  if (spec.normalize) routing.weights = routing.weights / (routing.weights.sum(-1, true) + kTiny);
  if (spec.scaling != 1.0) routing.weights = routing.weights * spec.scaling;
  return routing;
}

torch::Tensor expert_products(const torch::Tensor& x, const torch::Tensor& matrices,
                              const torch::Tensor& ends) {
  if (is_aligned(x)) return at::_grouped_mm(x, matrices.transpose(1, 2), ends);
  torch::Tensor out = torch::empty({x.size(0), matrices.size(1)}, x.options());
  const torch::Tensor on_host = ends.to(torch::kCPU, torch::kInt64);
  int64_t begin = 0;
  for (int64_t expert = 0; expert < matrices.size(0); ++expert) {
    const int64_t end = on_host[expert].item<int64_t>();
    torch::Tensor rows = out.slice(0, begin, end);
    at::mm_out(rows, x.slice(0, begin, end), matrices[expert].t());
    begin = end;
  }
  return out;
}

torch::Tensor run_experts(const torch::Tensor& x, const Routing& routing,
                          const LayerWeights& weights) {
  const int64_t tokens = x.size(0), top_k = routing.experts.size(1);
  const auto [sorted, order] =
      routing.experts.flatten().sort(/*stable=*/std::optional<bool>(true), /*dim=*/0);
  const torch::Tensor ends = torch::searchsorted(
      sorted, torch::arange(weights.router.size(0), sorted.options()), /*out_int32=*/true,
      /*right=*/true);
  torch::Tensor inner;
  {
    const torch::Tensor rows = x.index_select(0, order.div(top_k, "floor"));
    inner = gated(expert_products(rows, weights.expert_gate_up, ends), Activation::kSilu);
  }
  const torch::Tensor by_expert = expert_products(inner, weights.expert_down, ends);
  inner.reset();
  torch::Tensor outputs = torch::empty_like(by_expert);
  outputs.index_copy_(0, order, by_expert);
  return torch::bmm(routing.weights.to(x.scalar_type()).unsqueeze(1),
                    outputs.view({tokens, top_k, x.size(1)}))
      .squeeze(1);
}

}  // namespace oscar
