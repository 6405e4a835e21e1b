// HDF5 files: datasets and attributes by path, chunks, and the library behind them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "oscar/base/files.h"

namespace oscar::hdf5 {

// HDF5 files behind plain types: the one owner of libhdf5. Nothing here is thread-safe.

// Element types that our own files hold, little-endian; the order is that of Data's alternatives.
enum class Dtype : uint8_t { kU8, kI32, kI64, kF32, kF64 };
const char* dtype_name(Dtype dtype);  // "u8", "i32", "i64", "f32", "f64"
size_t dtype_bytes(Dtype dtype);

using Shape = std::vector<uint64_t>;         // empty for a scalar
std::string shape_text(const Shape& shape);  // "[8, 128, 128]"; "scalar" when empty
uint64_t element_count(const Shape& shape);  // 1 for a scalar

using Data = std::variant<std::vector<uint8_t>, std::vector<int32_t>, std::vector<int64_t>,
                          std::vector<float>, std::vector<double>>;

// A dataset in memory, row-major.
struct Dataset {
  std::string path;  // absolute, "/layers/000/k_mean"
  Shape shape;
  Data data;
  Dtype dtype() const { return static_cast<Dtype>(data.index()); }
};

// The same, borrowed. `compress` adds shuffle and deflate to the Fletcher32 that all have.
struct DatasetView {
  std::string path;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  const void* data = nullptr;
  bool compress = false;
};
DatasetView view(const Dataset& dataset);

// Strings are UTF-8 without NUL, of fixed length in the file; numbers are 64-bit scalars.
using AttributeValue = std::variant<std::string, int64_t, double>;
struct Attribute {
  std::string object;  // absolute path of the group or dataset that carries it
  std::string name;
  AttributeValue value;
};

struct Chunk;  // below

// Creates a file. Same calls, same bytes: no object times, a fixed format version (HDF5 1.10
// and later read it). Each method throws Error naming file and object; a full disk shows in any of
// them, close() included.
class Writer {
 public:
  // Writes through the descriptor of `file`, which must outlive this; its commit() is the caller's.
  explicit Writer(const AtomicFile& file);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void create_group(const std::string& path);  // parents first
  // Chunked with Fletcher32; scalars, which cannot be chunked, are stored plainly. A chunk of a
  // stack of matrices holds the same rows of all of them, so that deflate, which looks 32 KiB back,
  // finds a matrix that the whole stack repeats. The parent
  // group must exist and no dimension may be 0.
  // Its chunks are made one at a time.
  void write(const DatasetView& dataset);
  // With encode_chunks(dataset), which other threads may have made.
  void write(const DatasetView& dataset, const std::vector<Chunk>& chunks);
  void write(const Attribute& attribute);
  void close();  // flushes; must be called for the file to count as written

 private:
  // `chunks` passes all of them to what it is given.
  using TakeChunk = std::function<void(const Chunk&)>;
  void write_chunks(const DatasetView& dataset,
                    const std::function<void(const TakeChunk& take)>& chunks);

  struct State;
  std::unique_ptr<State> state_;
};

// What a reader accepts. Nothing is allocated before a size is checked against these and against
// the bytes that the file really stores (deflate expands 1032 times at most).
struct Limits {
  uint64_t max_dataset_bytes = uint64_t{4} << 30;
  uint64_t max_total_bytes = uint64_t{16} << 30;
  int max_depth = 8;
  int max_objects = 100000;
};

struct ObjectInfo {
  std::string path;
  bool is_dataset = false;  // otherwise a group
  std::string type;         // of a dataset: "f32", "i16", "string", "f64 big-endian", ...
  Shape shape;
};

// Reads files of ours that may come from strangers. Opening first checks everything in a child
// process with limits: external, soft and user links, external storage, virtual datasets, filters
// other than shuffle, deflate and Fletcher32, hard links that make an object appear twice, sizes,
// element types other than Dtype, attributes other than AttributeValue, and that every dataset
// decodes with its checksum. What was checked is what is read: the file is opened once, and refused
// when it was written to meanwhile. Throws Error naming file and object.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path, const Limits& limits = {});
  ~Reader();
  Reader(Reader&&) noexcept;
  Reader& operator=(Reader&&) noexcept;

  // Every group (the root, "/", included) and dataset, in ascending byte order of path.
  const std::vector<ObjectInfo>& objects() const;
  bool contains(const std::string& path) const;
  Dataset read(const std::string& path) const;
  // Attributes of every object, in ascending byte order of object path, then of name.
  std::vector<Attribute> attributes() const;
  // Throws Error when the file has been written to since it was opened.
  void require_unchanged() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Datasets of any HDF5 file (a corpus of token ids, say), after the same checks of links, storage,
// filters and sizes as above. Element types and attributes are not restricted and not read.
std::vector<ObjectInfo> list_datasets(const InputFile& input, const Limits& limits = {});

// One integer dataset of such a file, 1-D [tokens] or 2-D [rows, tokens].
struct IntegerArray {
  Shape shape;
  std::vector<int64_t> values;  // row-major; unsigned 64-bit values above INT64_MAX arrive as that
  uint64_t left = 0;            // elements of the dataset behind these
};
// Throws Error naming `dataset` when it is missing, not of integers (floats are refused, whatever
// their values) or not 1-D or 2-D. Elements behind the first `needed` are neither read nor decoded,
// but rows are whole; shape[0] is that of what was read.
IntegerArray read_integers(const InputFile& input, const std::string& dataset,
                           uint64_t needed = UINT64_MAX, const Limits& limits = {});

// A dataset's chunks as they lie in the file, made by any thread: libhdf5 would make them one at a
// time.

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
