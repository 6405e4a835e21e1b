#include "oscar/model/transformer.h"

#include <gtest/gtest.h>
#include <cmath>
#include <limits>

#include "model/small_model.h"
#include "oscar/base/error.h"
#include "oscar/model/attention.h"

namespace oscar {

// What a layer does between its products, on the host.

namespace {

TEST(LayerSteps, TheGateIsThatOfTorchWhateverTheNumberOfThreads) {
  torch::manual_seed(1);
  const int before = at::get_num_threads();
  struct Case {
    int64_t rows, width;
  };
  // Rows that no number of threads below divides; with and without something over a vector's
  // length; more than a piece in one row.
  for (const auto& [rows, width] : {Case{337, 1152}, {337, 1155}, {5, 40000}}) {
    for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
      const auto gate_up = torch::randn({3, rows, 2 * width}).to(dtype);
      const auto halves = gate_up.chunk(2, -1);
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
        at::set_num_threads(1);
        const auto gate = activation == Activation::kSilu ? torch::silu(halves[0])
                                                          : torch::gelu(halves[0], "tanh");
        const auto expected = gate * halves[1];
        for (int threads = 1; threads <= 9; ++threads) {
          at::set_num_threads(threads);
          EXPECT_TRUE(torch::equal(expected, gated(gate_up, activation)))
              << dtype << ", width " << width << ", " << threads << " threads";
        }
      }
    }
  }
  at::set_num_threads(before);
}

TEST(LayerSteps, AGateOfNoRowsIsEmpty) {
  EXPECT_EQ(gated(torch::empty({0, 8}), Activation::kSilu).sizes(), (at::IntArrayRef{0, 4}));
}

}  // namespace
}  // namespace oscar

// The forward pass against dull double-precision loops, and checkpoints that must be refused.

namespace {

using namespace oscar;
using namespace oscar_test;

// softmax(scale q k^T) v in double, query by query; window 0 sees every earlier key.
torch::Tensor attention_ref(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                            double sm_scale, int64_t window) {
  const int64_t group = q.size(1) / k.size(1), tokens = q.size(2);
  torch::Tensor o = torch::zeros(q.sizes(), torch::kFloat64);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t h = 0; h < q.size(1); ++h) {
      const torch::Tensor keys = k[b][h / group].to(torch::kFloat64);
      const torch::Tensor values = v[b][h / group].to(torch::kFloat64);
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t first = window > 0 ? std::max<int64_t>(0, i - window + 1) : 0;
        const torch::Tensor logits =
            keys.slice(0, first, i + 1).mv(q[b][h][i].to(torch::kFloat64)) * sm_scale;
        o[b][h][i] = values.slice(0, first, i + 1).t().mv(logits.softmax(0));
      }
    }
  }
  return o;
}

TEST(Attention, EqualsTheDoubleReferenceForEveryWindowAcrossBlocks) {
  torch::manual_seed(1);
  const int64_t tokens = 530;  // over one block of queries, and not a multiple of it
  const auto q = torch::randn({1, 4, tokens, 16}), k = torch::randn({1, 2, tokens, 16});
  const auto v = torch::randn({1, 2, tokens, 16});
  for (const int64_t window : {0, 1, 2, 64, 513, 529, 530, 4096}) {
    const auto expected = attention_ref(q, k, v, 0.25, window);
    const auto found = causal_attention(q, k, v, 0.25, window);
    EXPECT_LT((found - expected).abs().max().item<double>(), 1e-5) << "window " << window;
  }
}

TEST(Attention, RotatesPairsHalfAHeadApart) {
  torch::manual_seed(2);
  const auto x = torch::randn({1, 1, 3, 4});
  const auto angle = torch::tensor({{0.0, 0.0}, {0.5, 0.1}, {1.0, 0.2}}, torch::kFloat64);
  const auto y = apply_rope(x, angle.cos().to(torch::kFloat32), angle.sin().to(torch::kFloat32));
  for (int t = 0; t < 3; ++t) {
    for (int i = 0; i < 2; ++i) {
      const double a = angle[t][i].item<double>();
      const double x0 = x[0][0][t][i].item<double>(), x1 = x[0][0][t][i + 2].item<double>();
      EXPECT_NEAR(y[0][0][t][i].item<double>(), x0 * std::cos(a) - x1 * std::sin(a), 1e-6);
      EXPECT_NEAR(y[0][0][t][i + 2].item<double>(), x1 * std::cos(a) + x0 * std::sin(a), 1e-6);
    }
  }
}

TEST(Attention, LeavesDimensionsBehindTheRotaryOnesAlone) {
  torch::manual_seed(4);
  const auto x = torch::randn({1, 2, 5, 12});
  const auto angle = torch::outer(torch::arange(5), torch::tensor({1.0, 0.1})).to(torch::kFloat32);
  const auto y = apply_rope(x, angle.cos(), angle.sin());
  EXPECT_TRUE(torch::equal(y.narrow(-1, 4, 8), x.narrow(-1, 4, 8)));
  const auto alone = apply_rope(x.narrow(-1, 0, 4), angle.cos(), angle.sin());
  EXPECT_TRUE(torch::equal(y.narrow(-1, 0, 4), alone));
  // And so does moving rows to other positions.
  const auto moved = move_positions(x[0], {.rotary_dim = 4, .inv_freq = {1.0, 0.1}, .as_run = {}},
                                    torch::arange(5));
  EXPECT_LT((moved - y[0]).abs().max().item<double>(), 1e-6);
}

std::string refusal(const Tensors& tensors) {
  try {
    Model(tensors).hidden(torch::zeros({1, 2}, torch::kInt64));
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

struct Keep final : AttentionObserver {
  void observe(const AttentionRecord& record) override { records.push_back(record); }
  std::vector<AttentionRecord> records;
};

struct ReferenceEngine final : AttentionEngine {
  torch::Tensor attend(int, const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                       double sm_scale) override {
    return attention_ref(q, k, v, sm_scale, 0).to(q.scalar_type());
  }
};

torch::Tensor some_ids() { return torch::randint(0, 64, {3, 17}, torch::kInt64); }

TEST(Transformer, HandsTheObserverWhatAttentionUsed) {
  Model model(make_tensors());
  Keep keep;
  model.hidden(some_ids(), &keep);
  ASSERT_EQ(keep.records.size(), 2u);
  for (const AttentionRecord& r : keep.records) {
    EXPECT_EQ(r.q.sizes(), (std::vector<int64_t>{3, 4, 17, 8}));
    EXPECT_EQ(r.k.sizes(), (std::vector<int64_t>{3, 2, 17, 8}));
    const auto o = attention_ref(r.q, r.k, r.v, 1.0 / std::sqrt(8.0), 0);
    EXPECT_LT((r.o - o).abs().max().item<double>(), 1e-5);
  }
}

TEST(Transformer, AnEngineReplacesAttentionAndNothingElse) {
  Model model(make_tensors());
  ReferenceEngine engine;
  const auto ids = some_ids();
  const auto difference = model.hidden(ids) - model.hidden(ids, nullptr, &engine);
  EXPECT_LT(difference.abs().max().item<double>(), 1e-4);
  struct Zero final : AttentionEngine {
    torch::Tensor attend(int, const torch::Tensor& q, const torch::Tensor&, const torch::Tensor&,
                         double) override {
      return torch::zeros_like(q);
    }
  } zero;
  EXPECT_GT((model.hidden(ids) - model.hidden(ids, nullptr, &zero)).abs().max().item<double>(),
            1e-2);
}

TEST(Transformer, GivesEachSequenceTheSameResultAloneAndInABatch) {
  Model model(make_tensors());
  const auto ids = some_ids();
  const auto batch = model.hidden(ids);
  for (int i = 0; i < 3; ++i) {
    const auto alone = model.hidden(ids.slice(0, i, i + 1));
    EXPECT_LT((alone[0] - batch[i]).abs().max().item<double>(), 1e-4);
  }
}

TEST(Transformer, AnOffsetTurnsKeysAndLeavesOutputsAlone) {
  Model model(make_tensors());
  Keep near, far;
  const auto ids = some_ids();
  const auto a = model.hidden(ids, &near), b = model.hidden(ids, &far, nullptr, 100);
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-3);  // RoPE is relative
  EXPECT_GT((near.records[0].k - far.records[0].k).abs().max().item<double>(), 1e-2);
}

TEST(Transformer, OutputMetricSumsTheHeadsOfAGroup) {
  const Tensors tensors = make_tensors();
  Model model(tensors);
  const auto metric = model.transformer->o_proj_metric(1);
  const auto& o = tensors.at("model.layers.1.self_attn.o_proj.weight").values;  // [24, 4 * 8]
  for (int h = 0; h < 2; ++h) {
    for (int a = 0; a < 8; ++a) {
      for (int b = 0; b < 8; ++b) {
        double sum = 0;
        for (int j = 2 * h; j < 2 * h + 2; ++j) {
          for (int n = 0; n < 24; ++n) {
            sum += double(o[n * 32 + j * 8 + a]) * double(o[n * 32 + j * 8 + b]);
          }
        }
        EXPECT_NEAR(metric[h](a, b), sum, 1e-10);
      }
    }
  }
}

TEST(Transformer, CountsTheBytesThatALayerTakes) {
  Model model(make_tensors());
  // norms 2 x 24 + 2 x 8, q 32 x 24, k and v 16 x 24, o 24 x 32, MLP 3 x 40 x 24; fp32
  EXPECT_EQ(model.transformer->layer_bytes(0), size_t{4} * (64 + 768 + 768 + 768 + 2880));
}

TEST(Transformer, NamesAWeightThatIsNotFinite) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Tensors tensors = make_tensors();
    tensors["model.layers.1.mlp.up_proj.weight"].values[17] = bad;
    const std::string message = refusal(tensors);
    EXPECT_NE(message.find("not finite"), std::string::npos) << message;
    EXPECT_NE(message.find("model.layers.1.mlp.up_proj.weight"), std::string::npos) << message;
  }
}

TEST(Transformer, NamesAMissingTensorAndOneOfAnotherShape) {
  Tensors missing = make_tensors();
  missing.erase("model.layers.1.self_attn.k_norm.weight");
  EXPECT_NE(refusal(missing).find("model.layers.1.self_attn.k_norm.weight"), std::string::npos);
  Tensors transposed = make_tensors();
  transposed["model.layers.0.mlp.down_proj.weight"].shape = {40, 24};
  EXPECT_NE(refusal(transposed).find("another shape"), std::string::npos);
}

TEST(Transformer, RefusesATensorThatTheConfigDoesNotAccountFor) {
  Tensors tensors = make_tensors();
  tensors["model.layers.0.self_attn.q_proj.bias"] = {{32}, std::vector<float>(32, 0.5f)};
  EXPECT_NE(refusal(tensors).find("model.layers.0.self_attn.q_proj.bias"), std::string::npos);
  tensors = make_tensors();
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{4}, {1, 2, 3, 4}};
  EXPECT_EQ(refusal(tensors), "accepted");
}

TEST(Transformer, RefusesTokenIdsOutsideTheVocabulary) {
  Model model(make_tensors());
  for (const int64_t id : {int64_t{-1}, int64_t{64}, int64_t{1} << 40}) {
    EXPECT_THROW(model.transformer->embed(torch::full({1, 2}, id, torch::kInt64)), Error);
  }
}

}  // namespace
