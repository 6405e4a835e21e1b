// The only include of libhdf5: handles that close themselves, checked statuses, types by name.
#pragma once

#define H5_USE_110_API

#include <hdf5.h>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/io/hdf5.h"

// One spelling of the versioned calls for HDF5 1.10 and everything later.

namespace oscar::hdf5 {

// Once per process: the library loads no plugins and does no work at exit. Once per thread: it
// prints nothing.
void initialise_library();

// Throws Error: `what`, where = file and object, found = the library's innermost message.
[[noreturn]] void fail(const std::string& what, const std::string& file, const std::string& object);

// Of how many Handles there are more.
void count_handles(int more);

// Owns one library identifier. A failed identifier (negative) throws at construction.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle(hid_t id, Close close, const char* what, const std::string& file,
         const std::string& object)
      : id_(id), close_(close) {
    if (id_ < 0) fail(what, file, object);
    count_handles(1);
  }
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {
    count_handles(1);
  }
  Handle& operator=(Handle&&) = delete;
  ~Handle() {
    if (id_ >= 0) close_(id_);
    count_handles(-1);
  }
  hid_t get() const { return id_; }
  // For closes whose status matters: those of a file being written.
  herr_t close_now() { return close_(std::exchange(id_, -1)); }

 private:
  hid_t id_;
  Close close_;
};

hid_t file_type(Dtype dtype);    // little-endian, as stored
hid_t memory_type(Dtype dtype);  // of this machine

Handle open_for_reading(const InputFile& input);
Handle open_dataset(hid_t file, const std::string& file_name, const std::string& path);

// Which rules a scan applies beyond links, storage, filters and sizes.
enum class Profile { kOwnFiles, kAnyFile };

// Walks all objects without reading data; throws Error at the first one that breaks a rule.
std::vector<ObjectInfo> scan(hid_t file, const std::string& file_name, const Limits& limits,
                             Profile profile);

// Attributes of one object, by ascending name. With kOwnFiles rules.
std::vector<Attribute> read_attributes(hid_t file, const std::string& file_name,
                                       const std::string& object);

// Decodes a dataset block by block (64 MiB at most each) and drops the result: checksums and
// filters run, memory stays bounded.
void decode_dataset(hid_t file, const std::string& file_name, const ObjectInfo& info);

// No locks: HDF5's own would meet those of temporaries (oscar/base/files.h).
Handle access_properties(const std::string& file);

// Runs scan() and then `also` in a child process.
void check_in_sandbox(const InputFile& input, const Limits& limits, Profile profile,
                      const std::function<void(hid_t, const std::vector<ObjectInfo>&)>& also);

}  // namespace oscar::hdf5
