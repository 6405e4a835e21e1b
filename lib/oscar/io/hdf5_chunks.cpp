// The three filters of our files (HDF5 File Format Specification 3.0, III.B and IV.A.2.l).
#include "oscar/io/hdf5_chunks.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace oscar::hdf5 {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are stored as they are");

constexpr uint64_t kChunkBytes = uint64_t{1} << 20;  // HDF5's default chunk cache holds one
// Elements of one matrix in a chunk of several: shuffled, each byte of the next matrix is so far
// behind, within the 32 KiB that deflate looks back.
constexpr uint64_t kRepeatElements = uint64_t{1} << 14;

// The next place in row-major order; false behind the last one.
bool advance(Shape& place, const Shape& first, const Shape& end, const Shape& step) {
  for (size_t i = place.size(); i-- > 0;) {
    place[i] += step[i];
    if (place[i] < end[i]) return true;
    place[i] = first[i];
  }
  return false;
}

// The elements of one chunk; what lies outside of the dataset is zero.
std::vector<uint8_t> gather(const DatasetView& dataset, const Shape& offset, const Shape& chunk) {
  const size_t element = dtype_bytes(dataset.dtype), last = chunk.size() - 1;
  std::vector<uint8_t> bytes(element_count(chunk) * element);
  Shape end(chunk.size()), step(chunk.size(), 1);
  for (size_t i = 0; i < chunk.size(); ++i) {
    end[i] = std::min(offset[i] + chunk[i], dataset.shape[i]);
  }
  const uint64_t run = (end[last] - offset[last]) * element;
  step[last] = chunk[last];  // a run is one step
  const auto* const from = static_cast<const uint8_t*>(dataset.data);
  Shape place = offset;
  do {
    uint64_t source = 0, target = 0;
    for (size_t i = 0; i < chunk.size(); ++i) {
      source = source * dataset.shape[i] + place[i];
      target = target * chunk[i] + place[i] - offset[i];
    }
    std::memcpy(bytes.data() + target * element, from + source * element, run);
  } while (advance(place, offset, end, step));
  return bytes;
}

// Byte 0 of every element, then byte 1 of every element, and so on.
std::vector<uint8_t> shuffle(const std::vector<uint8_t>& bytes, size_t element) {
  const size_t count = bytes.size() / element;
  std::vector<uint8_t> shuffled(bytes.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t b = 0; b < element; ++b) shuffled[b * count + i] = bytes[i * element + b];
  }
  return shuffled;
}

std::vector<uint8_t> deflate(const std::vector<uint8_t>& bytes) {
  uLongf size = compressBound(static_cast<uLong>(bytes.size()));
  std::vector<uint8_t> packed(size);
  if (compress2(packed.data(), &size, bytes.data(), static_cast<uLong>(bytes.size()),
                kDeflateLevel) != Z_OK) {
    throw std::bad_alloc();  // the one way in which it fails with room enough
  }
  packed.resize(size);
  packed.shrink_to_fit();  // many chunks wait to be written
  return packed;
}

// Fletcher's checksum over big-endian 16-bit words; a last odd byte is the high one of its word.
uint32_t fletcher32(const std::vector<uint8_t>& bytes) {
  constexpr size_t kWithoutOverflow = 360;  // words before the sums outgrow 32 bits
  const auto fold = [](uint32_t sum) { return (sum & 0xffff) + (sum >> 16); };
  const size_t words = bytes.size() / 2;
  uint32_t first = 0, second = 0;
  for (size_t begin = 0; begin < words; begin += kWithoutOverflow) {
    const size_t end = std::min(begin + kWithoutOverflow, words);
    for (size_t word = begin; word < end; ++word) {
      first += uint32_t{bytes[2 * word]} << 8 | bytes[2 * word + 1];
      second += first;
    }
    first = fold(first);
    second = fold(second);
  }
  if (bytes.size() % 2 != 0) {
    first += uint32_t{bytes.back()} << 8;
    second += first;
    first = fold(first);
    second = fold(second);
  }
  return fold(second) << 16 | fold(first);
}

template <typename Take>
void make_chunks(const DatasetView& dataset, const Take& take) {
  const size_t element = dtype_bytes(dataset.dtype);
  const Shape chunk = chunk_shape(dataset.shape, element);
  const Shape first(chunk.size(), 0);
  Shape offset = first;
  do {
    std::vector<uint8_t> bytes = gather(dataset, offset, chunk);
    if (dataset.compress) bytes = deflate(shuffle(bytes, element));
    const uint32_t checksum = fletcher32(bytes);
    for (int shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<uint8_t>(checksum >> shift));
    }
    take(Chunk{offset, std::move(bytes)});
  } while (advance(offset, first, dataset.shape, chunk));
}

}  // namespace

Shape chunk_shape(const Shape& shape, size_t element_bytes) {
  Shape chunk = shape;
  if (shape.size() == 3) {
    const uint64_t row_bytes = shape[0] * shape[2] * element_bytes;
    const uint64_t most = std::min(kRepeatElements / shape[2], kChunkBytes / row_bytes);
    if (most > 0) {
      const uint64_t parts = (shape[1] + most - 1) / most;
      chunk[1] = (shape[1] + parts - 1) / parts;
      return chunk;
    }
  }
  uint64_t bytes = element_count(shape) * element_bytes;
  for (auto& extent : chunk) {
    if (bytes <= kChunkBytes) break;
    const uint64_t rest = bytes / extent;  // bytes of one index of this dimension
    const uint64_t most = std::max<uint64_t>(1, kChunkBytes / rest);
    const uint64_t parts = (extent + most - 1) / most;
    extent = (extent + parts - 1) / parts;
    bytes = rest * extent;
  }
  return chunk;
}

void encode_chunks(const DatasetView& dataset, const TakeChunk& take) {
  make_chunks(dataset, take);
}

std::vector<Chunk> encode_chunks(const DatasetView& dataset) {
  std::vector<Chunk> chunks;
  make_chunks(dataset, [&](Chunk chunk) { chunks.push_back(std::move(chunk)); });
  return chunks;
}

}  // namespace oscar::hdf5
