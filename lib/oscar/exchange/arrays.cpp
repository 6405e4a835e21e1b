// The bundle's table of slots, walked over layers.
#include "oscar/exchange/arrays.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "oscar/base/error.h"
#include "oscar/bundle/schema.h"
#include "oscar/cache/key_centres.h"

namespace oscar {
namespace {

using schema::Rank;
using schema::Slot;

constexpr int64_t kMostArrayLayers = 4096, kMostArrayHeads = 4096;

// Calls `visit` with (slot, field) of the slots that travel as arrays.
template <typename SideType, typename Visit>
void visit_arrays(SideType& side, const schema::SideSlots& slots, Visit&& visit) {
  visit(slots.rotation, side.forward);
  visit(slots.partner, side.partner);
  visit(slots.mean, side.mean);
  visit(slots.clip_ratio, side.recipe.clip_ratio);
  visit(slots.scale_correction, side.recipe.scale_correction);
  visit(slots.metric, side.metric);
  visit(slots.feedback, side.feedback);
  if (slots.centres) visit(*slots.centres, side.centres);
}

const schema::SideSlots& slots_of(Side side) {
  return side == Side::kKey ? schema::kKeySlots : schema::kValueSlots;
}

const std::vector<float>& numbers(const MatrixStack<float>& stack) { return stack.data; }
const std::vector<float>& numbers(const VectorStack<float>& stack) { return stack.data; }
const std::vector<float>& numbers(const std::vector<float>& values) { return values; }
std::vector<float> numbers(const std::vector<ScaleCorrection>& values) {
  std::vector<float> codes(values.size());
  std::transform(values.begin(), values.end(), codes.begin(),
                 [](ScaleCorrection c) { return static_cast<float>(c); });
  return codes;
}

// The side with all that stands for what it leaves out, where another layer has it.
SideTransform completed(SideTransform side, Side which, const std::set<std::string>& present) {
  const schema::SideSlots& slots = slots_of(which);
  const int heads = side.forward.count, d = side.forward.rows;
  if (present.contains(slots.partner.name) && side.partner.empty()) {
    MatrixStack<float> partner(heads, d, d);
    for (int head = 0; head < heads; ++head) {
      partner[head] = partner_matrix(side, which, head);
    }
    side.partner = std::move(partner);
  }
  for (const auto& [slot, stack] :
       {std::pair{&slots.metric, &side.metric}, std::pair{&slots.feedback, &side.feedback}}) {
    if (!present.contains(slot->name) || !stack->empty()) continue;
    *stack = MatrixStack<float>(heads, d, d);
    for (int head = 0; head < heads; ++head) (*stack)[head].setIdentity();
  }
  if (slots.centres && present.contains(slots.centres->name) && side.centres.empty()) {
    side.centres = MatrixStack<float>(heads, kCentres, d);
  }
  return side;
}

// What follows [layers, heads] in a slot's shape.
std::vector<int64_t> tail(Rank rank, int64_t d) {
  switch (rank) {
    case Rank::kMatrices:
      return {d, d};
    case Rank::kVectors:
      return {d};
    case Rank::kCentres:
      return {kCentres, d};
    default:
      return {};
  }
}

struct Taking {
  const FloatTensors& arrays;
  const std::string& where;
  std::set<std::string> known;

  [[noreturn]] void refuse(const std::string& name, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const {
    throw Error({.what = what, .where = where + ": " + name, .expected = expected, .found = found});
  }

  // Values of one layer and the number of its heads; null pointer: there is no such array.
  struct Part {
    const float* values = nullptr;
    int heads = 0;
    size_t count = 0;
  };
  Part part(const Slot& slot, int64_t layer, int64_t layers, int64_t d) {
    known.insert(slot.name);
    const auto place = arrays.find(slot.name);
    if (place == arrays.end()) return {};
    const std::vector<int64_t>& shape = place->second.shape;
    const std::vector<int64_t> rest = tail(slot.rank, d);
    const bool with_heads = shape.size() == rest.size() + 2;
    const bool fits = (with_heads || shape.size() == rest.size() + 1) && shape[0] == layers &&
                      (!with_heads || (shape[1] > 0 && shape[1] <= kMostArrayHeads)) &&
                      std::equal(rest.begin(), rest.end(), shape.end() - ptrdiff_t(rest.size()));
    if (!fits) {
      refuse(slot.name, "an array has a wrong shape",
             fmt::format("[{0}, heads, {1}] or [{0}, {1}]", layers, fmt::join(rest, ", ")),
             fmt::format("[{}]", fmt::join(shape, ", ")));
    }
    const size_t size = place->second.values.size() / static_cast<size_t>(layers);
    const float* values = place->second.values.data() + size * static_cast<size_t>(layer);
    if (!std::all_of(values, values + size, [](float x) { return std::isfinite(x); })) {
      refuse(slot.name, "a number that is not finite", "", fmt::format("in layer {}", layer));
    }
    return {values, with_heads ? static_cast<int>(shape[1]) : 1, size};
  }
};

constexpr auto kUnknownCode = static_cast<ScaleCorrection>(255);

void take(const Taking::Part& part, int d, MatrixStack<float>& stack) {
  stack.count = part.heads;
  stack.cols = d;
  stack.rows = static_cast<int>(part.count) / part.heads / d;
  stack.data.assign(part.values, part.values + part.count);
}
void take(const Taking::Part& part, int d, VectorStack<float>& stack) {
  stack.count = part.heads;
  stack.cols = d;
  stack.data.assign(part.values, part.values + part.count);
}
void take(const Taking::Part& part, int, std::vector<float>& values) {
  values.assign(part.values, part.values + part.count);
}
void take(const Taking::Part& part, int, std::vector<ScaleCorrection>& values) {
  for (size_t i = 0; i < part.count; ++i) {
    const float code = part.values[i];
    const bool known = code == 0 || code == 1 || code == 2;
    values.push_back(known ? static_cast<ScaleCorrection>(code) : kUnknownCode);
  }
}

}  // namespace

FloatTensors to_arrays(const TransformSet& set) {
  std::set<std::string> present;
  for (const auto& entry : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      visit_arrays(side_of(entry.second, side), slots_of(side),
                   [&present](const Slot& slot, const auto& field) {
                     if (!numbers(field).empty()) present.insert(slot.name);
                   });
    }
  }
  FloatTensors arrays;
  for (const auto& entry : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const SideTransform whole = completed(side_of(entry.second, side), side, present);
      visit_arrays(whole, slots_of(side), [&](const Slot& slot, const auto& field) {
        if (!present.contains(slot.name)) return;
        FloatTensor& array = arrays[slot.name];
        if (array.shape.empty()) {
          array.shape = {static_cast<int64_t>(set.size()), whole.forward.count};
          const std::vector<int64_t> rest = tail(slot.rank, whole.forward.cols);
          array.shape.insert(array.shape.end(), rest.begin(), rest.end());
        }
        const auto& values = numbers(field);
        array.values.insert(array.values.end(), values.begin(), values.end());
      });
    }
  }
  return arrays;
}

TransformSet from_arrays(const FloatTensors& arrays, const std::string& where) {
  Taking taking{arrays, where, {}};
  TransformSet set;
  for (const Side side : {Side::kKey, Side::kValue}) {
    const schema::SideSlots& slots = slots_of(side);
    const auto rotation = arrays.find(slots.rotation.name);
    if (rotation == arrays.end()) {
      taking.refuse(slots.rotation.name, "the array is missing",
                    "[layers, heads, d, d] or [layers, d, d]");
    }
    const std::vector<int64_t>& shape = rotation->second.shape;
    const bool square = shape.size() >= 3 && shape.size() <= 4 && shape[0] > 0 &&
                        shape[0] <= kMostArrayLayers && shape.back() > 0 &&
                        shape.back() <= kMaxHeadDim;
    if (!square) {
      taking.refuse(slots.rotation.name, "an array has a wrong shape",
                    "[layers, heads, d, d] or [layers, d, d]",
                    fmt::format("[{}]", fmt::join(shape, ", ")));
    }
    const int64_t layers = shape[0], d = shape.back();
    for (int64_t layer = 0; layer < layers; ++layer) {
      SideTransform& out = side_of(set[static_cast<int>(layer)], side);
      visit_arrays(out, slots, [&](const Slot& slot, auto& field) {
        const Taking::Part part = taking.part(slot, layer, layers, d);
        if (part.values != nullptr) take(part, static_cast<int>(d), field);
      });
      for (const ScaleCorrection c : out.recipe.scale_correction) {
        if (c == kUnknownCode) {
          taking.refuse(slots.scale_correction.name, "unknown code", "0, 1 or 2");
        }
      }
    }
  }
  for (const auto& entry : arrays) {
    if (taking.known.contains(entry.first)) continue;
    taking.refuse(entry.first, "an unknown name", fmt::format("{}", fmt::join(taking.known, ", ")));
  }
  return set;
}

}  // namespace oscar
