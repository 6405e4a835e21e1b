// The layers of a file: geometry, transforms, statistics.
#pragma once

#include <string>
#include <vector>

#include "oscar/bundle/raw_file.h"

namespace oscar {

// All throw Error naming the object, as decode_bundle does; data moves out of `raw`. `path` is the
// group of a layer or of what is below it.

// Paths of the layer groups below `parent`, by layer id. Other names are ignored.
std::vector<std::string> layer_groups(const RawFile& raw, const char* parent);

// The layer's shape must fit `model`.
LayerGeometry decode_geometry(const RawFile& raw, const std::string& path,
                              const BundleModel& model);
LayerTransforms decode_transforms(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry);
// Empty where the layer has none.
MatrixStack<float> decode_weight_samples(RawFile& raw, const std::string& path,
                                         const LayerGeometry& geometry);
LayerStatistics decode_statistics(RawFile& raw, const std::string& path,
                                  const LayerGeometry& geometry);

}  // namespace oscar
