// Rows through the codecs of other projects (cache/rival_formats.h), as torch tensors.
#pragma once

#include "oscar/attention/int2_attention.h"
#include "oscar/cache/rival_formats.h"

namespace oscar {

// What the codec gives back of one side's rows, in the model's own basis: a rotation is undone.
// Takes and returns rows [batch, Hkv, tokens, head_dim], float32 that hold bf16 numbers; row i is
// token i of its sequence. Tiles of tokens begin at token `sink`; rows before it and those of the
// last, unfinished tile come back as they are. A scale of a whole layer is taken of each sequence
// by itself, which favours the codec: a calibrated one is of other text. Tensors stay on `device`.
// Throws Error for a head_dim that the codec cannot code.
RowCodec rival_codec(const RivalFormat& rival, Side side, int head_dim, int64_t sink,
                     torch::Device device);

// Levels of Lloyd-Max for N(0, 1), ascending, 2^bits of them, as vLLM's TurboQuant finds them: by
// at most 200 rounds that start from equal steps over +-3.5, with means by trapezoids.
std::vector<double> lloyd_max_levels(int bits);

}  // namespace oscar
