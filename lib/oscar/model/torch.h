// The one include of libtorch (and precompiled header of everything that uses it). Tensors, operators
// and modes are all that is needed; torch/torch.h adds modules and optimizers, and compiles twice as long.
#pragma once

#include <torch/cuda.h>
#include <torch/types.h>
#include <torch/utils.h>
