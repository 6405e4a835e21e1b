// A model as published: found by its folder, file or name, and opened.
#include "oscar/model/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/checkpoint/gguf_model.h"
#include "oscar/model/checkpoint/gguf_tokenizer.h"
#include "oscar/model/checkpoint/named_weights.h"
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

using Texts = std::map<std::string, std::string>;

// A text, or a list of objects with name and template.
Texts templates_of(const Json& value) {
  if (value.is_string()) return {{"default", value.get<std::string>()}};
  Texts texts;
  if (!value.is_array()) return texts;
  for (const Json& entry : value) {
    if (entry.is_object() && entry.value("name", Json()).is_string() &&
        entry.value("template", Json()).is_string()) {
      texts[entry["name"].get<std::string>()] = entry["template"].get<std::string>();
    }
  }
  return texts;
}

constexpr const char* kTemplateName = "chat_template.jinja";

Texts templates_in(const fs::path& folder) {
  if (fs::exists(folder / kTemplateName)) {
    Texts texts = {{"default", read_text_file(folder / kTemplateName, kMaxConfigBytes)}};
    std::error_code status;
    for (const auto& entry : fs::directory_iterator(folder / "additional_chat_templates", status)) {
      if (entry.path().extension() != ".jinja") continue;
      texts[entry.path().stem().string()] = read_text_file(entry.path(), kMaxConfigBytes);
    }
    return texts;
  }
  for (const char* file : {"chat_template.json", "tokenizer_config.json"}) {
    if (!fs::exists(folder / file)) continue;
    const Json json = read_json_file(folder / file);
    if (!json.is_object() || !json.contains("chat_template")) continue;
    if (Texts texts = templates_of(json["chat_template"]); !texts.empty()) return texts;
  }
  return {};
}

// Tokens are texts, or objects with one.
void add_special_tokens(const Json& json, Texts& tokens) {
  if (!json.is_object()) return;
  for (const auto& [key, value] : json.items()) {
    if (key == "extra_special_tokens") add_special_tokens(value, tokens);
    if (!key.ends_with("_token")) continue;
    const Json& text = value.is_object() ? value.value("content", Json()) : value;
    if (text.is_string()) tokens.emplace(key, text.get<std::string>());
  }
}

Texts special_tokens_in(const fs::path& folder) {
  Texts tokens;
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"}) {
    if (fs::exists(folder / file)) add_special_tokens(read_json_file(folder / file), tokens);
  }
  return tokens;
}

ChatTemplate gguf_chat_template(const GgufFile& file) {
  constexpr std::pair<const char*, const char*> kTokens[] = {{"bos_token", "bos_token_id"},
                                                             {"eos_token", "eos_token_id"},
                                                             {"unk_token", "unknown_token_id"},
                                                             {"sep_token", "seperator_token_id"},
                                                             {"pad_token", "padding_token_id"}};
  ChatTemplate result;
  const fs::path beside = file.path().parent_path() / kTemplateName;
  if (const auto text = file.text(kGgufChatTemplate)) {
    result.texts["default"] = std::string(*text);
  } else if (fs::exists(beside)) {
    result.texts["default"] = read_text_file(beside, kMaxConfigBytes);
  } else {
    return result;
  }
  const auto tokens = file.texts("tokenizer.ggml.tokens");
  for (const auto& [name, key] : kTokens) {
    const auto id = file.integer(std::string("tokenizer.ggml.") + key);
    if (!tokens || !id || *id < 0 || static_cast<uint64_t>(*id) >= tokens->size()) continue;
    result.special_tokens[name] = std::string((*tokens)[static_cast<size_t>(*id)]);
  }
  return result;
}

void set_chat_template(Checkpoint& checkpoint, ChatTemplate chat_template) {
  const auto found = chat_template.texts.find("default");
  if (found != chat_template.texts.end()) {
    checkpoint.chat_template_sha256 = sha256_of(found->second);
  }
  checkpoint.chat_template = std::move(chat_template);
}

// Names of the folder's models in GGUF, in order; encoders of images (mmproj) are none.
std::vector<std::string> gguf_files_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".gguf") && !name.starts_with("mmproj")) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

constexpr const char* kMergeAdapter =
    "merge it into its model with peft: AutoPeftModelForCausalLM"
    ".from_pretrained(FOLDER).merge_and_unload().save_pretrained(MERGED); "
    "copy the tokenizer's files beside it";

// "an adapter of org/base" of a folder's adapter_config.json; none where there is no such file.
std::optional<std::string> adapter_in(const fs::path& folder) {
  const fs::path file = folder / "adapter_config.json";
  if (!fs::exists(file)) return std::nullopt;
  const Json json = read_json_file(file);
  const Json base = json.is_object() ? json.value("base_model_name_or_path", Json()) : Json();
  return base.is_string() ? "an adapter of " + base.get<std::string>() : "";
}

void warn_of_adapter(Checkpoint& checkpoint) {
  std::optional<std::string> adapter;
  try {
    adapter = adapter_in(checkpoint.folder);
  } catch (const Error&) {
    adapter = "";  // transformers refuses it, too
  }
  if (!adapter) return;
  checkpoint.warnings.push_back(fmt::format(
      "{}: beside the model lies {} (adapter_config.json). It is not used here, and transformers "
      "loads it:\n  {}. Or move adapter_config.json away",
      checkpoint.folder.string(), adapter->empty() ? "an adapter" : *adapter, kMergeAdapter));
}

[[noreturn]] void refuse_without_config(const fs::path& folder) {
  if (const auto adapter = adapter_in(folder)) {
    throw Error({.what = "the folder holds an adapter (LoRA), not a model",
                 .where = folder.string(),
                 .found = *adapter,
                 .hint = kMergeAdapter});
  }
  if (const auto files = gguf_files_in(folder); !files.empty()) {
    throw Error({.what = "the folder holds GGUF files and no config.json",
                 .where = folder.string(),
                 .expected = "a .gguf file as MODEL, or a folder as Hugging Face's tools write it",
                 .found = fmt::format("{}", fmt::join(files, ", ")),
                 .hint = "give the file as MODEL: " + (folder / files.front()).string()});
  }
  throw Error({.what = "the model folder has no config.json",
               .where = folder.string(),
               .hint = "MODEL is a folder as Hugging Face's tools write it, or a .gguf file"});
}

// config.json's `text`, with what ModelOpt may have written beside it.
Json folder_config(const fs::path& folder, const std::string& text) {
  Json config = parse_json(text, (folder / "config.json").string());
  const fs::path modelopt = folder / "hf_quant_config.json";
  const bool stated = config.is_object() && (config.contains("quantization_config") ||
                                             config.contains("compression_config"));
  if (!config.is_object() || stated || !fs::exists(modelopt)) return config;
  Json quantization = read_json_file(modelopt);
  if (quantization.is_object()) quantization["quant_method"] = "modelopt";
  config["quantization_config"] = std::move(quantization);
  return config;
}

bool equal_bytes(const WeightSource& weights, const std::string& a, const std::string& b) {
  constexpr size_t kBlockBytes = size_t{1} << 20;
  const StoredBytes first = weights.stored_bytes(a), second = weights.stored_bytes(b);
  if (first.bytes != second.bytes) return false;
  std::vector<std::byte> ours(kBlockBytes), theirs(kBlockBytes);
  for (size_t done = 0; done < first.bytes; done += kBlockBytes) {
    const size_t count = std::min(kBlockBytes, first.bytes - done);
    first.read(done, count, ours.data());
    second.read(done, count, theirs.data());
    if (!std::equal(ours.begin(), ours.begin() + static_cast<std::ptrdiff_t>(count),
                    theirs.begin())) {
      return false;
    }
  }
  return true;
}

// config.json may tie an output matrix to the embedding that was trained and stored apart.
void untie_other_head(Checkpoint& checkpoint) {
  const std::string head = "lm_head.weight", embedding = "model.embed_tokens.weight";
  const WeightSource& weights = *checkpoint.weights;
  if (!checkpoint.config.tie_word_embeddings || !weights.contains(head) ||
      !weights.contains(embedding) || equal_bytes(weights, head, embedding)) {
    return;
  }
  checkpoint.config.tie_word_embeddings = false;
  if (!checkpoint.config.tie_is_stated) return;
  checkpoint.notes.emplace_back(
      "config.json ties the output matrix to the embedding, and lm_head.weight holds other "
      "numbers:\n  they are used, as in transformers 5; other programs may tie them. "
      "tie_word_embeddings: false says what is meant");
}

// Whether an index beside model.safetensors names other files, or cannot be read.
bool has_other_files(const fs::path& folder) {
  const fs::path index = folder / "model.safetensors.index.json";
  if (!fs::exists(index) || !fs::exists(folder / "model.safetensors")) return false;
  try {
    const Json weight_map = read_json_file(index).at("weight_map");
    return std::ranges::any_of(weight_map,
                               [](const Json& file) { return file != "model.safetensors"; });
  } catch (const std::exception&) {
    return true;
  }
}

void add_notes(Checkpoint& checkpoint, const SafetensorsWeights& files) {
  if (has_other_files(checkpoint.folder)) {
    checkpoint.notes.emplace_back(
        "the folder has model.safetensors and an index of other files: model.safetensors is read, "
        "as in transformers;\n  vLLM reads the files of the index. Remove what is not meant");
  }
  if (const size_t count = further_weights(checkpoint.config, files).size(); count > 0) {
    checkpoint.notes.push_back(
        fmt::format("left out the tensors ({}) of layers that guess tokens further ahead", count));
  }
  if (const size_t count = weights_of_other_parts(checkpoint.config, files).size(); count > 0) {
    checkpoint.notes.push_back(
        fmt::format("left out the tensors ({}) that no text passes through: only the text half of "
                    "the model is run",
                    count));
  }
}

Checkpoint open_folder(const fs::path& folder, const std::optional<Json>& rope_scaling) {
  Checkpoint checkpoint;
  checkpoint.path = checkpoint.folder = folder;
  const fs::path config_path = folder / "config.json";
  if (!fs::exists(config_path)) refuse_without_config(folder);
  const std::string text = read_text_file(config_path, kMaxConfigBytes);
  checkpoint.config_sha256 = sha256_of(text);
  const Json config = folder_config(folder, text);
  checkpoint.config = parse_model_config(config, config_path.string(), rope_scaling);
  const Json stated = config.value("_name_or_path", Json());
  checkpoint.name = model_name(folder, stated.is_string() ? stated.get<std::string>() : "");
  auto files = std::make_shared<const SafetensorsWeights>(folder);
  add_notes(checkpoint, *files);
  warn_of_adapter(checkpoint);
  if (checkpoint.config.fp8) {
    checkpoint.weights = std::make_shared<Fp8Weights>(files, *checkpoint.config.fp8);
  } else if (has_other_scales(*files)) {
    const auto plain = std::make_shared<Fp8Weights>(files, Fp8Layout{.layout = ScaleLayout::kNone});
    checkpoint.notes.push_back(plain->unused_scales());
    checkpoint.weights = plain;
  } else {
    checkpoint.weights = files;
  }
  checkpoint.weights = by_table_names(files, checkpoint.weights, checkpoint.config);
  untie_other_head(checkpoint);
  if (fs::exists(folder / "tokenizer.json")) {
    checkpoint.tokenizer_sha256 = sha256_of_file(folder / "tokenizer.json");
  }
  set_chat_template(checkpoint, read_chat_template(folder));
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
  const auto weights = std::make_shared<GgufWeights>(file, checkpoint.config);
  if (const size_t count = weights->num_rotations(); count > 0) {
    checkpoint.notes.push_back(fmt::format(
        "left out {} rotations of OSCAR's llama.cpp branch: the model is run without them;\n"
        "  oscar-bundle import makes a bundle of them",
        count));
  }
  checkpoint.weights = weights;
  checkpoint.tokenizer_sha256 = gguf_tokenizer_sha256(*file);
  set_chat_template(checkpoint, gguf_chat_template(*file));
  return checkpoint;
}

}  // namespace

Json read_config_json(const fs::path& folder) {
  if (!fs::exists(folder / "config.json")) refuse_without_config(folder);
  return folder_config(folder, read_text_file(folder / "config.json", kMaxConfigBytes));
}

namespace {

constexpr const char* kQuantizationKeys[] = {"quantization", "quantization_config",
                                             "compression_config"};

bool has_text_half(const Json& config) {
  return config.is_object() && config.contains("text_config") && config["text_config"].is_object();
}

bool is_unread(const Json& described, const std::string& source) {
  try {
    parse_quantization(described, source);
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace

std::optional<Json> unread_quantization(const Json& config, const std::string& source) {
  if (is_unread(config, source)) {
    for (const char* key : kQuantizationKeys) {
      if (config.contains(key)) return config[key];
    }
  }
  if (has_text_half(config)) return unread_quantization(config["text_config"], source);
  return std::nullopt;
}

ModelConfig read_model_config(const std::filesystem::path& model) {
  if (!fs::is_directory(model)) return open_checkpoint(model.string()).config;
  const std::string source = (model / "config.json").string();
  Json config = read_config_json(model);
  const auto forget_unread = [&](Json& described) {
    if (!is_unread(described, source)) return;
    for (const char* key : kQuantizationKeys) described.erase(key);
  };
  forget_unread(config);
  if (has_text_half(config)) forget_unread(config["text_config"]);
  return parse_model_config(config, source);
}

ChatTemplate read_chat_template(const fs::path& model) {
  if (!fs::is_directory(model)) return gguf_chat_template(GgufFile(model));
  ChatTemplate chat_template{.texts = templates_in(model), .special_tokens = {}};
  if (!chat_template.empty()) chat_template.special_tokens = special_tokens_in(model);
  return chat_template;
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
  if (std::string cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
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
  fs::path snapshot = model / "snapshots" / revision;
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
