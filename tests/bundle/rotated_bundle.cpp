// A small bundle of rotations.
#include "bundle/rotated_bundle.h"

#include <cstdint>
#include <random>

#include "bundle/plain_bundle.h"

namespace oscar::plain {

namespace {

// Orthogonal, far from symmetric.
MatrixF random_rotation(int d, uint64_t seed) {
  std::mt19937_64 random(seed);
  MatrixD gaussian(d, d);
  for (int i = 0; i < d * d; ++i) {
    gaussian.data()[i] = static_cast<double>(random() >> 11) * 0x1p-53 - 0.5;
  }
  return MatrixD(Eigen::HouseholderQR<MatrixD>(gaussian).householderQ()).cast<float>();
}

void rotate(SideTransform& side, uint64_t seed, bool shared) {
  for (int head = 0; head < side.forward.count; ++head) {
    side.forward[head] = random_rotation(side.forward.rows, seed + (shared ? 0 : head));
    side.kind[static_cast<size_t>(head)] = TransformKind::kOscar;
  }
  side.eigenvalues = VectorStack<double>(side.forward.count, side.forward.rows);
  for (double& value : side.eigenvalues.data) value = 1;
}

}  // namespace

Bundle rotated_bundle(bool shared) {
  Bundle bundle = plain_bundle();
  bundle.quantizer.metadata_dtype = MetadataDtype::kFp32;
  uint64_t seed = 100;
  for (LayerTransforms& layer : bundle.layers) {
    rotate(layer.key, seed += 10, shared);
    rotate(layer.value, seed += 10, shared);
  }
  for (PortableLayer& layer : bundle.portable) {
    rotate(layer.shared.key, seed += 10, true);
    rotate(layer.shared.value, seed += 10, true);
    rotate(layer.per_head.key, seed += 10, false);
    rotate(layer.per_head.value, seed += 10, false);
  }
  return bundle;
}

}  // namespace oscar::plain
