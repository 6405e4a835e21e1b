// The choice between the CUDA kernels and torch.
#include "oscar/model/layer_steps.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "oscar/base/parallel.h"
#include "oscar/model/attention.h"

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "oscar/base/error.h"
#include "oscar_kernels/forward.h"
#endif

namespace oscar {
namespace {

#if defined(OSCAR_HAS_KERNELS)

bool kernel_reads(const torch::Tensor& x) {
  return !x.defined() || (x.is_cuda() && x.scalar_type() == torch::kBFloat16 && x.is_contiguous() &&
                          reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0);
}

uint16_t* rows_of(const torch::Tensor& x) {
  return x.defined() ? static_cast<uint16_t*>(x.data_ptr()) : nullptr;
}

// Launches on the stream of x's device. False when the kernel does not take these sizes.
template <typename Params>
bool launch(cudaError_t (*kernel)(const Params&, cudaStream_t), const Params& params,
            const torch::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(x.device());
  const cudaError_t error = kernel(params, static_cast<cudaStream_t>(stream.native_handle()));
  if (error == cudaErrorNotSupported) return false;
  if (error != cudaSuccess) {
    throw Error({.what = "a step of the forward pass failed on the GPU",
                 .found = cudaGetErrorString(error),
                 .hint = "was the program built for this GPU (OSCAR_CUDA_ARCHITECTURES)?"});
  }
  return true;
}

bool norm_with_kernel(const torch::Tensor& x, const torch::Tensor& added, torch::Tensor& sum,
                      const torch::Tensor& weight, double eps, torch::Tensor& out) {
  if (!x.is_cuda() || !kernel_reads(x) || !kernel_reads(added) || !kernel_reads(weight)) {
    return false;
  }
  if (added.defined()) sum = torch::empty_like(x);
  out = torch::empty_like(x);
  const NormParams params{.rows = x.numel() / x.size(-1),
                          .width = static_cast<int>(x.size(-1)),
                          .eps = static_cast<float>(eps),
                          .x = rows_of(x),
                          .added = rows_of(added),
                          .sum = rows_of(sum),
                          .weight = rows_of(weight),
                          .out = rows_of(out)};
  return launch(&oscar::add_and_norm, params, x);
}

bool rotate_with_kernel(const torch::Tensor& qkv, int64_t num_kv_heads, const HeadNorms& norms,
                        const torch::Tensor& cos, const torch::Tensor& sin, torch::Tensor& q,
                        torch::Tensor& k) {
  if (!qkv.is_cuda() || !kernel_reads(qkv) || !kernel_reads(norms.q) || !kernel_reads(norms.k)) {
    return false;
  }
  const int64_t batch = qkv.size(0), tokens = qkv.size(1), d = qkv.size(3);
  const int64_t heads = qkv.size(2) - 2 * num_kv_heads;
  q = torch::empty({batch, tokens, heads, d}, qkv.options());
  k = torch::empty({batch, tokens, num_kv_heads, d}, qkv.options());
  const RotateParams params{.rows = batch * tokens,
                            .tokens = tokens,
                            .num_qo_heads = static_cast<int>(heads),
                            .num_kv_heads = static_cast<int>(num_kv_heads),
                            .head_dim = static_cast<int>(d),
                            .rotary_dim = static_cast<int>(2 * cos.size(-1)),
                            .eps = static_cast<float>(norms.eps),
                            .qkv = rows_of(qkv),
                            .q_norm = rows_of(norms.q),
                            .k_norm = rows_of(norms.k),
                            .cos = cos.data_ptr<float>(),
                            .sin = sin.data_ptr<float>(),
                            .q = rows_of(q),
                            .k = rows_of(k)};
  if (!launch(&norm_and_rotate, params, qkv)) return false;
  q = q.transpose(1, 2);
  k = k.transpose(1, 2);
  return true;
}

bool gate_with_kernel(const torch::Tensor& gate_up, torch::Tensor& out) {
  if (!gate_up.is_cuda() || !kernel_reads(gate_up)) return false;
  std::vector<int64_t> shape = gate_up.sizes().vec();
  shape.back() /= 2;
  out = torch::empty(shape, gate_up.options());
  const GateParams params{.rows = gate_up.numel() / gate_up.size(-1),
                          .width = static_cast<int>(shape.back()),
                          .gate_up = rows_of(gate_up),
                          .out = rows_of(out)};
  return launch(&oscar::gate, params, gate_up);
}

#else

bool norm_with_kernel(const torch::Tensor&, const torch::Tensor&, torch::Tensor&,
                      const torch::Tensor&, double, torch::Tensor&) {
  return false;
}
bool rotate_with_kernel(const torch::Tensor&, int64_t, const HeadNorms&, const torch::Tensor&,
                        const torch::Tensor&, torch::Tensor&, torch::Tensor&) {
  return false;
}
bool gate_with_kernel(const torch::Tensor&, torch::Tensor&) { return false; }

#endif

// On the host in pieces that torch does not deal to its threads: at the end of a thread's share,
// what is over a vector's length gets other instructions, and bits would depend on the number of
// threads.
torch::Tensor activated(const torch::Tensor& x, Activation activation) {
  const bool silu = activation == Activation::kSilu;
  if (x.is_cuda()) return silu ? torch::silu(x) : torch::gelu(x, "tanh");
  torch::Tensor out = torch::empty(x.sizes(), x.options());
  const int64_t width = x.size(-1);
  const torch::Tensor from = x.reshape({-1, width}), to = out.view({-1, width});
  constexpr int64_t kWhole = int64_t{1} << 14;  // values; of gelu torch deals out more than these
  const int64_t columns = std::min(width, kWhole), rows = kWhole / columns;
  const int64_t across = (width + columns - 1) / columns, down = (from.size(0) + rows - 1) / rows;
  parallel_for(across * down, [&](int64_t index) {
    const c10::InferenceMode guard;  // of this thread
    const int64_t row = index / across * rows, column = index % across * columns;
    const auto piece = [&](const torch::Tensor& t) {
      return t.slice(0, row, row + rows).slice(1, column, column + columns);
    };
    torch::Tensor part = piece(to);
    if (silu) {
      at::silu_out(part, piece(from));
    } else {
      at::gelu_out(part, piece(from), "tanh");
    }
  });
  return out;
}

}  // namespace

torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps) {
  torch::Tensor none, out;
  if (norm_with_kernel(x, {}, none, weight, eps, out)) return out;
  const torch::Tensor rows = x.to(weight.scalar_type());
  return torch::rms_norm(rows, {x.size(-1)}, weight, eps).to(x.scalar_type());
}

NormedSum add_and_norm(const torch::Tensor& x, const torch::Tensor& added,
                       const torch::Tensor& weight, double eps) {
  NormedSum result;
  if (norm_with_kernel(x, added, result.sum, weight, eps, result.norm)) return result;
  result.sum = x + added;
  result.norm = rms_norm(result.sum, weight, eps);
  return result;
}

HeadRows split_and_rotate(const torch::Tensor& qkv, int64_t num_kv_heads, const HeadNorms& norms,
                          const torch::Tensor& cos, const torch::Tensor& sin) {
  const int64_t heads = qkv.size(2) - 2 * num_kv_heads;
  HeadRows rows;
  rows.v = qkv.narrow(2, heads + num_kv_heads, num_kv_heads).transpose(1, 2);
  if (rotate_with_kernel(qkv, num_kv_heads, norms, cos, sin, rows.q, rows.k)) return rows;
  const auto head_rows = [&](int64_t first, int64_t count, const torch::Tensor& norm) {
    const torch::Tensor own = qkv.narrow(2, first, count);
    const torch::Tensor normed = norm.defined() ? rms_norm(own, norm, norms.eps) : own;
    return apply_rope(normed.transpose(1, 2), cos, sin);
  };
  rows.q = head_rows(0, heads, norms.q);
  rows.k = head_rows(heads, num_kv_heads, norms.k);
  return rows;
}

torch::Tensor gated(const torch::Tensor& gate_up, Activation activation) {
  torch::Tensor out;
  if (activation == Activation::kSilu && gate_with_kernel(gate_up, out)) return out;
  const auto halves = gate_up.chunk(2, -1);
  return activated(halves[0], activation) * halves[1];
}

}  // namespace oscar
