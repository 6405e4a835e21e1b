// Scores from logits against the definition in float64.
#include "oscar/eval/token_scores.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"

namespace {

TEST(TokenScores, EqualTheDefinitionInFloat64) {
  torch::manual_seed(5);
  const auto reference = 6 * torch::randn({40, 3000});
  const auto logits = reference + 0.7 * torch::randn({40, 3000});
  const auto targets = torch::randint(0, 3000, {40}, torch::kInt64);
  oscar::TokenScores scores;
  score_logits(reference, logits, targets, scores);
  const auto p = reference.to(torch::kFloat64).log_softmax(-1);
  const auto q = logits.to(torch::kFloat64).log_softmax(-1);
  ASSERT_EQ(scores.nll.size(), 40u);
  for (int i = 0; i < 40; ++i) {
    EXPECT_NEAR(scores.nll[i], -q[i][targets[i].item<int64_t>()].item<double>(), 1e-6);
    const double kl = (p[i].exp() * (p[i] - q[i])).sum().item<double>();
    EXPECT_NEAR(scores.kl[i], kl, 1e-6 * std::max(1.0, kl));
    EXPECT_EQ(scores.agrees[i], p[i].argmax().item<int64_t>() == q[i].argmax().item<int64_t>());
  }
}

TEST(TokenScores, EqualLogitsHaveNoDivergenceToEightDigits) {
  torch::manual_seed(6);
  const auto logits = 10 * torch::randn({20, 150000});
  oscar::TokenScores scores;
  score_logits(logits, logits.clone(), torch::zeros({20}, torch::kInt64), scores);
  for (const double kl : scores.kl) EXPECT_NEAR(kl, 0, 1e-8);
}

TEST(TokenScores, PredictionsThatAreNotFiniteAreAnErrorAndNoScore) {
  for (const float wrong : {INFINITY, -INFINITY, NAN}) {
    const auto reference = torch::zeros({3, 10}), logits = torch::zeros({3, 10});
    logits[1] = wrong;
    oscar::TokenScores scores;
    try {
      score_logits(reference, logits, torch::zeros({3}, torch::kInt64), scores);
      ADD_FAILURE() << "scored";
    } catch (const oscar::Error& error) {
      EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("prediction 1"), std::string::npos) << error.what();
    }
  }
}

TEST(TokenScores, ACollapsedMethodHasAFiniteScore) {
  auto reference = torch::zeros({1, 10}), logits = torch::zeros({1, 10});
  reference[0][3] = 120.0f;
  logits[0][4] = 150.0f;
  oscar::TokenScores scores;
  score_logits(reference, logits, torch::full({1}, 3, torch::kInt64), scores);
  EXPECT_NEAR(scores.kl[0], 150, 1e-3);
  EXPECT_NEAR(scores.nll[0], 150, 1e-3);
  EXPECT_EQ(scores.agrees[0], 0);
}

}  // namespace
