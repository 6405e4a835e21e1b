// The CUDA kernels behind the interface of a paged cache.
#include "oscar/attention/paged_ops.h"
#include "oscar/base/error.h"

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "oscar_kernels/append.h"
#include "oscar_kernels/attention.h"
#endif

namespace oscar {

#if defined(OSCAR_HAS_KERNELS)
namespace {

// Whether a kernel could be built for this format at all. The launchers return
// cudaErrorInvalidValue for one that could not, and so do CUDA's own calls for reasons that have
// nothing to do with it.
bool has_kernel_shape(const PageFormat& format) {
  const int d = format.head_dim, group = format.rows.quant_group_size;
  return (d == 64 || d == 128 || d == 256) && group > 0 && d % group == 0 && 4 * group >= d;
}

void check(cudaError_t error, const char* what, const PageFormat& format) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // later calls of torch would report it as theirs
  const bool refused = error == cudaErrorInvalidValue && !has_kernel_shape(format);
  if (error == cudaErrorNotSupported || refused) {
    throw Error(
        {.what = fmt::format("the {} kernels do not take this cache format", what),
         .where = "--engine kernel",
         .expected = "a shape of kernels/README.md that this build has",
         .found = fmt::format("head_dim {}, quant_group_size {}, {} metadata", format.head_dim,
                              format.rows.quant_group_size, codec_word(format.rows.metadata)),
         .hint = "build with -DOSCAR_KERNELS=full, or use --engine reference or simulate"});
  }
  throw Error({.what = fmt::format("the {} kernels failed", what),
               .where = "--engine kernel",
               .found = cudaGetErrorString(error),
               .hint = "was the program built for this GPU (OSCAR_CUDA_ARCHITECTURES)? Attention "
                       "takes at most 16 query heads a KV head; --engine simulate runs anywhere"});
}

class KernelOps final : public PagedOps {
 public:
  explicit KernelOps(torch::Device device) : device_(device) {}

  torch::Device device() const override { return device_; }

  void append(const AppendParams& params, int max_new_rows, int max_new_history) override {
    const c10::DeviceGuard guard(device_);
    check(append_rows(params, max_new_rows, max_new_history, stream()), "append", params.format);
  }

  void attend(const AttentionParams& params) override {
    const c10::DeviceGuard guard(device_);
    if (!workspace_.defined()) prepare(params);
    check(decode_attention(params, workspace_.data_ptr(), workspace_.nbytes(), stream()),
          "attention", params.format);
  }

 private:
  cudaStream_t stream() const {
    const auto current = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device_);
    return static_cast<cudaStream_t>(current.native_handle());
  }

  // One workspace serves all calls: they follow each other on one stream and share a head_dim.
  void prepare(const AttentionParams& params) {
    size_t bytes = 0;
    check(decode_attention_workspace(params, &bytes), "attention", params.format);
    workspace_ =
        torch::empty({static_cast<int64_t>(bytes)}, torch::dtype(torch::kUInt8).device(device_));
    check(decode_attention_prepare(workspace_.data_ptr(), bytes, stream()), "attention",
          params.format);
  }

  torch::Device device_;
  torch::Tensor workspace_;
};

}  // namespace

std::unique_ptr<PagedOps> make_kernel_ops(torch::Device device) {
  if (!device.is_cuda()) {
    throw Error({.what = "the CUDA kernels need the model on a GPU",
                 .where = "--engine kernel",
                 .expected = "a CUDA device (--device cuda)",
                 .found = device.str(),
                 .hint = "use --engine reference, which does the same on the CPU"});
  }
  return std::make_unique<KernelOps>(device);
}

#else

std::unique_ptr<PagedOps> make_kernel_ops(torch::Device) {
  throw Error({.what = "this program was built without the CUDA kernels",
               .where = "--engine kernel",
               .hint = "build with OSCAR_WITH_CUDA=ON, or use --engine reference, which does the "
                       "same on the CPU"});
}

#endif

}  // namespace oscar
