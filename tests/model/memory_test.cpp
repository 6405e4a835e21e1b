// The planner: which needs are there together, and what is decided for a limit.
#include "oscar/model/memory.h"

#include <gtest/gtest.h>
#include <string>

#include "oscar/base/error.h"

namespace oscar {
namespace {

const torch::Device kCpu = torch::kCPU, kGpu = torch::kCUDA;

// 100 always, 20 while passing, 30 between layers, 50 while saving; layers of 10, ten of them;
// hidden states of 1 a token, in batches of 5 of 40 tokens.
MemoryNeeds needs() {
  MemoryNeeds n;
  n.held = {{.name = "the rest", .compute_bytes = 60, .host_bytes = 40},
            {.name = "activations", .moment = Moment::kPassing, .compute_bytes = 20},
            {.name = "the search", .moment = Moment::kBetween, .compute_bytes = 30},
            {.name = "a checkpoint", .moment = Moment::kSaving, .host_bytes = 50}};
  n.streamed_layers = 20, n.all_layers = 100;
  n.hidden_of_token = 1, n.batch_tokens = 5, n.all_tokens = 40;
  n.hint = "raise it";
  return n;
}

int64_t host_peak(const MemoryNeeds& n) { return memory_peak(n, {}, 0, kCpu).host_bytes; }

TEST(MemoryPeak, OnTheCpuTheWorstMomentCounts) {
  MemoryNeeds n = needs();
  EXPECT_EQ(host_peak(n), 100 + 50 + 20);
  n.held[1].compute_bytes = 70;
  EXPECT_EQ(host_peak(n), 100 + 70 + 20);
  n.held[2].compute_bytes = 90;
  EXPECT_EQ(host_peak(n), 100 + 90 + 20);
  n.saved_meanwhile = true;
  EXPECT_EQ(host_peak(n), 100 + (70 + 50) + 20);
}

TEST(MemoryPeak, AGpuSearchesWhileItPassesAndItsHostSaves) {
  const MemoryPeak peak = memory_peak(needs(), {.side_by_side = 3}, 8, kGpu);
  EXPECT_EQ(peak.device_bytes, 60 + 20 + 3 * 30 + 20 + 8);
  EXPECT_EQ(peak.host_bytes, 40 + 50);
  EXPECT_EQ(peak.largest, "the search");
  EXPECT_EQ(peak.largest_bytes, 90);
}

TEST(MemoryPeak, HiddenStatesLieWhereThePlanSays) {
  MemoryNeeds n = needs();
  const int64_t device = memory_peak(n, {}, 0, kGpu).device_bytes;
  EXPECT_EQ(memory_peak(n, {}, 8, kGpu).device_bytes, device + 8);
  EXPECT_EQ(memory_peak(n, {.hidden_on_device = false}, 8, kGpu).device_bytes, device + 2 * 5);
  EXPECT_EQ(memory_peak(n, {.hidden_on_device = false}, 8, kGpu).host_bytes, 90 + 8);
  n.hidden_saved = true;  // there twice
  EXPECT_EQ(memory_peak(n, {}, 8, kGpu).host_bytes, 90 + 8);
}

TEST(PlanMemory, WeightsStayWhereAllOfThemFit) {
  const auto plan = [](int64_t bytes) { return plan_memory(needs(), {.host_bytes = bytes}, kCpu); };
  const int64_t least = 100 + 50 + 2 * 5;
  EXPECT_TRUE(plan(least + 100).weights_resident);
  EXPECT_EQ(plan(least + 100).hidden_room, 2 * 5);
  EXPECT_FALSE(plan(least + 99).weights_resident);
  EXPECT_EQ(plan(least + 99).hidden_room, 2 * 5 + 99 - 20);
}

TEST(PlanMemory, WhatDoesNotFitNamesItsLargestPartTheOptionAndTheWayOut) {
  const int64_t least = 100 + 50 + 20 + 2 * 5;
  EXPECT_NO_THROW(plan_memory(needs(), {.host_bytes = least}, kCpu));
  try {
    plan_memory(needs(), {.host_bytes = least - 1}, kCpu);
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const char* words :
         {"one layer and one batch", "--host-memory", "for the rest", "raise it"})
      EXPECT_NE(text.find(words), std::string::npos) << text;
  }
}

TEST(PlanMemory, WhileWeightsStreamHiddenStatesOfAGpuGoToTheHostIfTheyDoNotFit) {
  const auto plan = [](int64_t device, int64_t host) {
    return plan_memory(needs(), {.host_bytes = host, .device_bytes = device}, kGpu);
  };
  const int64_t fixed = 60 + 20 + 30 + 20;
  EXPECT_TRUE(plan(fixed + 40, 1000).hidden_on_device);
  const MemoryPlan streamed = plan(fixed + 39, 1000);
  EXPECT_FALSE(streamed.hidden_on_device);
  EXPECT_EQ(streamed.hidden_room, 1000 - 90);
  EXPECT_NO_THROW(plan(fixed + 39, 90 + 5));
  try {
    plan(fixed + 39, 90 + 4);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("--host-memory"), std::string::npos) << error.what();
  }
}

TEST(PlanMemory, AGpuDoesAsMuchSideBySideAsThereIsRoomFor) {
  MemoryNeeds n = needs();
  n.hidden_at_once = true;
  n.most_side_by_side = 4;
  const auto times = [&](int64_t left) {
    const int64_t fixed = 60 + 20 + 100 + 40;  // all layers, hidden states of all batches
    return plan_memory(n, {.host_bytes = 1000, .device_bytes = fixed + left}, kGpu).side_by_side;
  };
  EXPECT_EQ(times(59), 1);
  EXPECT_EQ(times(60), 2);
  EXPECT_EQ(times(1000), 4);
}

TEST(LargerPeak, IsThatOfEachSideAndNamesThePartOfTheSideThatComputes) {
  const MemoryPeak a{.host_bytes = 5, .device_bytes = 1, .largest = "a"};
  const MemoryPeak b{.host_bytes = 3, .device_bytes = 2, .largest = "b"};
  EXPECT_EQ(larger_peak(a, b, kCpu).largest, "a");
  EXPECT_EQ(larger_peak(a, b, kGpu).largest, "b");
  EXPECT_EQ(larger_peak(a, b, kGpu).host_bytes, 5);
  EXPECT_EQ(larger_peak(a, b, kGpu).device_bytes, 2);
}

}  // namespace
}  // namespace oscar
