// HDF5 files: datasets and attributes by path, chunks, and the library behind them.
#include "oscar/io/hdf5.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/io/hdf5_internal.h"

namespace oscar::hdf5 {

// Writing and reading: creation properties that fix the bytes, and typed transfers.

namespace {

// A group of this many links still keeps them in its header.
constexpr unsigned kLinksInGroup = 64;

void check(herr_t status, const char* what, const std::string& file, const std::string& object) {
  if (status < 0) fail(what, file, object);
}

Handle property_list(hid_t kind, const std::string& file) {
  return {H5Pcreate(kind), H5Pclose, "cannot make an HDF5 property list", file, ""};
}

// No object times; attributes stay beside their object, however many.
void fix_bytes(hid_t creation, const std::string& file) {
  check(H5Pset_obj_track_times(creation, false), "cannot turn off object times", file, "");
  check(H5Pset_attr_phase_change(creation, 64, 0), "cannot set attribute storage", file, "");
}

Handle dataspace(const Shape& shape, const std::string& file, const std::string& object) {
  const std::vector<hsize_t> extents(shape.begin(), shape.end());
  const hid_t id = shape.empty()
                       ? H5Screate(H5S_SCALAR)
                       : H5Screate_simple(static_cast<int>(shape.size()), extents.data(), nullptr);
  return {id, H5Sclose, "cannot describe a shape", file, object};
}

Handle string_type(size_t bytes, const std::string& file, const std::string& object) {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "cannot make a string type", file, object);
  check(H5Tset_size(type.get(), std::max<size_t>(bytes, 1)), "cannot size a string", file, object);
  check(H5Tset_cset(type.get(), H5T_CSET_UTF8), "cannot set UTF-8", file, object);
  check(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), "cannot set padding", file, object);
  return type;
}

template <typename T>
Data make_data(uint64_t count) {
  return std::vector<T>(count);
}

Data allocate(Dtype dtype, uint64_t count) {
  switch (dtype) {
    case Dtype::kU8:
      return make_data<uint8_t>(count);
    case Dtype::kI32:
      return make_data<int32_t>(count);
    case Dtype::kI64:
      return make_data<int64_t>(count);
    case Dtype::kF32:
      return make_data<float>(count);
    case Dtype::kF64:
      break;
  }
  return make_data<double>(count);
}

void* data_pointer(Data& data) {
  return std::visit([](auto& values) -> void* { return values.data(); }, data);
}

}  // namespace

hid_t file_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kU8:
      return H5T_STD_U8LE;
    case Dtype::kI32:
      return H5T_STD_I32LE;
    case Dtype::kI64:
      return H5T_STD_I64LE;
    case Dtype::kF32:
      return H5T_IEEE_F32LE;
    case Dtype::kF64:
      break;
  }
  return H5T_IEEE_F64LE;
}

hid_t memory_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kU8:
      return H5T_NATIVE_UINT8;
    case Dtype::kI32:
      return H5T_NATIVE_INT32;
    case Dtype::kI64:
      return H5T_NATIVE_INT64;
    case Dtype::kF32:
      return H5T_NATIVE_FLOAT;
    case Dtype::kF64:
      break;
  }
  return H5T_NATIVE_DOUBLE;
}

const char* dtype_name(Dtype dtype) {
  constexpr const char* kNames[] = {"u8", "i32", "i64", "f32", "f64"};
  return kNames[static_cast<size_t>(dtype)];
}

size_t dtype_bytes(Dtype dtype) {
  constexpr size_t kBytes[] = {1, 4, 8, 4, 8};
  return kBytes[static_cast<size_t>(dtype)];
}

std::string shape_text(const Shape& shape) {
  if (shape.empty()) return "scalar";
  std::string text = "[";
  for (const uint64_t extent : shape) text += std::to_string(extent) + ", ";
  text.resize(text.size() - 2);
  return text + "]";
}

uint64_t element_count(const Shape& shape) {
  uint64_t count = 1;
  for (const uint64_t extent : shape) count *= extent;
  return count;
}

DatasetView view(const Dataset& dataset) {
  const void* data =
      std::visit([](const auto& values) -> const void* { return values.data(); }, dataset.data);
  return {.path = dataset.path, .dtype = dataset.dtype(), .shape = dataset.shape, .data = data};
}

// --- writing ---

namespace {

// A file with a name for as long as this lives: HDF5 wants one for what it writes to, and the
// memory behind a stream has none.
class NamedFile {
 public:
  NamedFile() : name_((std::filesystem::temp_directory_path() / "oscar-XXXXXX").string()) {
    descriptor_ = ::mkostemp(name_.data(), O_CLOEXEC);
    if (descriptor_ < 0) throw_file_error("cannot write a temporary file", name_);
    unfinished_.emplace(name_);
  }
  ~NamedFile() {
    ::unlink(name_.c_str());
    ::close(descriptor_);
  }
  NamedFile(const NamedFile&) = delete;
  NamedFile& operator=(const NamedFile&) = delete;

  const std::string& name() const { return name_; }
  // All of it, to the beginning of what `to` leads to.
  void copy(int to) const {
    std::vector<char> block(size_t{1} << 20);
    for (off_t done = 0;;) {
      const ssize_t count = ::pread(descriptor_, block.data(), block.size(), done);
      if (count == 0) return;
      if (count < 0 || ::pwrite(to, block.data(), static_cast<size_t>(count), done) != count) {
        throw_file_error("cannot write output file", name_);
      }
      done += count;
    }
  }

 private:
  std::string name_;
  int descriptor_ = -1;
  std::optional<Unfinished> unfinished_;
};

Handle create_file(const std::string& path, const std::string& name) {
  initialise_library();
  const Handle creation = property_list(H5P_FILE_CREATE, name);
  const Handle access = access_properties(name);
  fix_bytes(creation.get(), name);
  // From 1.10 on a dataset of one chunk needs no index; before, one took 3 KiB.
  check(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110),
        "cannot fix the HDF5 format version", name, "");
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG), "cannot set how to close", name, "");
  return {H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose,
          "cannot create an HDF5 file", name, ""};
}

}  // namespace

struct Writer::State {
  explicit State(const AtomicFile& out) : name(out.target().string()), target(out.descriptor()) {
    if (out.is_stream()) behind_stream.emplace();
    file.emplace(create_file(
        behind_stream ? behind_stream->name() : "/proc/self/fd/" + std::to_string(target), name));
  }

  std::string name;
  int target;
  std::optional<NamedFile> behind_stream;
  std::optional<Handle> file;
};

Writer::Writer(const AtomicFile& file) : state_(new State(file)) {}
Writer::~Writer() = default;

void Writer::create_group(const std::string& path) {
  const Handle creation = property_list(H5P_GROUP_CREATE, state_->name);
  fix_bytes(creation.get(), state_->name);
  check(H5Pset_link_phase_change(creation.get(), kLinksInGroup, 0), "cannot set link storage",
        state_->name, path);
  Handle group(
      H5Gcreate2(state_->file->get(), path.c_str(), H5P_DEFAULT, creation.get(), H5P_DEFAULT),
      H5Gclose, "cannot create an HDF5 group", state_->name, path);
  check(group.close_now(), "cannot write an HDF5 group", state_->name, path);
}

void Writer::write(const DatasetView& dataset) {
  write_chunks(dataset, [&](const TakeChunk& take) { encode_chunks(dataset, take); });
}

void Writer::write(const DatasetView& dataset, const std::vector<Chunk>& chunks) {
  write_chunks(dataset, [&](const TakeChunk& take) { std::ranges::for_each(chunks, take); });
}

void Writer::write_chunks(const DatasetView& dataset,
                          const std::function<void(const TakeChunk& take)>& chunks) {
  initialise_library();  // of this thread, too
  const std::string& name = state_->name;
  const std::string& path = dataset.path;
  const Handle creation = property_list(H5P_DATASET_CREATE, name);
  fix_bytes(creation.get(), name);
  if (!dataset.shape.empty()) {
    const Shape extents = chunk_shape(dataset.shape, dtype_bytes(dataset.dtype));
    const std::vector<hsize_t> chunk(extents.begin(), extents.end());
    check(H5Pset_chunk(creation.get(), static_cast<int>(chunk.size()), chunk.data()),
          "cannot set chunks", name, path);
    check(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER), "cannot set filling", name, path);
    if (dataset.compress) {
      check(H5Pset_shuffle(creation.get()), "cannot set shuffle", name, path);
      check(H5Pset_deflate(creation.get(), kDeflateLevel), "cannot set deflate", name, path);
    }
    check(H5Pset_fletcher32(creation.get()), "cannot set checksums", name, path);
  }
  const Handle space = dataspace(dataset.shape, name, path);
  Handle set(H5Dcreate2(state_->file->get(), path.c_str(), file_type(dataset.dtype), space.get(),
                        H5P_DEFAULT, creation.get(), H5P_DEFAULT),
             H5Dclose, "cannot create an HDF5 dataset", name, path);
  const char* const failed = "cannot write an HDF5 dataset";
  if (dataset.shape.empty()) {
    check(H5Dwrite(set.get(), memory_type(dataset.dtype), H5S_ALL, H5S_ALL, H5P_DEFAULT,
                   dataset.data),
          failed, name, path);
  } else {
    chunks([&](const Chunk& chunk) {
      const std::vector<hsize_t> offset(chunk.offset.begin(), chunk.offset.end());
      check(H5Dwrite_chunk(set.get(), H5P_DEFAULT, 0, offset.data(), chunk.bytes.size(),
                           chunk.bytes.data()),
            failed, name, path);
    });
  }
  check(set.close_now(), failed, name, path);
}

void Writer::write(const Attribute& attribute) {
  const std::string& name = state_->name;
  const std::string label = attribute.object + " attribute " + attribute.name;
  Handle object(H5Oopen(state_->file->get(), attribute.object.c_str(), H5P_DEFAULT), H5Oclose,
                "cannot open an HDF5 object", name, attribute.object);
  const Handle space = dataspace({}, name, label);
  const auto put = [&](hid_t stored, hid_t in_memory, const void* value) {
    Handle created(H5Acreate2(object.get(), attribute.name.c_str(), stored, space.get(),
                              H5P_DEFAULT, H5P_DEFAULT),
                   H5Aclose, "cannot create an HDF5 attribute", name, label);
    check(H5Awrite(created.get(), in_memory, value), "cannot write an HDF5 attribute", name, label);
    check(created.close_now(), "cannot write an HDF5 attribute", name, label);
  };
  if (const auto* text = std::get_if<std::string>(&attribute.value)) {
    if (text->find('\0') != std::string::npos) {
      throw Error({.what = "text of an attribute holds a NUL byte", .where = name + ": " + label});
    }
    const Handle type = string_type(text->size(), name, label);
    put(type.get(), type.get(), text->c_str());
  } else if (const auto* integer = std::get_if<int64_t>(&attribute.value)) {
    put(H5T_STD_I64LE, H5T_NATIVE_INT64, integer);
  } else {
    put(H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &std::get<double>(attribute.value));
  }
  check(object.close_now(), "cannot write an HDF5 attribute", name, label);
}

void Writer::close() {
  check(H5Fflush(state_->file->get(), H5F_SCOPE_GLOBAL), "cannot write an HDF5 file", state_->name,
        "");
  check(state_->file->close_now(), "cannot close an HDF5 file", state_->name, "");
  if (state_->behind_stream) state_->behind_stream->copy(state_->target);
}

// --- reading ---

struct Reader::State {
  InputFile input;
  std::string name;
  Handle file;
  std::vector<ObjectInfo> objects;
};

Reader::Reader(const std::filesystem::path& path, const Limits& limits) {
  const std::string name = path.string();
  InputFile input(path);
  check_in_sandbox(input, limits, Profile::kOwnFiles,
                   [&name](hid_t file, const std::vector<ObjectInfo>& objects) {
                     for (const auto& object : objects) {
                       read_attributes(file, name, object.path);
                       if (object.is_dataset) decode_dataset(file, name, object);
                     }
                   });
  Handle file = open_for_reading(input);
  state_.reset(new State{std::move(input), name, std::move(file), {}});
  state_->objects = scan(state_->file.get(), name, limits, Profile::kOwnFiles);
  require_unchanged();
}
Reader::~Reader() = default;
Reader::Reader(Reader&&) noexcept = default;
Reader& Reader::operator=(Reader&&) noexcept = default;

const std::vector<ObjectInfo>& Reader::objects() const { return state_->objects; }

namespace {

const ObjectInfo* find_object(const std::vector<ObjectInfo>& objects, const std::string& path) {
  const auto place = std::lower_bound(
      objects.begin(), objects.end(), path,
      [](const ObjectInfo& object, const std::string& p) { return object.path < p; });
  return place != objects.end() && place->path == path ? &*place : nullptr;
}

}  // namespace

void Reader::require_unchanged() const { state_->input.require_unchanged(); }

bool Reader::contains(const std::string& path) const {
  return find_object(state_->objects, path) != nullptr;
}

Dataset Reader::read(const std::string& path) const {
  const ObjectInfo* info = find_object(state_->objects, path);
  if (info == nullptr || !info->is_dataset) {
    throw Error({.what = "HDF5 dataset is missing", .where = state_->name + ": " + path});
  }
  const Handle set = open_dataset(state_->file.get(), state_->name, path);
  size_t dtype = 0;
  while (dtype_name(static_cast<Dtype>(dtype)) != info->type) ++dtype;
  Dataset result{path, info->shape,
                 allocate(static_cast<Dtype>(dtype), element_count(info->shape))};
  check(H5Dread(set.get(), memory_type(result.dtype()), H5S_ALL, H5S_ALL, H5P_DEFAULT,
                data_pointer(result.data)),
        "cannot read an HDF5 dataset", state_->name, path);
  return result;
}

std::vector<Attribute> Reader::attributes() const {
  std::vector<Attribute> all;
  for (const auto& object : state_->objects) {
    auto some = read_attributes(state_->file.get(), state_->name, object.path);
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

std::vector<ObjectInfo> list_datasets(const InputFile& input, const Limits& limits) {
  check_in_sandbox(input, limits, Profile::kAnyFile, nullptr);
  const Handle file = open_for_reading(input);
  auto objects = scan(file.get(), input.path().string(), limits, Profile::kAnyFile);
  std::erase_if(objects, [](const ObjectInfo& object) { return !object.is_dataset; });
  return objects;
}

namespace {

// As many leading rows (of a 1-D dataset: elements) as hold `needed` elements.
Shape leading_part(Shape shape, uint64_t needed) {
  const uint64_t row = shape.size() == 2 ? std::max<uint64_t>(shape[1], 1) : 1;
  shape[0] = std::min(shape[0], needed / row + (needed % row != 0 ? 1 : 0));
  return shape;
}

// Reads the leading `part` of a dataset of integers.
std::vector<int64_t> read_leading(hid_t file, const std::string& name, const std::string& object,
                                  const Shape& part) {
  std::vector<int64_t> values(element_count(part));
  if (values.empty()) return values;
  const Handle set = open_dataset(file, name, object);
  const Handle stored(H5Dget_space(set.get()), H5Sclose, "cannot read a shape", name, object);
  const Handle memory = dataspace(part, name, object);
  const std::vector<hsize_t> begin(part.size(), 0), extents(part.begin(), part.end());
  check(H5Sselect_hyperslab(stored.get(), H5S_SELECT_SET, begin.data(), nullptr, extents.data(),
                            nullptr),
        "cannot select a part of an HDF5 dataset", name, object);
  check(
      H5Dread(set.get(), H5T_NATIVE_INT64, memory.get(), stored.get(), H5P_DEFAULT, values.data()),
      "cannot read an HDF5 dataset", name, object);
  return values;
}

}  // namespace

IntegerArray read_integers(const InputFile& input, const std::string& dataset, uint64_t needed,
                           const Limits& limits) {
  const std::string name = input.path().string();
  const std::string object = dataset.starts_with('/') ? dataset : "/" + dataset;
  const auto find = [&](const std::vector<ObjectInfo>& objects) {
    const ObjectInfo* info = find_object(objects, object);
    if (info == nullptr || !info->is_dataset) {
      throw Error({.what = "HDF5 dataset is missing", .where = name + ": " + object});
    }
    const bool integer = (info->type[0] == 'i' || info->type[0] == 'u') &&
                         info->type.find_first_not_of("0123456789", 1) >= 2;
    if (!integer || info->shape.empty() || info->shape.size() > 2) {
      throw Error({.what = "HDF5 dataset does not hold token ids",
                   .where = name + ": " + object,
                   .expected = "integers, 1-D (one stream) or 2-D (one sequence a row)",
                   .found = info->type + " " + shape_text(info->shape),
                   .hint = "write the ids as int32 or int64"});
    }
    return *info;
  };
  check_in_sandbox(input, limits, Profile::kAnyFile,
                   [&](hid_t file, const std::vector<ObjectInfo>& objects) {
                     const ObjectInfo info = find(objects);
                     read_leading(file, name, object, leading_part(info.shape, needed));
                   });
  const Handle file = open_for_reading(input);
  const ObjectInfo info = find(scan(file.get(), name, limits, Profile::kAnyFile));
  const Shape part = leading_part(info.shape, needed);
  IntegerArray result{part, read_leading(file.get(), name, object, part),
                      element_count(info.shape) - element_count(part)};
  input.require_unchanged();
  return result;
}

// libhdf5 as a whole: its start, its messages, and what happens where it ends the program.

namespace {

herr_t keep_message(unsigned, const H5E_error2_t* entry, void* text) {
  if (entry->desc != nullptr) *static_cast<std::string*>(text) = entry->desc;
  return 0;
}

// Of a failed system call the library tells times and addresses too: what the system said is kept.
std::string innermost_message() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_message, &text);
  H5Eclear2(H5E_DEFAULT);
  constexpr std::string_view kSystem = "error message = '";
  const size_t begin = text.find(kSystem);
  if (begin == std::string::npos) return text;
  text.erase(0, begin + kSystem.size());
  return text.substr(0, text.find('\''));
}

// Handles that live: while there are any, or an output is unfinished, nothing of ours calls exit().
std::atomic<int>& live_handles() {
  static std::atomic<int> count{0};
  return count;
}

// libhdf5 calls exit(-1) where it finds no memory for an identifier (H5I_register).
void end_as_an_error(int status, void*) {
  if (status != -1 || (!remove_unfinished() && live_handles() == 0)) return;
  constexpr std::string_view kMessage =
      "not enough memory: libhdf5 ended the program, which leaves no new file\n";
  const ssize_t written = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  static_cast<void>(written);
  ::_exit(EXIT_FAILURE);
}

}  // namespace

void count_handles(int more) { live_handles() += more; }

void initialise_library() {
  static const bool done = [] {
    ::on_exit(end_as_an_error, nullptr);
    H5dont_atexit();
    H5open();
    H5PLset_loading_state(0);
    return true;
  }();
  // Libraries that are safe for threads print in each that was not told.
  static thread_local const bool quiet = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  (void)done;
  (void)quiet;
}

void fail(const std::string& what, const std::string& file, const std::string& object) {
  const std::string found = innermost_message();
  const bool full = found == std::strerror(ENOSPC) || found == std::strerror(EDQUOT) ||
                    found == std::strerror(EFBIG);
  throw Error({.what = what,
               .where = object.empty() ? file : file + ": " + object,
               .found = found,
               .hint = full ? "free some space or choose another folder" : ""});
}

// The three filters of our files (HDF5 File Format Specification 3.0, III.B and IV.A.2.l).

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
