// Rows in and out of the cache's basis against float64 loops.
#include "oscar/cache/transform.h"

#include <gtest/gtest.h>

#include "cache/transform_case.h"

namespace {

using oscar_test::TransformCase;

class Transform : public testing::TestWithParam<TransformCase> {};

TEST_P(Transform, EqualsFloat64UpToTheRoundingOfItsOutput) {
  oscar_test::TransformSetup setup(GetParam());
  transform_ref(setup.params());
  setup.expect_outputs();
}
INSTANTIATE_TEST_SUITE_P(Shapes, Transform, testing::ValuesIn(oscar_test::transform_cases()));

TEST(TransformOrder, VectorsAreRowsAndHeadsOfAGroupShareAMatrix) {
  // Two KV heads of two heads each. The first matrix moves entry 0 to place 1, the second doubles.
  constexpr int d = 8;
  std::vector<float> matrix(2 * d * d, 0.0f), before(2 * d, 0.0f), after(2 * d, 0.0f);
  matrix[1] = 1.0f;
  for (int i = 0; i < d; ++i) matrix[d * d + i * d + i] = 2.0f;
  before[d] = 1.0f, after[1] = 10.0f;
  std::vector<uint16_t> x(4 * d, oscar::float_to_bf16(3.0f)), out(4 * d);
  oscar::TransformParams p{.num_tensors = 1, .rows = 1, .num_kv_heads = 2, .head_dim = d};
  p.tensors[0] = {.x = oscar::contiguous_rows(x.data(), 4, d),
                  .out = out.data(),
                  .matrix = matrix.data(),
                  .subtracted = before.data(),
                  .added = after.data(),
                  .num_heads = 4};
  transform_ref(p);
  for (int head = 0; head < 4; ++head) {
    for (int i = 0; i < d; ++i) {
      const float expected = head < 2 ? (i == 1 ? 13.0f : 0.0f) : i == 0 ? 4.0f : 6.0f;
      EXPECT_EQ(oscar::bf16_to_float(out[head * d + i]), expected) << head << " " << i;
    }
  }
}

}  // namespace
