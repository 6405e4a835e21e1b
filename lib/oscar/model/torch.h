// The one include of libtorch (and precompiled header of everything that uses it).
#pragma once

#include <torch/torch.h>
