// libtorch's tensors, operators and modes, and the precompiled header of everything that uses them;
// streams, guards and threads are included where they are used. torch/torch.h adds modules and
// optimizers, and compiles twice as long.
#pragma once

#include <torch/cuda.h>
#include <torch/types.h>
#include <torch/utils.h>
