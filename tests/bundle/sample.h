// A small bundle with every dataset filled by values that differ everywhere, for the bundle tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "oscar/bundle/bundle.h"
#include "oscar/bundle/weight_samples.h"

namespace oscar::sample {

inline constexpr int kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 8;

// Heads have more elements than a layer has heads. The last layer has every dataset.
struct Size {
  int layers = kLayers, heads = kHeads, query_heads = kQueryHeads, dim = kDim;
  bool is_last(int layer) const { return layer == layers - 1; }
};

LayerGeometry geometry(int layer, const Size& size = {});

Bundle statistics_bundle(const Size& size = {});
Bundle rotation_bundle(TransformKind kind, const Size& size = {});

// A folder of the running test's own, removed at the end; SOURCE_DATE_EPOCH is set.
class BundleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("SOURCE_DATE_EPOCH", "1700000000", 1);
    folder_ = std::filesystem::temp_directory_path() /
              ("oscar_bundle_" + std::to_string(::getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path file(const char* name) const { return folder_ / name; }

  std::filesystem::path folder_;
};

}  // namespace oscar::sample
