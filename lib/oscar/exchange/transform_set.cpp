// Heads taken out of a side.
#include "oscar/exchange/transform_set.h"

namespace oscar {
namespace {

template <typename Stack>
void keep_first(Stack& stack) {
  if (stack.empty()) return;
  stack.data.resize(stack.data.size() / static_cast<size_t>(stack.count));
  stack.count = 1;
}

void keep_first_head(SideTransform& side) {
  keep_first(side.forward);
  keep_first(side.partner);
  keep_first(side.mean);
  keep_first(side.eigenvalues);
  side.kind.resize(1);
  side.recipe = SideRecipe(1, side.recipe[0]);
}

}  // namespace

TransformSet transform_set(const std::vector<const LayerTransforms*>& layers, bool shared) {
  TransformSet set;
  for (const LayerTransforms* layer : layers) {
    LayerTransforms& copy = set[layer->geometry.layer_id] = *layer;
    if (!shared) continue;
    keep_first_head(copy.key);
    keep_first_head(copy.value);
  }
  return set;
}

}  // namespace oscar
