// SGLang's rotation files, which vLLM's pull request reads too: one of torch.save for each side.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "oscar/exchange/formats.h"
#include "oscar/exchange/transform_set.h"

namespace oscar {

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

}  // namespace oscar
