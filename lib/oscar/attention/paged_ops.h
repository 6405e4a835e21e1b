// What a paged cache does with rows and pages: by CPU references or by kernels.
#pragma once

#include <memory>

#include "oscar/cache/pages.h"
#include "oscar/model/torch.h"

namespace oscar {

// The two operations of a paged INT2 cache, by the plain CPU references or by the CUDA kernels.

// All arrays that the parameters point to lie on device(); work is queued on its current stream.
class PagedOps {
 public:
  virtual ~PagedOps() = default;
  virtual torch::Device device() const = 0;

  // Appends and demotes. No request gets more than max_new_rows rows and max_new_history INT2
  // tokens. Bits of refused rows are or-ed into params.status. Throws Error when the operation
  // cannot run with this format or on this device.
  virtual void append(const AppendParams& params, int max_new_rows, int max_new_history) = 0;

  // Decode attention; the output is bf16 in params.o. Throws Error as append does.
  virtual void attend(const AttentionParams& params) = 0;
};

// The CPU references of oscar_cache, on the host: any format. Requests are spread over torch's
// threads.
std::unique_ptr<PagedOps> make_reference_ops();

// The kernels of oscar_kernels. Throws Error when this build has none or `device` is no CUDA
// device.
std::unique_ptr<PagedOps> make_kernel_ops(torch::Device device);

}  // namespace oscar
