// Streams out of torch's pool, kept.
#include "oscar/model/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

namespace oscar {

c10::Stream side_stream(torch::Device device, int number) {
  static const std::vector<c10::Stream> streams = [&] {
    const c10::impl::VirtualGuardImpl device_type(device.type());
    std::vector<c10::Stream> own;
    for (int i = 0; i < kSideStreams; ++i)
      own.push_back(device_type.getStreamFromGlobalPool(device));
    return own;
  }();
  return streams.at(static_cast<size_t>(number));
}

std::optional<c10::Stream> present_stream(torch::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void wait_for_stream(torch::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

}  // namespace oscar
