// The one include of libtorch, and the precompiled header of everything that uses it: tensors,
// operators and modes. torch/torch.h adds modules and optimizers, and compiles twice as long.
#pragma once

#include <torch/cuda.h>
#include <torch/types.h>
#include <torch/utils.h>
