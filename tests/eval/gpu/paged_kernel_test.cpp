// The engine `kernel` against `reference`: bytes of the pages, outputs, and the default model.
#include <gtest/gtest.h>

#include "attention/random_codec.h"
#include "eval/tiny_model.h"
#include "oscar/attention/paged_attention.h"
#include "oscar/base/error.h"
#include "support/cuda_device.h"

namespace {

using oscar::CacheView;
using oscar::EngineKind;
using oscar::PagedAttention;

constexpr double kUnit = 1.0 / 256, kScale = 0.0884;

// Why the kernels can't run here; empty when they can.
std::string missing() {
  if (!oscar_test::has_cuda_device()) return "no CUDA device";
  try {
    oscar::make_kernel_ops(torch::kCUDA);
  } catch (const oscar::Error& error) {
    return error.what();
  }
  return "";
}

#define OSCAR_NEEDS_KERNELS() \
  if (const std::string reason = missing(); !reason.empty()) GTEST_SKIP() << reason

std::shared_ptr<oscar::LayerCodec> on_device(const oscar::LayerCodec& codec) {
  auto copy = std::make_shared<oscar::LayerCodec>(codec);
  for (auto* side : {&copy->key, &copy->value}) {
    for (auto* t : {&side->forward, &side->partner, &side->mean, &side->feedback, &side->metric}) {
      if (t->defined()) *t = t->cuda();
    }
  }
  return copy;
}

PagedAttention make_engine_with(const std::shared_ptr<const oscar::LayerCodec>& codec,
                                const CacheView& view, std::unique_ptr<oscar::PagedOps> ops) {
  return PagedAttention({"test", {codec}, view, {0}, 8}, std::move(ops));
}

// Rows of two gathers of pages whose codes differ, whose metadata does, and all.
struct RowCount {
  int64_t codes, metadata, rows;
};
RowCount count_different_rows(const torch::Tensor& a, const torch::Tensor& b,
                              const oscar::PageFormat& format) {
  const auto different = [&](int begin, int bytes) {
    const auto rows = [&](const torch::Tensor& pages) {
      return pages.slice(-1, begin, begin + 2 * oscar::kPageTokens * bytes)
          .reshape({-1, 2 * oscar::kPageTokens, bytes});
    };
    return rows(a).ne(rows(b)).any(-1);
  };
  const auto codes = different(0, code_row_bytes(format));
  const auto metadata = different(metadata_offset(format, 0, 0), metadata_row_bytes(format));
  return {codes.sum().item<int64_t>(), metadata.sum().item<int64_t>(), codes.numel()};
}

TEST(PagedKernel, PagesWindowsAndOutputsAreThoseOfTheReference) {
  OSCAR_NEEDS_KERNELS();
  const c10::InferenceMode guard;
  torch::manual_seed(3);
  const int64_t batch = 6, tokens = 801, heads = 2, d = 128;
  const auto in = oscar_test::random_sequences(batch, 8, heads, tokens, d);
  for (const bool shaped : {false, true}) {
    // No transform: both sides quantize the very same bf16 rows.
    const auto codec = oscar_test::random_codec(heads, d, {.identity = true, .shaped = shaped});
    for (const CacheView& view :
         {CacheView{.sink = 16, .recent = 64},
          CacheView{.sink = 16, .recent = 64, .demote_block = 16},
          CacheView{
              .sink = 16, .recent = 64, .mode = oscar::CacheModeKind::kPrefill, .prompt = 700}}) {
      SCOPED_TRACE(testing::Message() << "shaped " << shaped << ", block " << view.demote_block
                                      << ", prompt " << view.prompt);
      auto kernel = make_engine_with(on_device(*codec), view, oscar::make_kernel_ops(torch::kCUDA));
      auto reference = make_engine_with(codec, view, oscar::make_reference_ops());
      const auto got = kernel.attend(0, in.q.cuda(), in.k.cuda(), in.v.cuda(), kScale).cpu();
      const auto expected = reference.attend(0, in.q, in.k, in.v, kScale);
      auto &a = kernel.cache(0), &b = reference.cache(0);
      const int history = a.history_at(tokens);
      ASSERT_GT(history, 512);
      const auto [codes, metadata, rows] =
          count_different_rows(a.page_data(history).cpu(), b.page_data(history), a.format());
      printf("shaped %d: of %ld rows the codes of %ld differ, the metadata of %ld\n", shaped, rows,
             codes, metadata);
      EXPECT_LE(codes, shaped ? rows / 10000 : 0);
      // Metric scales: sums in another order (oscar_kernels/append.h).
      EXPECT_LE(metadata, shaped ? rows / 1000 : 0);
      for (int side = 0; side < 2; ++side) {  // as bits: rows never written are NaN
        EXPECT_TRUE(torch::equal(a.exact_rows(side).cpu().view(torch::kInt16),
                                 b.exact_rows(side).view(torch::kInt16)));
      }
      // The same codes, queries and exact rows: the kernel rounds weights and their scaled
      // sums to fp16 and both round the output to bf16.
      const double relative = ((got - expected).norm() / expected.norm()).item<double>();
      printf("outputs: relative distance %.2e\n", relative);
      EXPECT_LE(relative, kUnit);
    }
  }
}

TEST(PagedKernel, LogitsOfTheDefaultModelEqualReferenceAndSimulationWithinRounding) {
  OSCAR_NEEDS_KERNELS();
  const oscar_test::TinyModel tiny;
  oscar::Transformer model(tiny.checkpoint, {.device = torch::kCUDA, .dtype = torch::kFloat32});
  const oscar::CacheView view;
  const auto logits = oscar_test::logits_of_engines(
      model, tiny.method("bundle", view, torch::kCUDA), tiny.ids(450, 4),
      {EngineKind::kSimulate, EngineKind::kReference, EngineKind::kKernel});
  const char* const names[] = {"", "simulate", "reference", "kernel"};
  for (const auto& [a, b] : {std::pair{1, 2}, std::pair{1, 3}, std::pair{2, 3}}) {
    oscar_test::expect_agreement(logits[0], logits[a], logits[b], view.sink + view.recent,
                                 tiny.checkpoint.config.num_layers,
                                 std::string(names[a]) + " and " + names[b]);
  }
}

TEST(PagedKernel, FormatsWithoutAnInstantiationAreRefusedAtOnce) {
  OSCAR_NEEDS_KERNELS();
  const auto codec = oscar_test::random_codec(2, 32, {});
  try {
    make_engine_with(on_device(*codec), {}, oscar::make_kernel_ops(torch::kCUDA));
    FAIL() << "accepted";
  } catch (const oscar::Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("head_dim 32"), std::string::npos) << text;
    EXPECT_NE(text.find("--engine reference"), std::string::npos) << text;
  }
}

}  // namespace
