// A Hugging Face model folder: config.json, safetensors, tokenizer files, and their hashes.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "oscar/checkpoint/model_config.h"
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

// The text of the chat template: chat_template.jinja, else chat_template.json, else the entry of
// tokenizer_config.json (of a list of named templates, "default"); none when there is none.
std::optional<std::string> read_chat_template(const std::filesystem::path& folder);

// Finds `model` as a folder, or as the name of an embedded default ("tiny-gqa") under
// $OSCAR_DATASETS, the installed share/oscar/datasets or the source tree's datasets. Throws Error
// with the names that exist.
std::filesystem::path find_model_folder(const std::string& model);

// Opens config, weights and hashes. Throws Error for anything missing or malformed; the shapes of
// the weights are checked when a model is made of them.
Checkpoint open_checkpoint(const std::string& model,
                           const std::optional<Json>& rope_scaling = std::nullopt);

}  // namespace oscar
