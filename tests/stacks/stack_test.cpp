// The table of serving stacks, and the differences of their codecs.
#include "oscar/stacks/stack.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "oscar/base/error.h"
#include "oscar/base/usage_error.h"
#include "oscar/stacks/describe.h"

namespace oscar {
namespace {

TEST(Stacks, NamesAreUniqueAndEveryRowSaysWhereItWasRead) {
  std::set<std::string> names;
  for (const Stack& stack : stacks()) {
    EXPECT_TRUE(names.insert(stack.name).second) << stack.name;
    EXPECT_FALSE(std::string(stack.source).empty()) << stack.name;
    EXPECT_FALSE(stack.quant_group_sizes.empty()) << stack.name;
    EXPECT_FALSE(stack.metadata.empty()) << stack.name;
  }
  EXPECT_EQ(&find_stack("vllm-pr46774"), &find_stack("vllm-pr46774"));
  EXPECT_THROW(find_stack("trt"), Error);
}

TEST(Stacks, NamesOfServersAreAnsweredWithBothStacksThatTheyMayMean) {
  for (const char* name : {"vllm", "transformers", "oscar"}) {
    try {
      find_stack(name);
      ADD_FAILURE() << name;
    } catch (const UsageError& error) {
      const std::string said = error.what();
      EXPECT_NE(said.find("bundle made without --for (backend oscar_int2)"), std::string::npos)
          << said;
      EXPECT_NE(said.find("46774 is vllm-pr46774"), std::string::npos) << said;
    }
  }
}

TEST(Stacks, ServedAreThoseWhoseCodecIsKnown) {
  EXPECT_EQ(stack_names(true),
            "oscar_int2, sglang-v1, sglang-v2, sglang-0c88a, vllm-pr46774, onnxruntime, mlx");
  EXPECT_EQ(stack_names(false), "llama.cpp, oscar2");
}

// What keeps a bundle of this toolkit's codec from running as it is.
TEST(Stacks, GapsToThisCodecAreNamed) {
  QuantizerSettings quantizer{.quant_group_size = 0};
  quantizer.metadata_dtype = MetadataDtype::kFp32;
  EXPECT_EQ(codec_gap(find_stack("sglang-v1"), quantizer), "");
  quantizer.metadata_dtype = MetadataDtype::kFp16;
  const auto gap = [&](const char* name) { return codec_gap(find_stack(name), quantizer); };
  EXPECT_EQ(gap("oscar_int2"), "");
  EXPECT_NE(gap("sglang-v1").find("after coding"), std::string::npos);
  EXPECT_NE(gap("vllm-pr46774").find("minimum"), std::string::npos);
  quantizer.quant_group_size = 64;
  EXPECT_NE(gap("mlx").find("clips each quantization group"), std::string::npos);
  quantizer.metadata_dtype = MetadataDtype::kBf16;
  EXPECT_NE(gap("onnxruntime").find("no bf16"), std::string::npos);
}

TEST(Stacks, ItsOwnCodecLeavesNoGap) {
  for (const Stack& stack : stacks()) {
    if (!is_served(stack)) continue;
    for (const StackMetadata& metadata : stack.metadata) {
      QuantizerSettings quantizer = default_codec(stack);
      if (metadata.whole_head_only) quantizer.quant_group_size = 0;
      quantizer.metadata_dtype = metadata.dtype;
      take_rules_of(stack, quantizer);
      EXPECT_EQ(codec_gap(stack, quantizer), "") << stack.name;
    }
  }
  const CodecRules onnx = default_codec(find_stack("onnxruntime")).rules;
  EXPECT_EQ(onnx, (CodecRules{.zero = ZeroForm::kMinimum, .ties = CodeTies::kEven}));
  const CodecRules mlx = default_codec(find_stack("mlx")).rules;
  EXPECT_EQ(mlx, (CodecRules{.clip_span = ClipSpan::kQuantGroup,
                             .metadata_rounding = MetadataRounding::kAfterCoding}));
}

// A group of the whole head is the head's row, whichever of the two a bundle names.
TEST(Stacks, OverWholeHeadsBothClipSpansAreOne) {
  for (const ClipSpan span : {ClipSpan::kHeadRow, ClipSpan::kQuantGroup}) {
    QuantizerSettings quantizer = default_codec(find_stack("mlx"));
    quantizer.quant_group_size = 0;
    quantizer.rules.clip_span = span;
    EXPECT_EQ(codec_gap(find_stack("mlx"), quantizer), "");
  }
}

TEST(Stacks, TextFitsEightyColumns) {
  std::istringstream lines(stacks_text());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
}

}  // namespace
}  // namespace oscar
