// The choice between the CUDA kernel and plain float64.
#include "oscar/calibrate/row_sums.h"

#include "oscar/base/error.h"

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "oscar_kernels/gram.h"
#endif

namespace oscar {
namespace {

void add_in_float64(const RowSumsTask& task) {
  const int64_t heads = task.sums.moment.size(0);
  const torch::Tensor rows = rows_by_kv_head(task.rows, heads);
  for (int64_t h = 0; h < heads; ++h) {
    const torch::Tensor exact = rows[h].to(torch::kFloat64);
    task.sums.moment[h].add_(torch::mm(exact.t(), exact));
    task.sums.sum[h].add_(exact.sum(0));
  }
}

#if defined(OSCAR_HAS_KERNELS)

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw Error({.what = "adding up statistics on the GPU failed",
               .found = cudaGetErrorString(error),
               .hint = "was the program built for this GPU (OSCAR_CUDA_ARCHITECTURES)?"});
}

GramRows describe(const RowSumsTask& task) {
  const torch::Tensor& x = task.rows;
  return {.rows = x.data_ptr(),
          .batch_stride = x.stride(0),
          .head_stride = x.stride(1),
          .token_stride = x.stride(2),
          .batch = static_cast<int>(x.size(0)),
          .num_heads = static_cast<int>(x.size(1)),
          .tokens = static_cast<int>(x.size(2)),
          .moment = task.sums.moment.data_ptr<double>(),
          .sum = task.sums.sum.data_ptr<double>()};
}

// Tasks of one head_dim. False, and nothing done, when the kernel does not take these rows.
bool add_with_kernel(std::span<const RowSumsTask> tasks) {
  const torch::Tensor& first = tasks.front().rows;
  GramParams params{.head_dim = static_cast<int>(first.size(3)),
                    .num_kv_heads = static_cast<int>(tasks.front().sums.moment.size(0))};
  for (const RowSumsTask& task : tasks) {
    const torch::Tensor& x = task.rows;
    if (!x.is_cuda() || x.scalar_type() != torch::kBFloat16 || x.stride(3) != 1) return false;
    params.tensors[params.num_tensors++] = describe(task);
  }
  const c10::DeviceGuard guard(first.device());
  size_t bytes = 0;
  const cudaError_t error = gram_workspace(params, &bytes);
  if (error == cudaErrorNotSupported) return false;
  check(error);
  const torch::Tensor workspace = torch::empty({static_cast<int64_t>(bytes)},
                                               torch::dtype(torch::kUInt8).device(first.device()));
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(first.device());
  check(gram_add(params, workspace.data_ptr(), bytes,
                 static_cast<cudaStream_t>(stream.native_handle())));
  return true;
}

#else

bool add_with_kernel(std::span<const RowSumsTask>) { return false; }

#endif

}  // namespace

void add_row_sums(std::span<const RowSumsTask> tasks) {
  // Runs of tasks with one head_dim: keys and values may differ in it.
  for (size_t begin = 0, end = 0; begin < tasks.size(); begin = end) {
    while (end < tasks.size() && tasks[end].rows.size(3) == tasks[begin].rows.size(3)) ++end;
    const auto run = tasks.subspan(begin, end - begin);
    if (add_with_kernel(run)) continue;
    for (const RowSumsTask& task : run) add_in_float64(task);
  }
}

torch::Tensor rows_by_kv_head(const torch::Tensor& x, int64_t num_kv_heads) {
  const int64_t batch = x.size(0), group = x.size(1) / num_kv_heads, d = x.size(3);
  return x.reshape({batch, num_kv_heads, group * x.size(2), d})
      .transpose(0, 1)
      .reshape({num_kv_heads, -1, d});
}

}  // namespace oscar
