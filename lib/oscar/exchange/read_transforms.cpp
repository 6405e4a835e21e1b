// Which reader takes which file: by suffix, names inside, and the first letter of pairs.
#include "oscar/exchange/read_transforms.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/exchange/arrays.h"
#include "oscar/exchange/gguf_rotations.h"
#include "oscar/exchange/mlx_rotations.h"
#include "oscar/exchange/torch_rotations.h"
#include "oscar/io/npz.h"
#include "oscar/io/safetensors_arrays.h"

namespace oscar {
namespace {

using Path = std::filesystem::path;

constexpr const char* kWhatIsRead =
    "a folder of an export, k_*.pt and v_*.pt, k_*.safetensors and v_*.safetensors, one .npz, "
    ".safetensors or .gguf";

[[noreturn]] void refuse_files(const std::string& where, const std::string& found) {
  throw Error({.what = "no transforms that can be read",
               .where = where,
               .expected = kWhatIsRead,
               .found = found});
}

bool starts_with(const Path& path, char letter) {
  const std::string name = path.filename().string();
  return !name.empty() && (name[0] == letter || name[0] == letter - 'a' + 'A');
}

// `matrix`: of read_torch_rotations.
ReadTransforms read_pair(const Path& keys, const Path& values, int num_layers,
                         const char* matrix = nullptr) {
  ReadTransforms out;
  out.files = {keys, values};
  const bool torch = keys.extension() == ".pt";
  out.kind = torch ? "rotation files of SGLang's layout" : "rotations of mlx-lm";
  for (const auto& [path, side] : {std::pair{keys, Side::kKey}, {values, Side::kValue}}) {
    if (torch) {
      out.fields.merge(read_torch_rotations(path, side, out.set, matrix));
    } else {
      read_mlx_rotations(path, side, num_layers, out.set);
    }
  }
  return out;
}

ReadTransforms read_one(const Path& path, int num_layers) {
  ReadTransforms out;
  out.files = {path};
  out.kind = "arrays";
  if (path.extension() == ".npz") {
    out.set = from_arrays(read_npz(path), path.string());
  } else if (path.extension() == ".gguf") {
    out.kind = "tensors of a GGUF file";
    out.set = read_gguf_rotations(path);
  } else if (path.extension() == ".safetensors" && has_mlx_keys(path)) {
    return read_pair(path, path, num_layers);
  } else if (path.extension() == ".safetensors") {
    out.set = from_arrays(read_safetensors(path), path.string());
  } else {
    refuse_files(path.string(), "another kind of file");
  }
  return out;
}

ReadTransforms read_folder(const Path& folder, int num_layers) {
  std::vector<Path> keys, values;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const Path extension = entry.path().extension();
    if (extension == ".npz" || extension == ".gguf") return read_one(entry.path(), num_layers);
    if (extension != ".pt" && extension != ".safetensors") continue;
    if (starts_with(entry.path(), 'k')) keys.push_back(entry.path());
    if (starts_with(entry.path(), 'v')) values.push_back(entry.path());
  }
  for (const char* whole : {"transforms.safetensors", "rotation.safetensors"}) {
    if (std::filesystem::exists(folder / whole)) return read_one(folder / whole, num_layers);
  }
  if (keys.size() != 1 || values.size() != 1 || keys[0].extension() != values[0].extension()) {
    refuse_files(folder.string(), std::to_string(keys.size()) + " files of keys, " +
                                      std::to_string(values.size()) + " of values");
  }
  return read_pair(keys[0], values[0], num_layers);
}

// Both sides of every layer must have come.
ReadTransforms complete(ReadTransforms read) {
  const std::string where = read.files.front().string();
  for (const auto& [id, layer] : read.set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      if (!side_of(layer, side).forward.empty()) continue;
      throw Error({.what = std::string("a layer has no rotation of ") +
                           (side == Side::kKey ? "keys" : "values"),
                   .where = where,
                   .found = "layer " + std::to_string(id)});
    }
  }
  if (read.set.empty()) throw Error({.what = "no rotations", .where = where});
  return read;
}

}  // namespace

ReadTransforms read_transforms(const std::vector<Path>& paths, int num_layers) {
  if (paths.size() == 1) {
    return complete(std::filesystem::is_directory(paths[0]) ? read_folder(paths[0], num_layers)
                                                            : read_one(paths[0], num_layers));
  }
  if (paths.size() != 2) refuse_files(paths.at(0).string(), "more than two files");
  const bool turned = starts_with(paths[1], 'k') && starts_with(paths[0], 'v');
  const Path &keys = paths[turned ? 1 : 0], &values = paths[turned ? 0 : 1];
  const Path extension = keys.extension();
  if (!starts_with(keys, 'k') || !starts_with(values, 'v')) {
    refuse_files(keys.string(), "names that begin with neither k nor v, as " +
                                    keys.filename().string() + " and " +
                                    values.filename().string());
  }
  if (extension != values.extension() || (extension != ".pt" && extension != ".safetensors")) {
    refuse_files(keys.string(), "two files of another kind");
  }
  return complete(read_pair(keys, values, num_layers));
}

ReadTransforms read_export(const ExchangeFormat& format, const Path& folder, int num_layers) {
  const Path keys = folder / format.key_file;
  if (format.value_file == nullptr) return complete(read_one(keys, num_layers));
  return complete(
      read_pair(keys, folder / format.value_file, num_layers, torch_layout(format.layout).matrix));
}

}  // namespace oscar
