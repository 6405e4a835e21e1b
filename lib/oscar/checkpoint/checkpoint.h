// A model as published: a Hugging Face folder (config.json, safetensors, tokenizer files) or a GGUF
// file, with its hashes.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "oscar/checkpoint/model_config.h"
#include "oscar/io/weight_source.h"

namespace oscar {

struct Checkpoint {
  std::filesystem::path path;    // the folder, or the GGUF file
  std::filesystem::path folder;  // the folder, or that of the GGUF file
  std::string name;              // model_name.h
  ModelConfig config;
  std::shared_ptr<const WeightSource> weights;
  std::string config_sha256;         // of config.json as it is on disk, or as GGUF would have it
  std::string tokenizer_sha256;      // of tokenizer.json, or of GGUF's tokenizer; empty when absent
  std::string chat_template_sha256;  // of the template text; empty when absent

  bool is_gguf() const { return path != folder; }
};

// The text of the chat template of a folder: chat_template.jinja, else chat_template.json, else the
// entry of tokenizer_config.json (of a list of named templates, "default"); none when there is
// none. Of a GGUF file, tokenizer.chat_template.
std::optional<std::string> read_chat_template(const std::filesystem::path& model);

// The text of tokenizer.json, of a GGUF file in its manner (gguf_tokenizer.h); none when there is
// none. `model` is a Checkpoint's path. Throws Error for a tokenizer that GGUF does not describe
// completely.
std::optional<std::string> read_tokenizer_json(const std::filesystem::path& model);

// Finds `model` as a folder, as a file, or by the name of a folder that holds one ("tiny-gqa",
// "smollm2") under $OSCAR_DATASETS, the installed share/oscar/datasets or the source tree's
// datasets and models. Throws Error with the names that exist.
std::filesystem::path find_model(const std::string& model);

// Opens config, weights and hashes. Throws Error for anything missing or malformed; the shapes of
// the weights are checked when a model is made of them.
Checkpoint open_checkpoint(const std::string& model,
                           const std::optional<Json>& rope_scaling = std::nullopt);

}  // namespace oscar
