// Finding and opening a model.
#include "oscar/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json_text.h"
#include "oscar/base/sha256.h"
#include "oscar/checkpoint/fp8_weights.h"
#include "oscar/checkpoint/gguf_config.h"
#include "oscar/checkpoint/gguf_tokenizer.h"
#include "oscar/checkpoint/gguf_weights.h"
#include "oscar/checkpoint/hub_cache.h"
#include "oscar/checkpoint/model_name.h"
#include "oscar/io/safetensors.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// Where models that have names may lie, best first: embedded ones, and those that scripts have
// fetched into models/ of the source tree.
std::vector<fs::path> folders_of_models() {
  std::vector<fs::path> folders;
  if (const char* set = std::getenv("OSCAR_DATASETS"); set != nullptr && *set != '\0') {
    folders.emplace_back(set);
  }
  std::error_code status;
  const fs::path program = fs::read_symlink("/proc/self/exe", status);
  if (!status) folders.push_back(program.parent_path().parent_path() / "share/oscar/datasets");
  folders.emplace_back(OSCAR_SOURCE_DATASETS);
  folders.push_back(fs::path(OSCAR_SOURCE_DATASETS).parent_path() / "models");
  return folders;
}

// The model in a folder of its name: the folder itself, or its one GGUF file.
std::optional<fs::path> model_in(const fs::path& folder) {
  std::error_code status;
  if (fs::exists(folder / "config.json", status)) return folder;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder, status)) {
    if (entry.path().extension() == ".gguf") files.push_back(entry.path());
  }
  return files.size() == 1 ? std::optional(files.front()) : std::nullopt;
}

// Names of the models in those folders, for the error message.
std::set<std::string> named_models() {
  std::set<std::string> names;
  for (const fs::path& folder : folders_of_models()) {
    std::error_code status;
    for (const auto& entry : fs::directory_iterator(folder, status)) {
      if (model_in(entry.path())) names.insert(entry.path().filename().string());
    }
  }
  return names;
}

std::optional<std::string> template_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return std::nullopt;
  for (const Json& entry : value) {
    if (entry.is_object() && entry.value("name", Json()) == "default" &&
        entry.value("template", Json()).is_string()) {
      return entry["template"].get<std::string>();
    }
  }
  return std::nullopt;
}

Checkpoint open_folder(const fs::path& folder, const std::optional<Json>& rope_scaling) {
  Checkpoint checkpoint;
  checkpoint.path = checkpoint.folder = folder;
  const fs::path config_path = folder / "config.json";
  if (!fs::exists(config_path)) {
    throw Error({.what = "the model folder has no config.json",
                 .where = folder.string(),
                 .hint = "MODEL is a folder as Hugging Face's tools write it, or a .gguf file"});
  }
  const std::string text = read_text_file(config_path, kMaxConfigBytes);
  checkpoint.config_sha256 = sha256_of(text);
  const Json config = parse_json(text, config_path.string());
  checkpoint.config = parse_model_config(config, config_path.string(), rope_scaling);
  const Json stated = config.value("_name_or_path", Json());
  checkpoint.name = model_name(folder, stated.is_string() ? stated.get<std::string>() : "");
  auto files = std::make_shared<SafetensorsWeights>(folder);
  if (checkpoint.config.fp8) {
    checkpoint.weights = std::make_shared<Fp8Weights>(std::move(files), *checkpoint.config.fp8);
  } else {
    checkpoint.weights = std::move(files);
  }
  if (fs::exists(folder / "tokenizer.json")) {
    checkpoint.tokenizer_sha256 = sha256_of_file(folder / "tokenizer.json");
  }
  if (const auto chat_template = read_chat_template(folder)) {
    checkpoint.chat_template_sha256 = sha256_of(*chat_template);
  }
  return checkpoint;
}

Checkpoint open_gguf(const fs::path& path, const std::optional<Json>& rope_scaling) {
  const auto file = std::make_shared<const GgufFile>(path);
  Checkpoint checkpoint;
  checkpoint.path = path;
  checkpoint.folder = path.has_parent_path() ? path.parent_path() : ".";
  checkpoint.name = model_name(path, file->text("general.name").value_or(""));
  const Json config = gguf_config(*file);
  checkpoint.config_sha256 = sha256_of(config.dump());
  checkpoint.config = parse_model_config(config, path.string(), rope_scaling);
  checkpoint.weights = std::make_shared<GgufWeights>(file, checkpoint.config);
  checkpoint.tokenizer_sha256 = gguf_tokenizer_sha256(*file);
  if (const auto chat_template = file->text(kGgufChatTemplate)) {
    checkpoint.chat_template_sha256 = sha256_of(*chat_template);
  }
  return checkpoint;
}

}  // namespace

std::optional<std::string> read_chat_template(const fs::path& model) {
  if (!fs::is_directory(model)) {
    const GgufFile file(model);
    const auto text = file.text(kGgufChatTemplate);
    return text ? std::optional<std::string>(*text) : std::nullopt;
  }
  if (fs::exists(model / "chat_template.jinja")) {
    return read_text_file(model / "chat_template.jinja", kMaxConfigBytes);
  }
  for (const char* file : {"chat_template.json", "tokenizer_config.json"}) {
    if (!fs::exists(model / file)) continue;
    const Json json = read_json_file(model / file);
    if (json.is_object() && json.contains("chat_template")) {
      if (auto text = template_of(json["chat_template"])) return text;
    }
  }
  return std::nullopt;
}

std::optional<std::string> read_tokenizer_json(const fs::path& model) {
  if (!fs::is_directory(model)) return gguf_tokenizer_json(GgufFile(model));
  const fs::path file = model / "tokenizer.json";
  if (!fs::exists(file)) return std::nullopt;
  return read_text_file(file, kMaxJsonBytes);
}

fs::path find_model(const std::string& model) {
  std::error_code status;
  if (fs::is_directory(model, status) || fs::is_regular_file(model, status)) return model;
  const bool plain_name = !model.empty() && fs::path(model).filename() == model;
  if (plain_name) {
    for (const fs::path& folder : folders_of_models()) {
      if (const auto found = model_in(folder / model)) return *found;
    }
  }
  if (const auto fetched = find_in_hub_cache(model)) return *fetched;
  if (is_hub_name(model)) {
    throw Error(
        {.what = "no such folder, and no model of this name in the local Hugging Face cache",
         .where = model,
         .hint = fmt::format("fetch it with: hf download {} --local-dir {}", model,
                             model.substr(model.find('/') + 1))});
  }
  const auto names = named_models();
  throw Error({.what = "no such model",
               .where = model,
               .expected = fmt::format("a Hugging Face folder, a .gguf file, or one of {}",
                                       names.empty() ? "(no names are known)"
                                                     : fmt::format("{}", fmt::join(names, ", "))),
               .hint = "scripts/fetch_smollm2.sh fetches a small one; OSCAR_DATASETS names another "
                       "folder of embedded models"});
}

Checkpoint open_checkpoint(const std::string& model, const std::optional<Json>& rope_scaling) {
  const fs::path path = find_model(model);
  return fs::is_directory(path) ? open_folder(path, rope_scaling) : open_gguf(path, rope_scaling);
}

}  // namespace oscar
