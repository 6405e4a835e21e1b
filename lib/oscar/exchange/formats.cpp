// The table, and what is told instead of a row.
#include "oscar/exchange/formats.h"

#include "oscar/base/usage_error.h"
#include "oscar/stacks/stack.h"

namespace oscar {
namespace {

struct Absent {
  const char* name;
  const char* reason;
  const char* hint;
};

constexpr Absent kAbsent[] = {
    {"onnxruntime",
     "no release of ONNX Runtime has the operator MixedPrecisionGroupQueryAttention: 1.31.1 does "
     "not, pull request 31726 is open",
     "npz and safetensors hold the matrices for a build of your own"},
    {"oscar_int2", "this toolkit's package reads the bundle itself", "give it the .h5 file"},
    {"llama.cpp", "llama.cpp reads rotations from the model's GGUF file",
     "--to gguf-rot writes those tensors"},
    {"oscar2", "OSCAR2 forks bake the matrices into the model's weights",
     "fold puts the value transforms into a checkpoint"},
};

}  // namespace

const std::vector<ExchangeFormat>& exchange_formats() {
  static const std::vector<ExchangeFormat> table = {
      {"sglang-v1", "sglang-v1", FileLayout::kTorchShared, "k_rotation_qqt_r_h_pbr.pt",
       "v_rotation_sst_r_h_pbr.pt"},
      {"sglang-v2", "sglang-v2", FileLayout::kTorchPerHead, "k_rotation_perhead.pt",
       "v_rotation_perhead.pt"},
      {"sglang-0c88a", "sglang-0c88a", FileLayout::kTorchLocked, "k_transform.pt",
       "v_transform.pt"},
      {"vllm-pr46774", "vllm-pr46774", FileLayout::kTorchShared, "k_rotation.pt", "v_rotation.pt",
       "vllm"},
      {"mlx", "mlx", FileLayout::kMlx, "k_rotation.safetensors", "v_rotation.safetensors"},
      {"gguf-rot", "llama.cpp", FileLayout::kGguf, "rotations.gguf", nullptr},
      {"npz", nullptr, FileLayout::kNpz, "transforms.npz", nullptr},
      {"safetensors", nullptr, FileLayout::kSafetensors, "transforms.safetensors", nullptr},
  };
  return table;
}

const ExchangeFormat& find_exchange_format(std::string_view name, std::string_view further) {
  for (const ExchangeFormat& format : exchange_formats()) {
    if (name == format.name) return format;
  }
  if (const auto answer = answer_to(name)) throw UsageError(*answer);
  for (const Absent& absent : kAbsent) {
    if (name == absent.name) {
      throw Error({.what = std::string("there is no export to ") + absent.name,
                   .found = absent.reason,
                   .hint = absent.hint});
    }
  }
  std::string known = exchange_format_names();
  if (!further.empty()) known += ", " + std::string(further);
  throw UsageError(
      {.what = "unknown export format", .expected = std::move(known), .found = std::string(name)});
}

bool is_called(const ExchangeFormat& format, std::string_view recorded) {
  return recorded == format.name || (format.former != nullptr && recorded == format.former);
}

std::string exchange_format_names() {
  std::string names;
  for (const ExchangeFormat& format : exchange_formats()) {
    names += (names.empty() ? "" : ", ") + std::string(format.name);
  }
  return names;
}

}  // namespace oscar
