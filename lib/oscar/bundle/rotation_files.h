// Matrices in the files of other tools, written and read.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/fit/fit.h"
#include "oscar/io/weight_source.h"

namespace oscar {

// Transforms between a bundle and the files of other tools: the form that both sides share, and the
// files of each format. export.h writes folders of them, verify_export.h reads them back under the
// rules of their backend, import.h makes a bundle of them.

// By global layer id, in the bundle's orientation: rows x' = (x - mean) forward. Of a side only
// what the file holds is there: `forward` [heads, d, d] with heads 1 where all KV heads share it,
// and where they were given `partner`, `mean`, `eigenvalues`, `metric`, `feedback`, `centers` and
// the recipe's clip_ratio and scale_correction, for as many heads.
using TransformSet = std::map<int, LayerTransforms>;

// Side by side, for tables of keys and values.
inline SideTransform& side_of(LayerTransforms& layer, Side side) {
  return side == Side::kKey ? layer.key : layer.value;
}

// Those of a bundle's layers, each with its first head alone where `shared`.
TransformSet transform_set(const std::vector<const LayerTransforms*>& layers, bool shared);

// Transforms as plain arrays over layers, for .npz and .safetensors: what a researcher writes and
// reads.

// Names and meaning are those of the bundle's datasets (bundle/SCHEMA.md), stacked over all layers
// of the model in order, float32: k_rotation, q_rotation, v_rotation, o_rotation, k_metric,
// v_metric, k_feedback, v_feedback [layers, Hkv, d, d]; k_mean, v_mean [layers, Hkv, d]; k_centres
// [layers, Hkv, 2, d]; k_clip_ratio, v_clip_ratio, k_scale_correction, v_scale_correction
// [layers, Hkv].
// What no layer has is left out; where some have it, the others get what stands for its absence.
FloatTensors to_arrays(const TransformSet& set);

// The reverse. Hkv may be left out of a shape where all heads share; k_rotation and v_rotation must
// be there. Throws Error naming `where` and the array for other names, a shape that does not fit,
// or a number that is not finite.
TransformSet from_arrays(const FloatTensors& arrays, const std::string& where);

// The files that transforms come and go in: one table.

enum class FileLayout {
  kTorchShared,   // format_version 1 of SGLang's rotation files: a matrix [d, d] a layer
  kTorchPerHead,  // format_version 2: [Hkv, d, d]
  kTorchLocked,   // the same under a name that no server reads: export.h has the key
  kMlx,           // mlx-lm's folder of safetensors
  kGguf,          // tensors beside those of a GGUF model
  kNpz,           // plain arrays
  kSafetensors,   // the same
};

struct ExchangeFormat {
  const char* name;     // of --for
  const char* backend;  // the row of backends() that reads it; null: any bundle fits
  FileLayout layout;
  const char* key_file;          // of keys, or of both sides
  const char* value_file;        // null: in key_file
  const char* former = nullptr;  // its name in manifests of earlier versions; null: the same
};

const std::vector<ExchangeFormat>& exchange_formats();

// Throws UsageError: the answer of bundle/backends.h, or for an unknown name the list of names, and
// after them `further`, which the caller takes besides; Error with the reason for a backend that
// has no file of its own, or none that a release reads yet.
const ExchangeFormat& find_exchange_format(std::string_view name, std::string_view further = {});

// Whether the `format` of a manifest means this one, under its name of today or before.
bool is_called(const ExchangeFormat& format, std::string_view recorded);

std::string exchange_format_names();  // "sglang-v1, sglang-v2, ..."

// SGLang's rotation files, which vLLM's pull request reads too: one of torch.save for each side.

// Layout, as read in SGLang's mem_cache/memory_pool.py and the fitting scripts of its OSCAR branch:
//   format_version 1 (or 2), objective, source_grouping "layer" (or "per_kv_head"),
//   layers {id: {layer_id, rotation [d, d] (or [Hkv, d, d])}}
// and in an entry, where a side has them: eigenvalues [d] ascending (version 1); for keys
// q_rotation = rotation^-T and k_mean, for values o_rotation = rotation^-T, the transpose of this
// toolkit's, since it is applied as o o_rotation^T. Rows are row vectors: x' = x rotation.
// Files whose rotation does not do alone have it as `transform`, which no server reads.
struct TorchLayout {
  bool per_head = false;
  const char* matrix = "rotation";
};

TorchLayout torch_layout(FileLayout layout);

void write_torch_rotations(const std::filesystem::path& path, const TransformSet& set, Side side,
                           const TorchLayout& layout);

// Reads one side into `set`: the above, with integers or texts of digits as ids, and what vLLM's
// reader takes besides: {id: matrix} and a stack [layers, d, d]. `matrix` as in TorchLayout; null:
// either name. Throws Error naming file and layer for anything that is missing, of another shape or
// not finite. Returns the names of an entry's fields, of all layers.
std::set<std::string> read_torch_rotations(const std::filesystem::path& path, Side side,
                                           TransformSet& set, const char* matrix = nullptr);

// mlx-lm's folder of rotations (pull request 1789): two safetensors files and a manifest.

inline constexpr const char* kMlxManifest = "metadata.json";

// Keys layer_<global id>, float32 [d, d] or [Hkv, d, d]; rows are x' = x M^T, so M = rotation^T.
void write_mlx_rotations(const std::filesystem::path& path, const TransformSet& set, Side side);

// Writes metadata.json, of the schema mlx-lm-oscar-rotations-v1.
void write_mlx_manifest(const std::filesystem::path& folder, const TransformSet& set);

// Reads one side into `set`; a single key `rotation` is taken for layers 0 to `num_layers` - 1.
// Throws Error naming file and key for other names, shapes and numbers that are not finite.
void read_mlx_rotations(const std::filesystem::path& path, Side side, int num_layers,
                        TransformSet& set);

// Whether the keys of a safetensors file are those of this folder.
bool has_mlx_keys(const std::filesystem::path& path);

// Rotations as tensors of a GGUF file, as llama.cpp's OSCAR branch reads them beside a model's own.

// blk.<global id>.attn_k_rot.weight and attn_v_rot.weight, F32 [d, d], which hold rotation^T: the
// branch multiplies a row x by the matrix as ggml does, x M^T. The file has no other tensors, or,
// with `base`, those of that GGUF model before them, with its metadata. Throws Error for a base
// that has such tensors already or another shape than the rotations (architecture, layers,
// head_dim).
void write_gguf_rotations(const std::filesystem::path& path, const TransformSet& set,
                          const std::filesystem::path& base = {});

// Reads them from any GGUF file, those of a whole model too, whatever else is in it. Throws Error
// naming file and tensor for another shape or type, and for numbers that are not finite.
TransformSet read_gguf_rotations(const std::filesystem::path& path);

}  // namespace oscar
