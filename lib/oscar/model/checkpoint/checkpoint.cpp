// A model as published: found by its folder, file or name, and opened.
#include "oscar/model/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cstdlib>
#include <set>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/checkpoint/gguf_model.h"
#include "oscar/model/checkpoint/gguf_tokenizer.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {

// Finding and opening a model.

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
               .hint = "python -m oscar_int2 fetch smollm2 fetches a small one, qwen2.5-coder-1.5b "
                       "a larger one; "
                       "OSCAR_DATASETS names another folder of embedded models"});
}

fs::path find_data(const std::string& name) {
  std::error_code status;
  for (const fs::path& folder : folders_of_models()) {
    if (fs::is_directory(folder / name, status)) return folder / name;
  }
  throw Error({.what = "the toolkit's own data is not installed",
               .where = name,
               .hint = "OSCAR_DATASETS names the folder datasets of the repository"});
}

Checkpoint open_checkpoint(const std::string& model, const std::optional<Json>& rope_scaling) {
  const fs::path path = find_model(model);
  return fs::is_directory(path) ? open_folder(path, rope_scaling) : open_gguf(path, rope_scaling);
}

// models--OWNER--MODEL/refs/main names a folder of models--OWNER--MODEL/snapshots.

namespace {

namespace fs = std::filesystem;

constexpr const char* kLetters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
constexpr size_t kLongestName = 96;  // of the Hub
constexpr std::string_view kModelFolder = "models--";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

fs::path cache_folder() {
  if (const std::string cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const std::string home = variable("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  const std::string xdg = variable("XDG_CACHE_HOME");
  const fs::path cache = xdg.empty() ? fs::path(variable("HOME")) / ".cache" : fs::path(xdg);
  return cache / "huggingface" / "hub";
}

// "a1b2..." without white space; "" for what names no folder inside another.
std::string revision_in(const fs::path& file) {
  constexpr size_t kMostBytes = 256;
  std::string text = read_text_file(file, kMostBytes);
  text.erase(text.find_last_not_of(" \n\r\t") + 1);
  const bool plain =
      !text.empty() && text[0] != '.' && text.find_first_not_of(kLetters) == std::string::npos;
  return plain ? text : "";
}

}  // namespace

bool is_hub_name(const std::string& name) {
  const size_t slash = name.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == name.size()) return false;
  const std::string owner = name.substr(0, slash), model = name.substr(slash + 1);
  const auto plain = [](const std::string& part) {
    return part[0] != '.' && part[0] != '-' &&
           part.find_first_not_of(kLetters) == std::string::npos;
  };
  return name.size() <= kLongestName && plain(owner) && plain(model);
}

std::optional<fs::path> find_in_hub_cache(const std::string& name) {
  if (!is_hub_name(name)) return std::nullopt;
  std::string folder = std::string(kModelFolder) + name;
  folder.replace(folder.find('/'), 1, "--");
  const fs::path model = cache_folder() / folder;
  std::error_code status;
  if (!fs::is_regular_file(model / "refs" / "main", status)) return std::nullopt;
  const std::string revision = revision_in(model / "refs" / "main");
  const fs::path snapshot = model / "snapshots" / revision;
  if (revision.empty() || !fs::is_regular_file(snapshot / "config.json", status)) {
    return std::nullopt;
  }
  return snapshot;
}

std::optional<std::string> hub_name_of(const fs::path& folder) {
  if (folder.parent_path().filename() != "snapshots") return std::nullopt;
  std::string name = folder.parent_path().parent_path().filename().string();
  if (!name.starts_with(kModelFolder)) return std::nullopt;
  name.erase(0, kModelFolder.size());
  const size_t split = name.find("--");
  if (split == std::string::npos) return std::nullopt;
  name.replace(split, 2, "/");
  return is_hub_name(name) ? std::optional(name) : std::nullopt;
}

// Stated names are bytes of others: only those that look like a name are taken.

namespace {

namespace fs = std::filesystem;

constexpr size_t kLongestTitle = 96;

bool is_title(std::string_view text) {
  const bool plain =
      std::ranges::all_of(text, [](unsigned char c) { return c >= 0x20 && c < 0x7F; });
  const bool framed = !text.empty() && text.front() != ' ' && text.back() != ' ';
  return framed && plain && text.size() <= kLongestTitle;
}

}  // namespace

std::string model_name(const fs::path& path, std::string_view stated) {
  if (!fs::is_directory(path)) return is_title(stated) ? std::string(stated) : path.stem().string();
  const fs::path folder = fs::weakly_canonical(path);
  if (const auto cached = hub_name_of(folder)) return *cached;
  return is_hub_name(std::string(stated)) ? std::string(stated) : folder.filename().string();
}

}  // namespace oscar
