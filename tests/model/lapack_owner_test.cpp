// In programs that also load libtorch, whose MKL exports the same names, OpenBLAS still decomposes.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <cstring>

#include "oscar/fit/linalg.h"
#include "oscar/model/torch.h"

namespace oscar {
namespace {

std::string library_of(void* address) {
  Dl_info info;
  return address != nullptr && dladdr(address, &info) != 0 ? info.dli_fname : "";
}

TEST(LapackOwner, IsOpenBlasBesideTorch) {
  ASSERT_TRUE(torch::ones({2}).sum().item<float>() == 2.0f);  // torch is really loaded
  EXPECT_NE(lapack_provider().find("openblas"), std::string::npos) << lapack_provider();
}

TEST(LapackOwner, OpenBlasLeavesTheNamesThatTorchUsesAlone) {
  eigh(MatrixD::Identity(4, 4), "test");
  const std::string seen_by_all = library_of(dlsym(RTLD_DEFAULT, "dgemm_"));
  EXPECT_EQ(seen_by_all.find("openblas"), std::string::npos) << seen_by_all;
}

TEST(LapackOwner, DecompositionAgreesWithTorchsOwn) {
  torch::manual_seed(1);
  const auto x = torch::randn({512, 128}, torch::kFloat64);
  const auto c = x.t().mm(x).contiguous();
  MatrixD matrix(128, 128);
  std::memcpy(matrix.data(), c.data_ptr<double>(), sizeof(double) * 128 * 128);
  const Eigh e = eigh(matrix, "test");
  const auto theirs = torch::linalg_eigvalsh(c, "L").contiguous();
  for (int i = 0; i < 128; ++i) {
    EXPECT_NEAR(e.values[i], theirs.data_ptr<double>()[i], 1e-10 * e.values[127]);
  }
}

}  // namespace
}  // namespace oscar
