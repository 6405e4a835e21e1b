// Weights that are read in several pieces, on any device.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/model/layer_weights.h"

namespace oscar::layer_weights_cases {

// Five pieces in fp32 and three in bf16, which end within blocks of FP8.
inline constexpr int64_t kRows = 10100, kColumns = 1030;

// One matrix, which is all that its file holds.
class OneMatrix : public WeightSource {
 public:
  explicit OneMatrix(const torch::Tensor& stored, Dtype dtype = Dtype::kFp32)
      : file_(written(stored)) {
    view.dtype = dtype;
    view.shape = {kRows, kColumns};
    view.data = file_.data();
    view.bytes = file_.size();
  }

  TensorView view;

  bool contains(const std::string&) const override { return true; }
  TensorView get(const std::string&, const std::vector<int64_t>&) const override { return view; }
  StoredBytes stored_bytes(const std::string&) const override {
    return {&file_, file_.data(), file_.size()};
  }
  std::vector<std::string> names() const override { return {}; }
  std::vector<std::filesystem::path> shards() const override { return {}; }
  std::string place(const std::string& name) const override { return "a file: " + name; }
  std::string fingerprint(bool) const override { return ""; }

 private:
  std::filesystem::path written(const torch::Tensor& stored) const {
    auto path = folder_.path() / "matrix";
    oscar_test::write_file(path, {static_cast<const char*>(stored.data_ptr()), stored.nbytes()});
    return path;
  }

  oscar_test::TemporaryFolder folder_;
  MappedFile file_;
};

inline torch::Tensor load(const OneMatrix& weights, torch::Device device, torch::Dtype dtype,
                          double offset = 0) {
  const WeightSpec spec{
      .role = WeightRole::kUp, .name = "up", .shape = {kRows, kColumns}, .offset = offset};
  return load_weight(weights, spec, {device, dtype}).to(torch::kCPU);
}

inline torch::Tensor random_matrix() {
  torch::manual_seed(1);
  return torch::randn({kRows, kColumns});
}

inline void expect_every_row_in_its_place(torch::Device device) {
  const torch::Tensor numbers = random_matrix();
  const OneMatrix plain(numbers);
  EXPECT_TRUE(torch::equal(load(plain, device, torch::kFloat32), numbers)) << "as it is";
  const torch::Tensor half = numbers.to(torch::kBFloat16);
  EXPECT_TRUE(torch::equal(load(plain, device, torch::kBFloat16), half)) << "converted";
  EXPECT_TRUE(torch::equal(load(plain, device, torch::kBFloat16, 1), numbers + 1)) << "with offset";
  OneMatrix decoded(half, Dtype::kBf16);
  decoded.view.data = nullptr;
  decoded.view.decode = [&](int64_t first, int64_t count, float* out) {
    std::memcpy(out, numbers.data_ptr<float>() + first * kColumns,
                static_cast<size_t>(count * kColumns) * sizeof(float));
  };
  EXPECT_TRUE(torch::equal(load(decoded, device, torch::kBFloat16), half)) << "decoded";
}

inline void expect_scales_of_every_block(torch::Device device) {
  constexpr int64_t kBlock = 128;
  const int64_t block_rows = (kRows - 1) / kBlock + 1, block_columns = (kColumns - 1) / kBlock + 1;
  const torch::Tensor codes = random_matrix().to(torch::kFloat8_e4m3fn);
  const torch::Tensor scales = torch::rand({block_rows, block_columns}) + 0.5;
  const float* first = scales.data_ptr<float>();
  const torch::Tensor factors = scales.repeat_interleave(kBlock, 0)
                                    .repeat_interleave(kBlock, 1)
                                    .narrow(0, 0, kRows)
                                    .narrow(1, 0, kColumns);
  OneMatrix weights(codes);
  weights.view.fp8 = std::make_shared<const BlockScales>(
      BlockScales{{first, first + scales.numel()}, kBlock, kBlock});
  EXPECT_TRUE(
      torch::equal(load(weights, device, torch::kFloat32), codes.to(torch::kFloat32) * factors));
}

inline void expect_a_number_that_is_not_finite_to_be_found(torch::Device device) {
  for (const int64_t row : {int64_t{0}, kRows / 2, kRows - 1}) {
    torch::Tensor numbers = random_matrix();
    numbers[row][kColumns - 1] = std::nan("");
    try {
      load(OneMatrix(numbers), device, torch::kFloat32);
      ADD_FAILURE() << "a NaN in row " << row << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("a file: up"), std::string::npos) << error.what();
    }
  }
}

}  // namespace oscar::layer_weights_cases
