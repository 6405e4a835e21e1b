// A model as published: found by its folder, file or name, and opened.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/config.h"
#include "oscar/text/chat_template.h"

namespace oscar {

// A model as published: a Hugging Face folder (config.json, safetensors, tokenizer files) or a GGUF
// file, with its hashes.

struct Checkpoint {
  std::filesystem::path path;    // the folder, or the GGUF file
  std::filesystem::path folder;  // the folder, or that of the GGUF file
  std::string name;              // as published, see model_name()
  ModelConfig config;
  std::shared_ptr<const WeightSource> weights;
  std::string config_sha256;     // of config.json as it is on disk, or as GGUF would have it
  std::string tokenizer_sha256;  // of tokenizer.json, or of GGUF's tokenizer; empty when absent
  ChatTemplate chat_template;
  std::string chat_template_sha256;   // of the text of the one named default; empty when absent
  std::vector<std::string> notes;     // what of the files is not used, or other than they say
  std::vector<std::string> warnings;  // the same where other programs run another model

  bool is_gguf() const { return path != folder; }
};

// The configuration alone: of a folder without its weights, which need not be there and may be
// quantized in any way. A quantization that cannot be read counts as none.
ModelConfig read_model_config(const std::filesystem::path& model);

// config.json of a folder, with what ModelOpt wrote beside it as its quantization_config.
Json read_config_json(const std::filesystem::path& folder);

// What such a config says of weights that parse_quantization refuses ({"quant_method": "awq",
// ...}), of its text half where the whole says nothing. None where all that it says can be read.
std::optional<Json> unread_quantization(const Json& config, const std::string& source);

// The chat templates of a folder: chat_template.jinja (with those of additional_chat_templates),
// else chat_template.json, else the entry of tokenizer_config.json, which may be a list of named
// ones; empty when there is none. Its special tokens are those of tokenizer_config.json, else of
// special_tokens_map.json. Of a GGUF file, tokenizer.chat_template, else chat_template.jinja
// beside the file, and the tokens that its metadata names by id.
ChatTemplate read_chat_template(const std::filesystem::path& model);

// The text of tokenizer.json, of a GGUF file in its manner (gguf_tokenizer.h); none when there is
// none. `model` is a Checkpoint's path. Throws Error for a tokenizer that GGUF does not describe
// completely.
std::optional<std::string> read_tokenizer_json(const std::filesystem::path& model);

// Finds `model` as a folder, as a file, or by the name of a folder that holds one ("tiny-gqa",
// "smollm2", "qwen2.5-coder-1.5b") under $OSCAR_DATASETS, the installed share/oscar/datasets or the
// source tree's datasets and models. Throws Error with the names that exist.
std::filesystem::path find_model(const std::string& model);

// Finds a folder of the toolkit's own data ("needle") in these places. Throws Error if none has it.
std::filesystem::path find_data(const std::string& name);

// Opens config, weights and hashes. Throws Error for anything missing or malformed; the shapes of
// the weights are checked when a model is made of them.
Checkpoint open_checkpoint(const std::string& model,
                           const std::optional<Json>& rope_scaling = std::nullopt);

// Models that Hugging Face's tools have downloaded, by the names that the Hub gives them.

// Whether `name` has the form of a model's name on the Hub: "owner/model".
bool is_hub_name(const std::string& name);

// The folder of a model in the local cache ($HF_HUB_CACHE, $HF_HOME/hub or
// ~/.cache/huggingface/hub) at the revision that "main" was when it was fetched; nullopt when it is
// not there. Nothing is downloaded.
std::optional<std::filesystem::path> find_in_hub_cache(const std::string& name);

// The name under which a folder of such a cache was fetched; nullopt for other folders. `folder` is
// canonical.
std::optional<std::string> hub_name_of(const std::filesystem::path& folder);

// What a model is called: by those who published it, where its files say so.

// The name of the model in `path`, a folder or a GGUF file that exists. `stated` is what its files
// say:
// `_name_or_path` of config.json, general.name of GGUF; empty where they say nothing.
//   a folder     OWNER/MODEL of the local Hugging Face cache, if it is in one; else `stated`, if it
//                has that form (others are paths of the machine that wrote the file); else the
//                folder's own name
//   a GGUF file  `stated`, if it is a line of printable ASCII, of 96 at most; else the file's own
//   name without
//                .gguf
// A label for people: whether two models are the same is decided by hashes alone.
std::string model_name(const std::filesystem::path& path, std::string_view stated);

}  // namespace oscar
