// Where an operator runs: the CPU references of oscar_cache, or the CUDA kernels on torch's stream.
#pragma once

#include "checks.h"
#include "oscar/cache/pages.h"
#include "oscar/cache/steps.h"

namespace oscar::torch_ops {

// The CPU references, one thread. Tables were checked (table_checks.h). params.o, params.lse are
// written.
void append_on_host(const AppendParams& params);
void attend_on_host(const AttentionParams& params);
void dequantize_on_host(const HistoryRowsParams& params);
void transform_on_host(const TransformParams& params);
void step_numbers_on_host(const StepParams& params);

// The kernels, queued on the current stream of the device of `neighbour`; nothing waits. Throw
// Error when this library has no kernels, or none for the shape.
void append_on_device(const char* op, const AppendParams& params, int max_new_rows,
                      int max_new_history, const Tensor& neighbour);
void attend_on_device(const char* op, const AttentionParams& params, void* workspace,
                      int64_t workspace_bytes, const Tensor& neighbour);
void dequantize_on_device(const char* op, const HistoryRowsParams& params, const Tensor& neighbour);
void transform_on_device(const char* op, const TransformParams& params, const Tensor& neighbour);
void step_numbers_on_device(const char* op, const StepParams& params, const Tensor& neighbour);

// Bytes of workspace of attend_on_device. It starts as zeros, and every call leaves it ready for
// the next one on the same stream.
int64_t device_workspace_bytes(const char* op, const AttentionParams& params,
                               const Tensor& neighbour);

}  // namespace oscar::torch_ops
