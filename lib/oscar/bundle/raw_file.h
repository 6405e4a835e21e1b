// A bundle file as flat lists of groups, datasets and attributes: between HDF5 and our structs.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/io/hdf5.h"

namespace oscar {

// Ready to be written. Datasets borrow from the structs they describe, which must outlive this.
struct EncodedFile {
  std::vector<std::string> groups;  // parents first
  std::vector<hdf5::DatasetView> datasets;
  std::vector<hdf5::Attribute> attributes;
};

// Throws Error naming layer and name when a value is not finite or a shape is wrong: nothing is
// written that the reader would refuse. `state` may be null; with it layers may be missing.
EncodedFile encode_bundle(const Bundle& bundle, const ResumeState* state);

// Datasets that write_encoded holds at a time as they will be in the file: some for each core.
int64_t datasets_together();

// Adds content_sha256 and writes into `file`, which the caller commits. Before each dataset
// `between` is called, in threads of its own too, which may throw.
void write_encoded(EncodedFile encoded, const AtomicFile& file,
                   const std::function<void()>& between = {});

// As read. Reading has passed every check of hdf5::Reader.
struct RawFile {
  std::string name;  // of the file, for errors
  std::vector<hdf5::ObjectInfo> objects;
  std::map<std::string, hdf5::Dataset> datasets;                                  // by path
  std::map<std::string, std::map<std::string, hdf5::AttributeValue>> attributes;  // object, name
};

enum class FileKind { kRotations, kStatistics, kCheckpoint };

// The whole content: what a file of version 0.1 leaves out (derived.h) is there again.
RawFile load_raw(const std::filesystem::path& path);

// Format, major version and required features; the first thing to look at. Throws Error.
FileKind check_format(const RawFile& raw);
// Throws Error when the stored content_sha256 is not that of the content.
void check_content_hash(const RawFile& raw);

// To structs, moving data out of `raw`. Throws Error naming the object when a required name is
// missing, or a dtype, shape or value is wrong. Unknown names are ignored.
Bundle decode_bundle(RawFile& raw, FileKind kind);
ResumeState decode_resume(RawFile& raw);

}  // namespace oscar
