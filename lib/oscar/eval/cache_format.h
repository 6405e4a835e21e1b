// The cache that every method of a comparison fills: windows, groups, metadata and codec.
#pragma once

#include <span>

#include "oscar/eval/evaluate.h"
#include "oscar/eval/methods.h"

namespace oscar {

// As reports hold it (SCHEMA.md, `quantizer`).
Json format_json(const QuantizerSettings& settings);

// What `options` give, else what the first bundle is for (`bundle`, which may be null, before
// `named`), else the defaults with one group a head. Throws Error when another bundle is for a
// cache of another format and the options do not settle it.
QuantizerSettings common_format(const EvaluateOptions& options, int head_dim, const Bundle* bundle,
                                std::span<const NamedBundle> named);

}  // namespace oscar
