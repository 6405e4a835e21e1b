// The operators on a GPU.
#include "dispatch.h"

// Set by CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <torch/csrc/stable/accelerator.h>

#include "oscar_kernels/append.h"
#include "oscar_kernels/attention.h"
#include "oscar_kernels/history.h"
#include "oscar_kernels/steps.h"
#include "oscar_kernels/transform.h"

// Weak: a torch without CUDA does not have it, and loads this library all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** ret_stream);
#endif

namespace oscar::torch_ops {

#if defined(OSCAR_HAS_KERNELS)
namespace {

cudaStream_t current_stream(const char* op, int32_t device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(device, &stream) != TORCH_SUCCESS) {
    refuse(op, "torch names no CUDA stream", "cuda:" + std::to_string(device),
           "a torch that was built with CUDA", "");
  }
  return static_cast<cudaStream_t>(stream);
}

std::string format_text(const PageFormat& format) {
  return "head_dim " + std::to_string(format.head_dim) + ", quant_group_size " +
         std::to_string(format.rows.quant_group_size) + ", " + codec_word(format.rows.metadata) +
         " metadata";
}

std::string call_text(const AppendParams& p) {
  return format_text(p.format) + ", batch " + std::to_string(p.batch) + ", num_kv_heads " +
         std::to_string(p.num_kv_heads);
}

std::string call_text(const AttentionParams& p) {
  return format_text(p.format) + ", batch " + std::to_string(p.batch) + ", q_len " +
         std::to_string(p.q_len) + ", num_qo_heads " + std::to_string(p.num_qo_heads) +
         ", num_kv_heads " + std::to_string(p.num_kv_heads);
}

std::string call_text(const HistoryRowsParams& p) {
  return format_text(p.format) + ", batch " + std::to_string(p.batch) + ", tokens " +
         std::to_string(p.tokens) + ", num_kv_heads " + std::to_string(p.num_kv_heads);
}

std::string call_text(const TransformParams& p) {
  return "head_dim " + std::to_string(p.head_dim) + ", " + std::to_string(p.rows) +
         " rows, num_qo_heads " + std::to_string(p.tensors[0].num_heads) + ", num_kv_heads " +
         std::to_string(p.num_kv_heads);
}

// After these nothing runs in the process any more, and any kernel before may be to blame.
bool device_fault(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

// valid: whether the sizes of the call fit together. CUDA's own calls return cudaErrorInvalidValue
// for other reasons.
void check(const char* op, cudaError_t error, bool valid, const std::string& call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // later calls of torch would report it as theirs
  if (error == cudaErrorInvalidValue && !valid) {
    refuse(op, "the CUDA kernels do not take this call", "", "a shape of kernels/README.md", call,
           "");
  }
  if (error == cudaErrorNotSupported) {
    refuse(op, "the CUDA kernels were built without this format", "",
           "a format of kernels/README.md that this library has", call,
           "formats beyond the core need a build with -DOSCAR_KERNELS=full");
  }
  const std::string found = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  if (device_fault(error)) {
    refuse(op, "the GPU failed in this kernel or in one before it", call, "", found,
           "CUDA_LAUNCH_BLOCKING=1 shows which; indices and lengths on a GPU are not checked, on "
           "the CPU they are");
  }
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    refuse(op, "the library has no code for this GPU", call, "", found,
           "build it with the GPU's architecture among OSCAR_CUDA_ARCHITECTURES");
  }
  refuse(op, "CUDA did not launch the kernel", call, "", found,
         "shaped rounding needs up to 94 KB of shared memory a block");
}

using torch::stable::accelerator::DeviceGuard;

}  // namespace

void append_on_device(const char* op, const AppendParams& params, int max_new_rows,
                      int max_new_history, const Tensor& neighbour) {
  const DeviceGuard guard(neighbour.get_device_index());
  const cudaStream_t stream = current_stream(op, neighbour.get_device_index());
  check(op, append_rows(params, max_new_rows, max_new_history, stream), valid_append(params),
        call_text(params));
}

void attend_on_device(const char* op, const AttentionParams& params, void* workspace,
                      int64_t workspace_bytes, const Tensor& neighbour) {
  const DeviceGuard guard(neighbour.get_device_index());
  const cudaStream_t stream = current_stream(op, neighbour.get_device_index());
  check(op, decode_attention(params, workspace, static_cast<size_t>(workspace_bytes), stream),
        valid_attention(params), call_text(params));
}

void dequantize_on_device(const char* op, const HistoryRowsParams& params,
                          const Tensor& neighbour) {
  const DeviceGuard guard(neighbour.get_device_index());
  const cudaStream_t stream = current_stream(op, neighbour.get_device_index());
  check(op, dequantize_history(params, stream), valid_history(params), call_text(params));
}

void transform_on_device(const char* op, const TransformParams& params, const Tensor& neighbour) {
  const DeviceGuard guard(neighbour.get_device_index());
  const cudaStream_t stream = current_stream(op, neighbour.get_device_index());
  check(op, transform_rows(params, stream), valid_transform(params), call_text(params));
}

void step_numbers_on_device(const char* op, const StepParams& params, const Tensor& neighbour) {
  const DeviceGuard guard(neighbour.get_device_index());
  const cudaStream_t stream = current_stream(op, neighbour.get_device_index());
  check(op, step_numbers(params, stream), true, std::to_string(params.requests) + " requests");
}

int64_t device_workspace_bytes(const char* op, const AttentionParams& params,
                               const Tensor& neighbour) {
  const DeviceGuard guard(neighbour.get_device_index());
  size_t bytes = 0;
  check(op, decode_attention_workspace(params, &bytes), true, call_text(params));
  return static_cast<int64_t>(bytes);
}

#else
namespace {

[[noreturn]] void no_kernels(const char* op, const Tensor& neighbour) {
  refuse(op, "this library was built without the CUDA kernels", "", "tensors on cpu",
         device_text(neighbour), "build with OSCAR_WITH_CUDA=ON");
}

}  // namespace

void append_on_device(const char* op, const AppendParams&, int, int, const Tensor& neighbour) {
  no_kernels(op, neighbour);
}

void attend_on_device(const char* op, const AttentionParams&, void*, int64_t,
                      const Tensor& neighbour) {
  no_kernels(op, neighbour);
}

void dequantize_on_device(const char* op, const HistoryRowsParams&, const Tensor& neighbour) {
  no_kernels(op, neighbour);
}

void transform_on_device(const char* op, const TransformParams&, const Tensor& neighbour) {
  no_kernels(op, neighbour);
}

void step_numbers_on_device(const char* op, const StepParams&, const Tensor& neighbour) {
  no_kernels(op, neighbour);
}

int64_t device_workspace_bytes(const char* op, const AttentionParams&, const Tensor& neighbour) {
  no_kernels(op, neighbour);
}

#endif

}  // namespace oscar::torch_ops
