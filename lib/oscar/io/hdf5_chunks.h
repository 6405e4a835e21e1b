// A dataset's chunks as they lie in the file, made by any thread: libhdf5 would make them one at a
// time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "oscar/io/hdf5.h"

namespace oscar::hdf5 {

constexpr int kDeflateLevel = 4;

// Extents of a chunk. The whole dataset while small; otherwise leading dimensions are cut to 1 and
// then split evenly: a last chunk is stored in full, however little of it is in use. Of stacks of
// matrices their rows are cut first.
Shape chunk_shape(const Shape& shape, size_t element_bytes);

struct Chunk {
  Shape offset;                // of its first element
  std::vector<uint8_t> bytes;  // behind shuffle and deflate (with `compress`) and Fletcher32
};

// `take` gets the chunks of a dataset that is no scalar, one at a time in row-major order.
using TakeChunk = std::function<void(const Chunk&)>;
void encode_chunks(const DatasetView& dataset, const TakeChunk& take);
// All of them.
std::vector<Chunk> encode_chunks(const DatasetView& dataset);

}  // namespace oscar::hdf5
