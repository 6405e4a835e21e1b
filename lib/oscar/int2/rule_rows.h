// Rows through the plain codecs of other serving stacks, in torch operations on any device.
#pragma once

#include "oscar/int2/side_codec.h"

namespace oscar {

// x [batch, Hkv, tokens, d] float32, finite, rounded to bf16 -> what write_and_read_rows gives
// under side.rules, to the bit. `where` names the layer in the Error of a range that the metadata
// dtype cannot hold.
torch::Tensor write_and_read_torch(const SideCodec& side, const torch::Tensor& x,
                                   const std::string& where);

}  // namespace oscar
