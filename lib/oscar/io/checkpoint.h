// A Hugging Face model folder: config.json, safetensors, tokenizer files, and their hashes.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "oscar/io/model_config.h"
#include "oscar/io/safetensors.h"

namespace oscar {

struct Checkpoint {
  std::filesystem::path folder;
  std::string name;  // last component of the folder
  ModelConfig config;
  WeightStore weights;
  std::string config_sha256;         // of config.json as it is on disk
  std::string tokenizer_sha256;      // of tokenizer.json; empty when absent
  std::string chat_template_sha256;  // of the template text; empty when absent
};

// Finds `model` as a folder, or as the name of an embedded default ("tiny-gqa") under the
// installed or source datasets folder. Throws Error with the names that exist.
std::filesystem::path find_model_folder(const std::string& model);

Checkpoint open_checkpoint(const std::string& model,
                           const std::optional<Json>& rope_scaling = std::nullopt);

}  // namespace oscar
