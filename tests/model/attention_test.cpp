// Routing and experts against dull loops in double, and whole models with them.
#include "oscar/model/attention.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/small_model.h"
#include "oscar/base/error.h"

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr int64_t kTokens = 37, kHidden = 24, kWidth = 16, kExperts = 8;

LayerWeights random_experts(int64_t hidden = kHidden, int64_t width = kWidth) {
  torch::manual_seed(5);
  LayerWeights weights;
  weights.router = torch::randn({kExperts, hidden}) * 0.3;
  weights.choice_bias = torch::randn({kExperts}) * 0.5;
  weights.expert_gate_up = torch::randn({kExperts, 2 * width, hidden}) * 0.2;
  weights.expert_down = torch::randn({kExperts, hidden, width}) * 0.2;
  return weights;
}

ExpertsSpec qwen_spec() {
  return {.num_experts = kExperts, .top_k = 3, .intermediate_size = kWidth, .normalize = true};
}

ExpertsSpec glm_spec() {
  return {.num_experts = kExperts,
          .top_k = 3,
          .intermediate_size = kWidth,
          .score = RouterScore::kSigmoid,
          .choice_bias = true,
          .num_sets = 4,
          .top_sets = 2,
          .normalize = true,
          .scaling = 2.5};
}

// Indices of the `count` largest values, best first.
std::vector<int> largest(const std::vector<double>& values, int count) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, [&](int a, int b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

// The weight of every expert for one token; 0 for those that are not chosen.
std::vector<double> weights_ref(const torch::Tensor& x, const LayerWeights& w,
                                const ExpertsSpec& spec) {
  const torch::Tensor logits = w.router.to(torch::kFloat64).mv(x.to(torch::kFloat64));
  std::vector<double> scores(kExperts), wanted(kExperts), result(kExperts, 0.0);
  double total = 0;
  for (int e = 0; e < kExperts; ++e) total += std::exp(logits[e].item<double>());
  for (int e = 0; e < kExperts; ++e) {
    const double logit = logits[e].item<double>();
    scores[e] =
        spec.score == RouterScore::kSoftmax ? std::exp(logit) / total : 1 / (1 + std::exp(-logit));
    wanted[e] = scores[e] + (spec.choice_bias ? w.choice_bias[e].item<double>() : 0);
  }
  const int of_set = kExperts / spec.num_sets;
  std::vector<double> sets;
  for (int s = 0; s < spec.num_sets; ++s) {
    const std::vector<double> own(wanted.begin() + s * of_set, wanted.begin() + (s + 1) * of_set);
    const auto best = largest(own, 2);
    sets.push_back(own[best[0]] + own[best[1]]);
  }
  const auto chosen = largest(sets, spec.top_sets);
  for (int e = 0; e < kExperts; ++e) {
    if (std::ranges::find(chosen, e / of_set) == chosen.end()) wanted[e] = -1e300;
  }
  double sum = 0;
  for (const int e : largest(wanted, spec.top_k)) sum += result[e] = scores[e];
  for (double& weight : result) weight *= spec.scaling / (spec.normalize ? sum : 1);
  return result;
}

torch::Tensor expert_ref(const torch::Tensor& x, const LayerWeights& w, int expert) {
  const auto in = x.to(torch::kFloat64);
  const auto gate_up = w.expert_gate_up[expert].to(torch::kFloat64).mv(in).chunk(2);
  const auto gated = gate_up[0] * torch::sigmoid(gate_up[0]) * gate_up[1];
  return w.expert_down[expert].to(torch::kFloat64).mv(gated);
}

void expect_equal_to_loops(const ExpertsSpec& spec, const char* what) {
  const LayerWeights weights = random_experts();
  const auto x = torch::randn({kTokens, kHidden});
  const Routing routing = route(x, weights, spec);
  const auto y = run_experts(x, routing, weights);
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto expected = weights_ref(x[t], weights, spec);
    auto sum = torch::zeros({kHidden}, torch::kFloat64);
    for (int e = 0; e < kExperts; ++e) {
      if (expected[e] != 0) sum += expected[e] * expert_ref(x[t], weights, e);
    }
    std::vector<double> found(kExperts, 0.0);
    for (int i = 0; i < spec.top_k; ++i) {
      found[routing.experts[t][i].item<int64_t>()] += routing.weights[t][i].item<double>();
    }
    for (int e = 0; e < kExperts; ++e) EXPECT_NEAR(found[e], expected[e], 1e-5) << what << " " << t;
    EXPECT_LT((y[t] - sum).abs().max().item<double>(), 1e-5) << what << ", token " << t;
  }
}

TEST(Experts, AnswerAsInDullLoops) {
  expect_equal_to_loops(qwen_spec(), "softmax, normalized");
  ExpertsSpec plain = qwen_spec();
  plain.normalize = false;
  expect_equal_to_loops(plain, "softmax, plain");
  expect_equal_to_loops(glm_spec(), "sigmoid, sets");
  ExpertsSpec one_set = glm_spec();
  one_set.num_sets = one_set.top_sets = 1;
  one_set.normalize = false;
  expect_equal_to_loops(one_set, "sigmoid, one set, plain");
}

TEST(Experts, TheBiasOfTheChoiceIsNoPartOfTheWeights) {
  LayerWeights weights = random_experts();
  const auto x = torch::randn({kTokens, kHidden});
  const Routing before = route(x, weights, glm_spec());
  weights.choice_bias = weights.choice_bias + 1;  // for all alike: no choice changes
  const Routing after = route(x, weights, glm_spec());
  EXPECT_TRUE(torch::equal(before.experts, after.experts));
  EXPECT_TRUE(torch::equal(before.weights, after.weights));
}

TEST(Experts, ProductsAreThoseOfEachExpertWhateverTheWidth) {
  for (const int64_t width : {5, 16}) {  // the grouped kernel takes only the second
    torch::manual_seed(6);
    const auto x = torch::randn({12, width}), matrices = torch::randn({4, 7, width});
    const auto ends = torch::tensor({3, 3, 11, 12}, torch::kInt32);  // the second has no rows
    const auto y = expert_products(x, matrices, ends);
    const int expert_of[] = {0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 3};
    for (int i = 0; i < 12; ++i) {
      EXPECT_LT((y[i] - matrices[expert_of[i]].mv(x[i])).abs().max().item<double>(), 1e-5)
          << width << ", row " << i;
    }
  }
}

TEST(Experts, ATokensAnswerDoesNotDependOnTheOthers) {
  const LayerWeights weights = random_experts();
  const auto x = torch::randn({kTokens, kHidden});
  const auto all = run_experts(x, route(x, weights, glm_spec()), weights);
  for (const int64_t t : {0, 17, 36}) {
    const auto one = x.slice(0, t, t + 1);
    const auto alone = run_experts(one, route(one, weights, glm_spec()), weights);
    EXPECT_LT((alone[0] - all[t]).abs().max().item<double>(), 1e-5);
  }
}

TEST(Experts, AllTokensMayChooseTheSameOnes) {
  LayerWeights weights = random_experts();
  weights.choice_bias = torch::tensor({9.f, 9.f, 9.f, 0.f, 0.f, 0.f, 0.f, 0.f});
  const auto x = torch::randn({kTokens, kHidden});
  ExpertsSpec spec = glm_spec();
  spec.num_sets = spec.top_sets = 1;
  const Routing routing = route(x, weights, spec);
  EXPECT_LE(routing.experts.max().item<int64_t>(), 2);
  const auto y = run_experts(x, routing, weights);
  EXPECT_TRUE(torch::isfinite(y).all().item<bool>());
  EXPECT_GT(y.abs().min().item<double>(), 0);
}

const char* const kMixedConfig =
    R"({"architectures":["Glm4MoeForCausalLM"],"model_type":"glm4_moe","hidden_size":24,
    "intermediate_size":40,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
    "head_dim":8,"vocab_size":64,"max_position_embeddings":128,"n_routed_experts":4,
    "num_experts_per_tok":2,"moe_intermediate_size":16,"attention_bias":true})";

TEST(Experts, ALayerCountsTheBytesOfAllItsExperts) {
  Model model(make_tensors(kMixedConfig), kMixedConfig);
  const size_t attention = 2 * 24 + (32 + 16 + 16) * 25 + 24 * 32;
  EXPECT_EQ(model.transformer->layer_bytes(0), 4 * (attention + 3 * 40 * 24));
  EXPECT_EQ(model.transformer->layer_bytes(1),
            4 * (attention + 4 * 24 + 4 + (4 + 1) * 3 * 16 * 24));
}

TEST(Experts, ARouterStaysInFloat32) {
  Model model(make_tensors(kMixedConfig), kMixedConfig);
  Transformer half(model.checkpoint, {torch::kCPU, torch::kBFloat16});
  const auto layer = half.load_layer(1);
  EXPECT_EQ(layer->router.scalar_type(), torch::kFloat32);
  EXPECT_EQ(layer->expert_down.scalar_type(), torch::kBFloat16);
  const size_t attention = 2 * 24 + (32 + 16 + 16) * 25 + 24 * 32;
  EXPECT_EQ(half.layer_bytes(1), 2 * (attention + (4 + 1) * 3 * 16 * 24) + 4 * (4 * 24 + 4));
  const auto y = half.forward_layer(1, *layer, torch::randn({1, 5, 24}).to(torch::kBFloat16));
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
}

TEST(Experts, TheSharedExpertAndTheRoutedOnesAreAdded) {
  const Tensors tensors = make_tensors(kMixedConfig);
  const auto ids = torch::randint(0, 64, {2, 9}, torch::kInt64);
  const auto without = [&](const std::vector<std::string>& parts) {
    Tensors changed = tensors;
    for (auto& [name, tensor] : changed) {
      for (const std::string& part : parts) {
        if (name.find(part) != std::string::npos) std::ranges::fill(tensor.values, 0.f);
      }
    }
    return Model(changed, kMixedConfig).hidden(ids);
  };
  const auto whole = without({}), unshared = without({"shared_experts"});
  const auto shared = whole - unshared, routed = whole - without({"mlp.experts."});
  EXPECT_GT(shared.abs().max().item<double>(), 1e-2);
  EXPECT_GT(routed.abs().max().item<double>(), 1e-2);
  const auto neither = without({"shared_experts", "mlp.experts."});
  EXPECT_LT((whole - neither - shared - routed).abs().max().item<double>(), 1e-5);
}

TEST(Experts, ADamagedOrMissingExpertIsNamed) {
  const auto message = [](const Tensors& tensors) -> std::string {
    try {
      Model(tensors, kMixedConfig).hidden(torch::zeros({1, 2}, torch::kInt64));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string name = "model.layers.1.mlp.experts.2.up_proj.weight";
  Tensors missing = make_tensors(kMixedConfig);
  missing.erase(name);
  EXPECT_NE(message(missing).find(name), std::string::npos);
  Tensors damaged = make_tensors(kMixedConfig);
  damaged[name].values[3] = NAN;
  EXPECT_NE(message(damaged).find(name), std::string::npos);
  Tensors further = make_tensors(kMixedConfig);
  further["model.layers.2.eh_proj.weight"] = {{1}, {1.0f}};
  EXPECT_EQ(message(further), "accepted");  // guesses tokens further ahead
  further["model.layers.3.eh_proj.weight"] = {{1}, {1.0f}};
  EXPECT_NE(message(further).find("model.layers.3.eh_proj.weight"), std::string::npos);
}

}  // namespace
