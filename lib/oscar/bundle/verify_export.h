// Exports and downloads read back under the rules of the backend that will load them.
#pragma once

#include <filesystem>
#include <vector>

#include "oscar/bundle/decode.h"
#include "oscar/bundle/rotation_files.h"

namespace oscar {

// Checks, in this order: the files themselves and the ranks of their matrices; that the backend's
// loader drops no field of them, and from here on what it keeps; the checksums of
// oscar-export.json; global layer ids and shapes; what times its inverse is the identity, as stored
// and after the rounding to bf16 that servers do; that scores and outputs come out unchanged;
// that a row that is not symmetric goes where the bundle sent it, so that neither a transpose nor
// another layer's matrix passes; that this row is coded to the same bytes. Without an
// oscar-export.json, as in a folder of others, what needs it is left out, and said so. Throws
// nothing for a bad file.
std::vector<Finding> verify_export(const ExchangeFormat& format,
                                   const std::filesystem::path& folder);

}  // namespace oscar
