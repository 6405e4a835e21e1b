// A workspace of decode attention, ready for its first call.
#pragma once

#include "kernels/device_memory.h"
#include "oscar_kernels/attention.h"

namespace oscar_test {

class PreparedWorkspace : public DeviceBuffer<uint8_t> {
 public:
  explicit PreparedWorkspace(const oscar::AttentionParams& params)
      : DeviceBuffer<uint8_t>(needed(params)) {
    EXPECT_EQ(oscar::decode_attention_prepare(get(), count(), nullptr), cudaSuccess);
  }

 private:
  static size_t needed(const oscar::AttentionParams& params) {
    size_t bytes = 0;
    EXPECT_EQ(oscar::decode_attention_workspace(params, &bytes), cudaSuccess);
    return bytes;
  }
};

}  // namespace oscar_test
