// What an HDF5 file from a stranger must not hold, checked object by object before data is read.
#include <algorithm>
#include <set>

#include "oscar/base/error.h"
#include "oscar/base/sandbox.h"
#include "oscar/io/hdf5_internal.h"

namespace oscar::hdf5 {
namespace {

constexpr uint64_t kDeflateRatio = 1032;  // zlib's largest expansion
constexpr uint64_t kMaxAttributeBytes = uint64_t{16} << 20;
constexpr uint64_t kMaxAttributes = 4096;  // of one object
constexpr uint64_t kMaxChunkBytes = uint64_t{256} << 20;
constexpr uint64_t kBlockBytes = uint64_t{64} << 20;

struct Scan {
  const std::string& file_name;
  const Limits& limits;
  Profile profile;
  hid_t file;
  uint64_t file_bytes;
  uint64_t total_bytes = 0;
  uint64_t stored_bytes = 0;
  std::set<haddr_t> seen = {};
  std::vector<ObjectInfo> objects = {};

  [[noreturn]] void refuse(const std::string& what, const std::string& path,
                           const std::string& expected = "", const std::string& found = "",
                           const std::string& hint = "") const {
    throw Error({.what = what,
                 .where = file_name + ": " + path,
                 .expected = expected,
                 .found = found,
                 .hint = hint});
  }
  void status(herr_t value, const char* what, const std::string& path) const {
    if (value < 0) fail(what, file_name, path);
  }
};

struct Link {
  std::string name;
  H5L_type_t type;
};

struct LinkList {
  std::vector<Link> links;
  size_t most;
};

herr_t collect_link(hid_t, const char* name, const H5L_info_t* info, void* context) {
  auto* list = static_cast<LinkList*>(context);
  if (list->links.size() >= list->most) return -1;
  try {
    list->links.push_back({name, info->type});
  } catch (...) {  // C code calls this: nothing may pass through it
    return -1;
  }
  return 0;
}

struct NameList {
  std::vector<std::string> names;
  size_t most;
};

herr_t collect_attribute(hid_t, const char* name, const H5A_info_t*, void* context) {
  auto* list = static_cast<NameList*>(context);
  if (list->names.size() >= list->most) return -1;
  try {
    list->names.emplace_back(name);
  } catch (...) {
    return -1;
  }
  return 0;
}

std::string type_name(hid_t type) {
  const H5T_class_t kind = H5Tget_class(type);
  const std::string bits = std::to_string(8 * H5Tget_size(type));
  const std::string order = H5Tget_order(type) == H5T_ORDER_BE ? " big-endian" : "";
  switch (kind) {
    case H5T_INTEGER:
      return (H5Tget_sign(type) == H5T_SGN_NONE ? "u" : "i") + bits + order;
    case H5T_FLOAT:
      return "f" + bits + order;
    case H5T_STRING:
      return H5Tis_variable_str(type) > 0 ? "variable-length string" : "string";
    case H5T_COMPOUND:
      return "compound";
    case H5T_REFERENCE:
      return "reference";
    case H5T_VLEN:
      return "variable-length";
    case H5T_ENUM:
      return "enum";
    case H5T_ARRAY:
      return "array";
    default:
      return "opaque or unknown";
  }
}

// One of our five types with nothing unusual inside (offset, precision, odd floats).
bool is_own_type(hid_t type) {
  for (const Dtype dtype : {Dtype::kU8, Dtype::kI32, Dtype::kI64, Dtype::kF32, Dtype::kF64}) {
    if (H5Tequal(type, file_type(dtype)) > 0) return true;
  }
  return false;
}

Shape shape_of(const Scan& scan, hid_t space, const std::string& path) {
  const H5S_class_t kind = H5Sget_simple_extent_type(space);
  if (kind == H5S_SCALAR) return {};
  if (kind != H5S_SIMPLE) scan.refuse("dataset has no shape", path);
  const int rank = H5Sget_simple_extent_ndims(space);
  if (rank < 0 || rank > H5S_MAX_RANK) fail("cannot read a shape", scan.file_name, path);
  std::vector<hsize_t> extents(static_cast<size_t>(rank));
  scan.status(H5Sget_simple_extent_dims(space, extents.data(), nullptr), "cannot read a shape",
              path);
  return {extents.begin(), extents.end()};
}

// Product that stops at the largest number instead of wrapping.
uint64_t saturating_bytes(const Shape& shape, uint64_t element_bytes) {
  uint64_t bytes = element_bytes;
  for (const uint64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return UINT64_MAX;
  }
  return bytes;
}

// Layout and filters. Returns whether deflate is among them.
bool check_storage(const Scan& scan, hid_t creation, uint64_t element_bytes,
                   const std::string& path) {
  const H5D_layout_t layout = H5Pget_layout(creation);
  if (layout == H5D_VIRTUAL) {
    scan.refuse("virtual datasets are refused: they read other files", path, "", "",
                "copy the data into one file first");
  }
  if (layout != H5D_COMPACT && layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED) {
    scan.refuse("dataset has an unknown storage layout", path);
  }
  if (H5Pget_external_count(creation) != 0) {
    scan.refuse("external storage is refused: it reads other files", path, "", "",
                "copy the data into one file first");
  }
  if (layout == H5D_CHUNKED) {
    std::vector<hsize_t> chunk(H5S_MAX_RANK);
    const int rank = H5Pget_chunk(creation, H5S_MAX_RANK, chunk.data());
    if (rank < 0) fail("cannot read a chunk shape", scan.file_name, path);
    chunk.resize(static_cast<size_t>(rank));
    const uint64_t bytes = saturating_bytes({chunk.begin(), chunk.end()}, element_bytes);
    if (bytes > kMaxChunkBytes) {
      scan.refuse("dataset has chunks of absurd size", path,
                  std::to_string(kMaxChunkBytes) + " bytes at most",
                  std::to_string(bytes) + " bytes");
    }
  }
  const int filters = H5Pget_nfilters(creation);
  if (filters < 0) fail("cannot read the filters", scan.file_name, path);
  bool deflate = false;
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0, values[8] = {};
    size_t value_count = 8;
    char name[64] = {};
    const H5Z_filter_t filter = H5Pget_filter2(creation, static_cast<unsigned>(i), &flags,
                                               &value_count, values, sizeof(name), name, &config);
    if (filter == H5Z_FILTER_DEFLATE && deflate) {
      scan.refuse("deflate inside deflate is refused", path);
    }
    deflate = deflate || filter == H5Z_FILTER_DEFLATE;
    if (filter != H5Z_FILTER_DEFLATE && filter != H5Z_FILTER_SHUFFLE &&
        filter != H5Z_FILTER_FLETCHER32) {
      name[sizeof(name) - 1] = '\0';
      scan.refuse(
          "dataset uses a filter that is refused", path, "shuffle, deflate or fletcher32",
          "filter " + std::to_string(filter) + (name[0] ? " (" + std::string(name) + ")" : ""),
          "rewrite the file with gzip or without compression");
    }
  }
  return deflate;
}

void check_dataset(Scan& scan, const std::string& path) {
  const Handle set = open_dataset(scan.file, scan.file_name, path);
  const Handle creation(H5Dget_create_plist(set.get()), H5Pclose, "cannot read properties",
                        scan.file_name, path);
  const Handle type(H5Dget_type(set.get()), H5Tclose, "cannot read a type", scan.file_name, path);
  const uint64_t element_bytes = H5Tget_size(type.get());
  const bool deflate = check_storage(scan, creation.get(), element_bytes, path);
  const std::string type_text = type_name(type.get());
  if (scan.profile == Profile::kOwnFiles && !is_own_type(type.get())) {
    scan.refuse("dataset has an element type that is not used here", path,
                "u8, i32, i64, f32 or f64, little-endian", type_text);
  }
  const Handle space(H5Dget_space(set.get()), H5Sclose, "cannot read a shape", scan.file_name,
                     path);
  const Shape shape = shape_of(scan, space.get(), path);
  const uint64_t bytes = saturating_bytes(shape, element_bytes);
  const uint64_t stored = H5Dget_storage_size(set.get());
  const uint64_t possible = deflate ? saturating_bytes({stored}, kDeflateRatio) : stored;
  if (bytes > scan.limits.max_dataset_bytes) {
    scan.refuse("dataset is larger than this program accepts", path,
                std::to_string(scan.limits.max_dataset_bytes) + " bytes at most",
                type_text + " " + shape_text(shape));
  }
  if (stored > scan.file_bytes || bytes > possible) {
    scan.refuse("dataset declares more than the file stores", path,
                "at most " + std::to_string(std::min(possible, scan.file_bytes)) + " bytes",
                std::to_string(bytes) + " bytes, " + type_text + " " + shape_text(shape));
  }
  scan.stored_bytes += stored;
  scan.total_bytes += bytes;
  if (scan.total_bytes > scan.limits.max_total_bytes || scan.stored_bytes > scan.file_bytes) {
    scan.refuse("datasets together are larger than this program accepts", path,
                std::to_string(scan.limits.max_total_bytes) + " bytes at most",
                std::to_string(scan.total_bytes) + " bytes up to this one");
  }
  scan.objects.push_back({path, true, type_text, shape});
}

void visit(Scan& scan, const std::string& path, int depth);

void visit_children(Scan& scan, const std::string& path, int depth) {
  if (depth >= scan.limits.max_depth) {
    scan.refuse("groups are nested too deeply", path,
                std::to_string(scan.limits.max_depth) + " levels at most");
  }
  LinkList list{{}, static_cast<size_t>(scan.limits.max_objects)};
  {
    const Handle group(H5Gopen2(scan.file, path.c_str(), H5P_DEFAULT), H5Gclose,
                       "cannot open a group", scan.file_name, path);
    scan.status(H5Literate(group.get(), H5_INDEX_NAME, H5_ITER_INC, nullptr, collect_link, &list),
                "cannot list a group", path);
  }
  for (const Link& link : list.links) {
    const std::string child = (path == "/" ? path : path + "/") + link.name;
    // "." would be the group itself, and ".." is only a trap for people.
    if (link.name.empty() || link.name == "." || link.name == "..") {
      scan.refuse("link has a name that is refused", child);
    }
    const char* kind = link.type == H5L_TYPE_SOFT       ? "soft links are refused"
                       : link.type == H5L_TYPE_EXTERNAL ? "external links are refused"
                       : link.type != H5L_TYPE_HARD     ? "user-defined links are refused"
                                                        : nullptr;
    if (kind != nullptr) scan.refuse(kind, child, "", "", "store the object itself in its place");
    visit(scan, child, depth + 1);
  }
}

void visit(Scan& scan, const std::string& path, int depth) {
  H5O_info_t info{};
  scan.status(H5Oget_info_by_name(scan.file, path.c_str(), &info, H5P_DEFAULT),
              "cannot read an object", path);
  if (!scan.seen.insert(info.addr).second) {
    scan.refuse("an object appears under two names (a cycle or a second hard link)", path);
  }
  if (scan.seen.size() > static_cast<size_t>(scan.limits.max_objects)) {
    scan.refuse("file holds too many objects", path,
                std::to_string(scan.limits.max_objects) + " at most");
  }
  if (scan.profile == Profile::kOwnFiles && info.num_attrs > kMaxAttributes) {
    scan.refuse("object has too many attributes", path);
  }
  if (info.type == H5O_TYPE_GROUP) {
    scan.objects.push_back({path, false, "", {}});
    visit_children(scan, path, depth);
  } else if (info.type == H5O_TYPE_DATASET) {
    check_dataset(scan, path);
  } else {
    scan.refuse("only groups and datasets are accepted", path);
  }
}

AttributeValue read_value(hid_t opened, const std::string& file_name, const std::string& label) {
  const auto refuse = [&](const std::string& found) {
    throw Error({.what = "attribute has a type that is not used here",
                 .where = file_name + ": " + label,
                 .expected = "a fixed-length string, or a 64-bit integer or float scalar",
                 .found = found});
  };
  const Handle type(H5Aget_type(opened), H5Tclose, "cannot read a type", file_name, label);
  const Handle space(H5Aget_space(opened), H5Sclose, "cannot read a shape", file_name, label);
  if (H5Sget_simple_extent_type(space.get()) != H5S_SCALAR) refuse("an array");
  const auto read = [&](hid_t memory, void* to) {
    if (H5Aread(opened, memory, to) < 0) fail("cannot read an attribute", file_name, label);
  };
  if (H5Tget_class(type.get()) == H5T_STRING && H5Tis_variable_str(type.get()) == 0) {
    const size_t bytes = H5Tget_size(type.get());
    if (bytes > kMaxAttributeBytes) refuse(std::to_string(bytes) + " bytes of text");
    std::string text(bytes, '\0');
    read(type.get(), text.data());
    if (const size_t end = text.find('\0'); end != std::string::npos) {
      if (text.find_first_not_of('\0', end) != std::string::npos) refuse("text with NUL inside");
      text.resize(end);
    }
    return text;
  }
  if (H5Tequal(type.get(), H5T_STD_I64LE) > 0) {
    int64_t value = 0;
    read(H5T_NATIVE_INT64, &value);
    return value;
  }
  if (H5Tequal(type.get(), H5T_IEEE_F64LE) <= 0) refuse(type_name(type.get()));
  double value = 0;
  read(H5T_NATIVE_DOUBLE, &value);
  return value;
}

}  // namespace

Handle access_properties(const std::string& file) {
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "cannot make an HDF5 property list", file,
                "");
  if (H5Pset_file_locking(access.get(), false, true) < 0) fail("cannot turn off locks", file, "");
  return access;
}

Handle open_for_reading(const InputFile& input) {
  initialise_library();
  const std::string name = input.path().string();
  const Handle access = access_properties(name);
  const hid_t file = H5Fopen(input.alias().c_str(), H5F_ACC_RDONLY, access.get());
  if (file < 0) input.require_in_place();  // libhdf5 asks for a name that leads to the file
  return {file, H5Fclose, "not a readable HDF5 file, or cut short", name, ""};
}

Handle open_dataset(hid_t file, const std::string& file_name, const std::string& path) {
  return {H5Dopen2(file, path.c_str(), H5P_DEFAULT), H5Dclose, "cannot open a dataset", file_name,
          path};
}

std::vector<ObjectInfo> scan(hid_t file, const std::string& file_name, const Limits& limits,
                             Profile profile) {
  Scan state{file_name, limits, profile, file, std::filesystem::file_size(file_name)};
  visit(state, "/", 0);
  std::sort(state.objects.begin(), state.objects.end(),
            [](const ObjectInfo& a, const ObjectInfo& b) { return a.path < b.path; });
  return std::move(state.objects);
}

std::vector<Attribute> read_attributes(hid_t file, const std::string& file_name,
                                       const std::string& object) {
  const Handle owner(H5Oopen(file, object.c_str(), H5P_DEFAULT), H5Oclose, "cannot open an object",
                     file_name, object);
  // By name: of each that is opened by its place, the library makes a list of all.
  NameList list{{}, kMaxAttributes};
  hsize_t at = 0;
  if (H5Aiterate2(owner.get(), H5_INDEX_NAME, H5_ITER_INC, &at, collect_attribute, &list) < 0) {
    fail("cannot list attributes", file_name, object);
  }
  std::vector<Attribute> all;
  for (const std::string& name : list.names) {
    if (name.empty() || name.size() > 1024) fail("attribute has a refused name", file_name, object);
    const Handle opened(H5Aopen(owner.get(), name.c_str(), H5P_DEFAULT), H5Aclose,
                        "cannot open an attribute", file_name, object);
    all.push_back(
        {object, name, read_value(opened.get(), file_name, object + " attribute " + name)});
  }
  std::sort(all.begin(), all.end(),
            [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
  return all;
}

void decode_dataset(hid_t file, const std::string& file_name, const ObjectInfo& info) {
  const Handle set = open_dataset(file, file_name, info.path);
  const Handle type(H5Dget_type(set.get()), H5Tclose, "cannot read a type", file_name, info.path);
  const Handle space(H5Dget_space(set.get()), H5Sclose, "cannot read a shape", file_name,
                     info.path);
  const uint64_t element_bytes = H5Tget_size(type.get());
  const auto read = [&](hid_t memory_space, void* to) {
    if (H5Dread(set.get(), type.get(), memory_space, space.get(), H5P_DEFAULT, to) < 0) {
      fail("cannot read an HDF5 dataset (damaged data or a checksum that differs)", file_name,
           info.path);
    }
  };
  if (info.shape.empty()) {
    std::vector<uint8_t> bytes(element_bytes);
    read(H5S_ALL, bytes.data());
    return;
  }
  const uint64_t bytes = saturating_bytes(info.shape, element_bytes);
  if (bytes == 0) return;
  const uint64_t rows = info.shape[0], row_bytes = bytes / rows;
  const uint64_t step = std::clamp<uint64_t>(kBlockBytes / row_bytes, 1, rows);
  std::vector<uint8_t> block(step * row_bytes);
  std::vector<hsize_t> start(info.shape.size(), 0), count(info.shape.begin(), info.shape.end());
  for (uint64_t row = 0; row < rows; row += step) {
    start[0] = row;
    count[0] = std::min(step, rows - row);
    H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr);
    const Handle memory(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr),
                        H5Sclose, "cannot describe a block", file_name, info.path);
    read(memory.get(), block.data());
  }
}

void check_in_sandbox(const InputFile& input, const Limits& limits, Profile profile,
                      const std::function<void(hid_t, const std::vector<ObjectInfo>&)>& also) {
  const std::string name = input.path().string();
  const uint64_t most =
      std::min(limits.max_total_bytes, saturating_bytes({input.bytes()}, kDeflateRatio));
  // Room for one block, a chunk on its way through the filters, and the library's own tables.
  const SandboxLimits sandbox{
      .extra_memory_bytes = (uint64_t{1} << 30) + std::min(most, limits.max_dataset_bytes),
      .cpu_seconds = 30 + most / (uint64_t{50} << 20)};
  run_in_sandbox(name, sandbox, [&] {
    const Handle file = open_for_reading(input);
    const auto objects = scan(file.get(), name, limits, profile);
    if (also) also(file.get(), objects);
  });
}

}  // namespace oscar::hdf5
