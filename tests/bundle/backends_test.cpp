#include "oscar/bundle/backends.h"

#include <gtest/gtest.h>
#include <set>
#include <sstream>

#include "oscar/base/error.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/fit/fit.h"

namespace oscar {

// Choices limited to what one backend runs.

namespace {

BackendChoice best_choice() {
  const Preset& preset = find_preset("best");
  BackendChoice choice{preset.fit, preset.server_search, {}};
  choice.quantizer.quant_group_size = 0;
  return choice;
}

// The option that restrict_to refuses, with what it says.
ErrorInfo refusal(const Backend& backend, const BackendChoice& choice, const NamedOptions& named) {
  try {
    restrict_to(backend, choice, named);
  } catch (const Error& error) {
    return error.info();
  }
  return {};
}

TEST(BackendChoice, SglangGetsPlainRowsOneMatrixALayerAndOnePair) {
  const BackendChoice choice = restrict_to(find_backend("sglang-v1"), best_choice(), {});
  EXPECT_EQ(choice.fit.granularity, Granularity::kShared);
  EXPECT_EQ(choice.fit.kind, TransformKind::kOscar);  // 473ff3f9 reads no inverse
  EXPECT_FALSE(choice.fit.center);
  EXPECT_FALSE(choice.fit.key_centers);
  EXPECT_EQ(choice.fit.row_weights, RowWeights::kAttention);
  EXPECT_EQ(choice.fit.rounding, Rounding::kPlain);
  EXPECT_EQ(choice.fit.scale_correction, ScaleCorrection::kNone);
  EXPECT_EQ(choice.fit.clip_k, kPublishedClipK);
  EXPECT_EQ(choice.fit.clip_v, kPublishedClipV);
  EXPECT_EQ(choice.quantizer.metadata_dtype, MetadataDtype::kFp32);
  EXPECT_EQ(choice.quantizer.quant_group_size, 0);
  // Transforms would be chosen by KV head; ratios are pooled.
  EXPECT_EQ(choice.search,
            (SearchOptions{.orthogonal = true, .clip = true, .clip_scope = ClipScope::kModel}));
}

TEST(BackendChoice, PerHeadFilesKeepTheGranularityOpen) {
  const BackendChoice choice = restrict_to(find_backend("sglang-0c88a"), best_choice(), {});
  EXPECT_EQ(choice.fit.granularity, Granularity::kPerHead);
  const SearchOptions open{
      .kind = true, .granularity = true, .clip = true, .clip_scope = ClipScope::kModel};
  EXPECT_EQ(choice.search, open);
}

TEST(BackendChoice, ThisToolkitsKernelsTakeEverything) {
  const BackendChoice before = best_choice(),
                      after = restrict_to(find_backend("oscar_int2"), before, {});
  EXPECT_EQ(after.search, before.search);
  EXPECT_TRUE(after.search.fallback);
  EXPECT_EQ(after.fit.rounding, before.fit.rounding);
  EXPECT_EQ(after.fit.center, before.fit.center);
  EXPECT_TRUE(after.fit.key_centers);
  EXPECT_EQ(after.fit.clip_k, before.fit.clip_k);
  EXPECT_EQ(after.quantizer.metadata_dtype, MetadataDtype::kFp16);
}

TEST(BackendChoice, WithoutAPlaceForTheInverseOnlyRotationsAreSearched) {
  const BackendChoice choice = restrict_to(find_backend("sglang-v2"), best_choice(), {});
  EXPECT_EQ(choice.fit.kind, TransformKind::kOscar);
  EXPECT_TRUE(choice.search.kind);
  EXPECT_TRUE(choice.search.orthogonal);
}

TEST(BackendChoice, OneRatioForBothSidesIsThePublishedOneOfKeys) {
  Backend backend = find_backend("sglang-v1");
  backend.clip = ClipScope::kModelBoth;
  const BackendChoice choice = restrict_to(backend, best_choice(), {});
  EXPECT_EQ(choice.fit.clip_k, kPublishedClipK);
  EXPECT_EQ(choice.fit.clip_v, kPublishedClipK);
  BackendChoice pair = best_choice();
  pair.search.clip = false;
  pair.fit.clip_k = 0.96;
  pair.fit.clip_v = 0.92;
  EXPECT_EQ(refusal(backend, pair, {{"--clip", ".96,.92"}}).where, "--clip .96,.92");
}

TEST(BackendChoice, NamedOptionsThatConflictAreRefusedByName) {
  const Backend& backend = find_backend("sglang-v1");
  const auto expect_refused = [&](BackendChoice choice, const char* option, const char* value) {
    const ErrorInfo info = refusal(backend, choice, {{option, value}});
    EXPECT_EQ(info.where, std::string(option) + " " + value);
    EXPECT_NE(info.what.find("sglang-v1"), std::string::npos) << info.what;
    EXPECT_NE(info.hint.find("--for sglang-v1"), std::string::npos) << info.hint;
  };
  expect_refused(best_choice(), "--granularity", "per-head");
  expect_refused(best_choice(), "--method", "orthogonal");  // leaves it to the search
  expect_refused(best_choice(), "--center", "on");
  expect_refused(best_choice(), "--rounding", "shaped");
  expect_refused(best_choice(), "--scale-correction", "metric");
  BackendChoice choice = best_choice();
  choice.quantizer.quant_group_size = 32;
  expect_refused(choice, "--quant-group-size", "32");
  choice = best_choice();
  choice.quantizer.sink_tokens = 20;
  expect_refused(choice, "--sink", "20");
}

TEST(BackendChoice, GroupsThatNobodyNamedAreTheFirstOfTheBackendsThatDivideAHead) {
  const Backend& mlx = find_backend("mlx");
  const BackendChoice choice = restrict_to(mlx, best_choice(), {});
  EXPECT_EQ(group_size_for(choice.quant_group_sizes, 256), 128);
  EXPECT_EQ(group_size_for(choice.quant_group_sizes, 128), 128);
  EXPECT_EQ(group_size_for(choice.quant_group_sizes, 64), 64);
  EXPECT_EQ(group_size_for(choice.quant_group_sizes, 96), 32);
  EXPECT_EQ(group_size_for(choice.quant_group_sizes, 80), 128);  // none: to be refused
  EXPECT_EQ(group_size_for({0, 32, 64}, 80), 0);
  BackendChoice asked = best_choice();
  asked.quantizer.quant_group_size = 32;
  asked = restrict_to(mlx, asked, {{"--quant-group-size", "32"}});
  EXPECT_TRUE(asked.quant_group_sizes.empty());
  EXPECT_EQ(asked.quantizer.quant_group_size, 32);
  EXPECT_TRUE(
      restrict_to(find_backend("onnxruntime"), best_choice(), {}).quant_group_sizes.empty());
}

TEST(BackendChoice, MetadataIsTheBackendsUnlessNamed) {
  const Backend& backend = find_backend("sglang-v1");
  EXPECT_EQ(restrict_to(backend, best_choice(), {}).quantizer.metadata_dtype, MetadataDtype::kFp32);
  const BackendChoice named = restrict_to(backend, best_choice(), {{"--metadata-dtype", "fp16"}});
  EXPECT_EQ(named.quantizer.metadata_dtype, MetadataDtype::kFp16);
  EXPECT_EQ(named.quantizer.rules.metadata_rounding, MetadataRounding::kAfterCoding);
  BackendChoice choice = best_choice();
  choice.quantizer.metadata_dtype = MetadataDtype::kBf16;
  const ErrorInfo info =
      refusal(find_backend("vllm-pr46774"), choice, {{"--metadata-dtype", "bf16"}});
  EXPECT_EQ(info.where, "--metadata-dtype bf16");
}

TEST(BackendChoice, AGivenPairOfRatiosStands) {
  BackendChoice asked = best_choice();
  asked.search.clip = false;
  asked.fit.clip_k = 0.9;
  asked.fit.clip_v = 0;
  const BackendChoice choice = restrict_to(find_backend("sglang-v1"), asked, {{"--clip", "x"}});
  EXPECT_EQ(choice.fit.clip_k, 0.9);
  EXPECT_EQ(choice.fit.clip_v, 0);
}

TEST(BackendChoice, LevelsOfAnotherKindAreNotServedYetAndTheMessageSaysWhy) {
  for (const Backend& backend : backends()) {
    if (is_served(backend)) continue;
    const ErrorInfo info = refusal(backend, best_choice(), {});
    EXPECT_EQ(info.where, std::string("--for ") + backend.name);
    EXPECT_NE(info.what.find("not served yet, because\n  it "), std::string::npos) << info.what;
  }
}

}  // namespace

// The table of backends, and the differences of their codecs.

namespace {

TEST(Backends, NamesAreUniqueAndEveryRowSaysWhereItWasRead) {
  std::set<std::string> names;
  for (const Backend& backend : backends()) {
    EXPECT_TRUE(names.insert(backend.name).second) << backend.name;
    EXPECT_FALSE(std::string(backend.source).empty()) << backend.name;
    EXPECT_FALSE(backend.quant_group_sizes.empty()) << backend.name;
    EXPECT_FALSE(backend.metadata.empty()) << backend.name;
  }
  EXPECT_EQ(&find_backend("vllm-pr46774"), &find_backend("vllm-pr46774"));
  EXPECT_THROW(find_backend("trt"), Error);
}

TEST(Backends, NamesOfServersAreAnsweredWithBothBackendsThatTheyMayMean) {
  for (const char* name : {"vllm", "transformers", "oscar"}) {
    try {
      find_backend(name);
      ADD_FAILURE() << name;
    } catch (const UsageError& error) {
      const std::string said = error.what();
      EXPECT_NE(said.find("bundle made without --for (backend oscar_int2)"), std::string::npos)
          << said;
      EXPECT_NE(said.find("46774 is vllm-pr46774"), std::string::npos) << said;
    }
  }
}

TEST(Backends, ServedAreThoseWhoseCodecIsKnown) {
  EXPECT_EQ(backend_names(true),
            "oscar_int2, sglang-v1, sglang-v2, sglang-0c88a, vllm-pr46774, onnxruntime, mlx");
  EXPECT_EQ(backend_names(false), "llama.cpp, oscar2");
}

// What keeps a bundle of this toolkit's codec from running as it is.
TEST(Backends, GapsToThisCodecAreNamed) {
  CacheFormat quantizer{.quant_group_size = 0};
  quantizer.metadata_dtype = MetadataDtype::kFp32;
  EXPECT_EQ(codec_gap(find_backend("sglang-v1"), quantizer), "");
  quantizer.metadata_dtype = MetadataDtype::kFp16;
  const auto gap = [&](const char* name) { return codec_gap(find_backend(name), quantizer); };
  EXPECT_EQ(gap("oscar_int2"), "");
  EXPECT_NE(gap("sglang-v1").find("after coding"), std::string::npos);
  EXPECT_NE(gap("vllm-pr46774").find("minimum"), std::string::npos);
  quantizer.quant_group_size = 64;
  EXPECT_NE(gap("mlx").find("clips each quantization group"), std::string::npos);
  quantizer.metadata_dtype = MetadataDtype::kBf16;
  EXPECT_NE(gap("onnxruntime").find("no bf16"), std::string::npos);
}

TEST(Backends, ItsOwnCodecLeavesNoGap) {
  for (const Backend& backend : backends()) {
    if (!is_served(backend)) continue;
    for (const BackendMetadata& metadata : backend.metadata) {
      CacheFormat quantizer = default_codec(backend);
      if (metadata.whole_head_only) quantizer.quant_group_size = 0;
      quantizer.metadata_dtype = metadata.dtype;
      take_rules_of(backend, quantizer);
      EXPECT_EQ(codec_gap(backend, quantizer), "") << backend.name;
    }
  }
  const CodecRules onnx = default_codec(find_backend("onnxruntime")).rules;
  EXPECT_EQ(onnx, (CodecRules{.zero = ZeroForm::kMinimum, .ties = CodeTies::kEven}));
  const CodecRules mlx = default_codec(find_backend("mlx")).rules;
  EXPECT_EQ(mlx, (CodecRules{.clip_span = ClipSpan::kQuantGroup,
                             .metadata_rounding = MetadataRounding::kAfterCoding}));
}

// A group of the whole head is the head's row, whichever of the two a bundle names.
TEST(Backends, OverWholeHeadsBothClipSpansAreOne) {
  for (const ClipSpan span : {ClipSpan::kHeadRow, ClipSpan::kQuantGroup}) {
    CacheFormat quantizer = default_codec(find_backend("mlx"));
    quantizer.quant_group_size = 0;
    quantizer.rules.clip_span = span;
    EXPECT_EQ(codec_gap(find_backend("mlx"), quantizer), "");
  }
}

TEST(Backends, TextFitsEightyColumns) {
  std::istringstream lines(backends_text());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
}

}  // namespace
}  // namespace oscar
