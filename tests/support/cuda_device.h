// Whether there is a GPU, asked as the programs ask: what drives one is loaded on the way.
#pragma once

#include "oscar/model/layer_weights.h"

namespace oscar_test {

inline bool has_cuda_device() { return oscar::choose_compute("auto", "auto").device.is_cuda(); }

}  // namespace oscar_test
