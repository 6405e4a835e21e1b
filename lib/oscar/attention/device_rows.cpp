// One launch of the row kernel on torch's stream.
#include "oscar/attention/device_rows.h"

#include <cassert>

#include "oscar/attention/int2_attention.h"
#include "oscar/base/error.h"

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "oscar_kernels/dequantize.h"
#endif

namespace oscar {

#if defined(OSCAR_HAS_KERNELS)

bool has_device_rows() { return true; }

torch::Tensor quantize_dequantize_device(const SideCodec& side, const torch::Tensor& rows,
                                         const std::string& where) {
  assert(rows.is_cuda() && rows.is_contiguous() && rows.scalar_type() == torch::kFloat32);
  const torch::Device device = rows.device();
  const c10::DeviceGuard guard(device);
  const DeviceRecipe recipe(side.recipe, device);
  const auto of = [](const torch::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto feedback = of(side.feedback), metric = of(side.metric);
  auto out = torch::empty_like(rows);
  auto status = torch::zeros({1}, torch::dtype(torch::kInt32).device(device));
  const auto pointer = [](const torch::Tensor& t) {
    return t.defined() ? t.data_ptr<float>() : nullptr;
  };
  const DequantizeParams params{.x = rows.data_ptr<float>(),
                                .out = out.data_ptr<float>(),
                                .batch = rows.size(0),
                                .tokens = rows.size(2),
                                .num_heads = static_cast<int>(rows.size(1)),
                                .head_dim = static_cast<int>(rows.size(3)),
                                .format = side.format,
                                .writer = recipe.writer(pointer(feedback), pointer(metric)),
                                .status = status.data_ptr<int>()};
  const auto stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
  const cudaError_t error =
      dequantize_rows(params, static_cast<cudaStream_t>(stream.native_handle()));
  if (error != cudaSuccess) {
    cudaGetLastError();  // later calls of torch would report it as theirs
    throw Error({.what = "the kernel of the row codec failed",
                 .where = where,
                 .found = cudaGetErrorString(error),
                 .hint = "was the program built for this GPU (OSCAR_CUDA_ARCHITECTURES)?"});
  }
  const int refused = status.item<int>();
  if (refused != 0) {
    const bool finite = (refused & static_cast<int>(RowStatus::kNonFinite)) == 0;
    refuse_rows(where, finite ? RowStatus::kMetadataOverflow : RowStatus::kNonFinite);
  }
  return out;
}

#else

bool has_device_rows() { return false; }

torch::Tensor quantize_dequantize_device(const SideCodec&, const torch::Tensor&,
                                         const std::string&) {
  assert(false);
  return {};
}

#endif

}  // namespace oscar
