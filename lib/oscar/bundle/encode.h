// Structs to a bundle's file, and the hash of its content.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "oscar/io/hdf5.h"

namespace oscar {

// content_sha256: one hash over everything a bundle says, independent of how HDF5 stores it.
//
// The hash is SHA-256 over this byte stream. F(x) is the length of x in bytes as an unsigned
// 64-bit little-endian integer, followed by x.
//
//   F("oscar-content-1")
//   for every dataset, in ascending byte order of its absolute path:
//     F("dataset") F(path) F(dtype) F(shape) F(data)
//       dtype  "u8", "i32", "i64", "f32" or "f64"
//       shape  extents in decimal joined by commas, "8,128,128"; empty for a scalar
//       data   all elements, row-major, little-endian
//   for every attribute, in ascending byte order of (absolute path of its object, name):
//     F("attribute") F(object path) F(name) F(type) F(value)
//       type   "str" (value: UTF-8 bytes without padding), "i64" or "f64" (8 bytes, little-endian)
//
// Left out are attributes of the root "/" named content_sha256 or created_utc, or whose name
// begins with "tool_". Groups count through what they hold. tests/bundle/verify_bundle.py is an
// independent implementation of this text.

// Order of the arguments does not matter. Returns 64 hexadecimal characters. `between` is called
// before each dataset and may throw.
std::string content_sha256(std::vector<const hdf5::DatasetView*> datasets,
                           std::vector<const hdf5::Attribute*> attributes,
                           const std::function<void()>& between = {});

}  // namespace oscar
