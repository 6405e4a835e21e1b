// Models that read images and text: what of their config.json concerns text.
#include "oscar/model/checkpoint/text_half.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <iterator>

#include "oscar/base/error.h"

namespace oscar {

// The table of such models.

namespace {

constexpr std::string_view kQwenKeys[] = {"image_token_id", "video_token_id",
                                          "vision_start_token_id", "vision_end_token_id"};
constexpr std::string_view kQwen3_5Keys[] = {"image_token_id", "video_token_id",
                                             "vision_start_token_id", "vision_end_token_id",
                                             "language_model_only"};
constexpr std::string_view kQwenParts[] = {"model.visual.", "visual."};
constexpr std::string_view kMistralKeys[] = {"image_token_index",         "image_token_id",
                                             "multimodal_projector_bias", "projector_hidden_act",
                                             "spatial_merge_size",        "vision_feature_layer"};
constexpr std::string_view kGemmaKeys[] = {
    "image_token_index", "image_token_id", "boi_token_index",    "boi_token_id",
    "eoi_token_index",   "eoi_token_id",   "mm_tokens_per_image"};
constexpr std::string_view kTowerParts[] = {"vision_tower.", "multi_modal_projector.",
                                            "model.vision_tower.", "model.multi_modal_projector."};

constexpr const ModelFamily* kQwen3VlTexts[] = {&kQwen3Vl};
constexpr const ModelFamily* kQwen3VlMoeTexts[] = {&kQwen3VlMoe};
constexpr const ModelFamily* kQwen3_5Texts[] = {&kQwen3_5};
constexpr const ModelFamily* kQwen3_5MoeTexts[] = {&kQwen3_5Moe};
constexpr const ModelFamily* kMistral3Texts[] = {&kMistral, &kMinistral3};
constexpr const ModelFamily* kGemma3Texts[] = {&kGemma3};

// In the order in which messages list them.
constexpr WholeModel kWholeModels[] = {
    {.architecture = "Qwen3VLForConditionalGeneration",
     .model_type = "qwen3_vl",
     .texts = kQwen3VlTexts,
     .keys = kQwenKeys,
     .other_parts = kQwenParts,
     .tie_word_embeddings = false},
    {.architecture = "Qwen3VLMoeForConditionalGeneration",
     .model_type = "qwen3_vl_moe",
     .texts = kQwen3VlMoeTexts,
     .keys = kQwenKeys,
     .other_parts = kQwenParts,
     .tie_word_embeddings = false},
    {.architecture = "Qwen3_5ForConditionalGeneration",
     .model_type = "qwen3_5",
     .texts = kQwen3_5Texts,
     .keys = kQwen3_5Keys,
     .other_parts = kQwenParts,
     .tie_word_embeddings = false},
    {.architecture = "Qwen3_5MoeForConditionalGeneration",
     .model_type = "qwen3_5_moe",
     .texts = kQwen3_5MoeTexts,
     .keys = kQwen3_5Keys,
     .other_parts = kQwenParts,
     .tie_word_embeddings = false},
    {.architecture = "Mistral3ForConditionalGeneration",
     .model_type = "mistral3",
     .texts = kMistral3Texts,
     .keys = kMistralKeys,
     .other_parts = kTowerParts,
     .tie_word_embeddings = true},
    {.architecture = "Gemma3ForConditionalGeneration",
     .model_type = "gemma3",
     .texts = kGemma3Texts,
     .keys = kGemmaKeys,
     .other_parts = kTowerParts,
     .tie_word_embeddings = true},
};

// Keys of the whole that are accounted for below.
constexpr std::string_view kSettled[] = {
    "text_config",  "vision_config", "architectures", "model_type",          "tie_word_embeddings",
    "bos_token_id", "eos_token_id",  "quantization",  "quantization_config", "compression_config"};

template <typename List>
bool holds(const List& list, std::string_view key) {
  return std::find(std::begin(list), std::end(list), key) != std::end(list);
}

bool is_same(const Json& a, const Json& b, const std::string& key) {
  return a.contains(key) && b.contains(key) && a[key] == b[key];
}

}  // namespace

const WholeModel* find_whole_model(std::string_view architecture, std::string_view model_type) {
  for (const WholeModel& whole : kWholeModels) {
    if (architecture.empty() ? whole.model_type == model_type
                             : whole.architecture == architecture) {
      return &whole;
    }
  }
  return nullptr;
}

std::vector<std::string_view> whole_architectures() {
  std::vector<std::string_view> names;
  for (const WholeModel& whole : kWholeModels) names.push_back(whole.architecture);
  return names;
}

// From two configs to one.

namespace {

const ModelFamily& choose_text(const ConfigReader& text, const WholeModel& whole) {
  const std::string type = text.text("model_type", std::string(whole.texts.front()->model_type));
  std::vector<std::string_view> known;
  for (const ModelFamily* family : whole.texts) {
    if (family->model_type == type) return *family;
    known.push_back(family->model_type);
  }
  throw Error(
      {.what = fmt::format("a text half of this kind is not supported in {}", whole.architecture),
       .where = text.source + ": model_type",
       .expected = fmt::format("{}", fmt::join(known, " or ")),
       .found = type,
       .hint = hint_for_unsupported(text)});
}

}  // namespace

TextHalf read_text_half(const Json& config, const WholeModel& whole, const std::string& source) {
  const ConfigReader above{config, source};
  if (const std::string type = above.text("model_type", ""); !type.empty()) {
    if (type != whole.model_type) {
      above.refuse("model_type", "model_type and architectures disagree",
                   std::string(whole.model_type));
    }
  }
  if (!above.has("text_config") || !config["text_config"].is_object()) {
    above.refuse("text_config", "a model of images and text has no config of its text half",
                 "an object");
  }
  Json text = config["text_config"];
  const ConfigReader inner{config["text_config"], source + ": text_config"};
  const ModelFamily& family = choose_text(inner, whole);

  ConfigKeys beside{Json::object(), source, "", /*of_text=*/false};
  for (const auto& [key, value] : config.items()) {
    if (holds(kSettled, key) || holds(whole.keys, key) || is_same(config, text, key)) continue;
    beside.json[key] = value;
  }
  for (const char* key : {"quantization", "quantization_config", "compression_config"}) {
    if (!above.has(key)) continue;
    if (inner.has(key) && !is_same(config, text, key)) {
      inner.refuse(key, "weights are described twice", "what config.json says above text_config");
    }
    text[key] = config[key];
  }
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (above.has(key)) text[key] = config[key];
  }
  text.erase("architectures");
  text["model_type"] = family.model_type;
  const char* const tie = "tie_word_embeddings";
  const bool tied_above = above.flag(tie, whole.tie_word_embeddings);
  const bool tied_inside = inner.flag(tie, false);
  const bool denied = (above.has(tie) && !tied_above) || (inner.has(tie) && !tied_inside);
  text[tie] = tied_above || tied_inside;
  return {family, std::move(text), (above.has(tie) || inner.has(tie)) && !denied,
          std::move(beside)};
}

}  // namespace oscar
