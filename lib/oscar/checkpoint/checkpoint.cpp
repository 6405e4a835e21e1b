// Finding and opening a model folder.
#include "oscar/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// Where embedded defaults may lie, best first.
std::vector<fs::path> dataset_folders() {
  std::vector<fs::path> folders;
  if (const char* set = std::getenv("OSCAR_DATASETS"); set != nullptr && *set != '\0') {
    folders.emplace_back(set);
  }
  std::error_code status;
  const fs::path program = fs::read_symlink("/proc/self/exe", status);
  if (!status) folders.push_back(program.parent_path().parent_path() / "share/oscar/datasets");
  folders.emplace_back(OSCAR_SOURCE_DATASETS);
  return folders;
}

// Names of the models in those folders, for the error message.
std::set<std::string> embedded_models() {
  std::set<std::string> names;
  for (const fs::path& folder : dataset_folders()) {
    std::error_code status;
    for (const auto& entry : fs::directory_iterator(folder, status)) {
      if (fs::exists(entry.path() / "config.json", status)) {
        names.insert(entry.path().filename().string());
      }
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

}  // namespace

std::optional<std::string> read_chat_template(const fs::path& folder) {
  if (fs::exists(folder / "chat_template.jinja")) {
    return read_text_file(folder / "chat_template.jinja");
  }
  for (const char* file : {"chat_template.json", "tokenizer_config.json"}) {
    if (!fs::exists(folder / file)) continue;
    const Json json = read_json_file(folder / file);
    if (json.is_object() && json.contains("chat_template")) {
      if (auto text = template_of(json["chat_template"])) return text;
    }
  }
  return std::nullopt;
}

fs::path find_model_folder(const std::string& model) {
  std::error_code status;
  if (fs::is_directory(model, status)) return model;
  const bool plain_name = !model.empty() && fs::path(model).filename() == model;
  if (plain_name) {
    for (const fs::path& folder : dataset_folders()) {
      if (fs::exists(folder / model / "config.json", status)) return folder / model;
    }
  }
  throw Error({.what = "no such model folder",
               .where = model,
               .expected = fmt::format("a Hugging Face folder, or one of the embedded models: {}",
                                       embedded_models().empty()
                                           ? "(none found)"
                                           : fmt::format("{}", fmt::join(embedded_models(), ", "))),
               .hint = "OSCAR_DATASETS names another folder of embedded models"});
}

Checkpoint open_checkpoint(const std::string& model, const std::optional<Json>& rope_scaling) {
  Checkpoint checkpoint;
  checkpoint.folder = find_model_folder(model);
  checkpoint.name = fs::weakly_canonical(checkpoint.folder).filename().string();
  const fs::path config_path = checkpoint.folder / "config.json";
  if (!fs::exists(config_path)) {
    throw Error({.what = "the model folder has no config.json",
                 .where = checkpoint.folder.string(),
                 .hint = "MODEL is a folder as Hugging Face's tools write it"});
  }
  const std::string text = read_text_file(config_path);
  checkpoint.config_sha256 = sha256_of(text);
  checkpoint.config = parse_model_config(parse_json(text, config_path.string()),
                                         config_path.string(), rope_scaling);
  checkpoint.weights = WeightStore::open(checkpoint.folder);
  if (fs::exists(checkpoint.folder / "tokenizer.json")) {
    checkpoint.tokenizer_sha256 = sha256_of_file(checkpoint.folder / "tokenizer.json");
  }
  if (const auto chat_template = read_chat_template(checkpoint.folder)) {
    checkpoint.chat_template_sha256 = sha256_of(*chat_template);
  }
  return checkpoint;
}

}  // namespace oscar
