// Reading and running normalizers.
#include "oscar/data/normalizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr size_t kMaxNormalizers = 64;
// NFKD, which lengthens most, makes 11 bytes of one; the rest is for short texts and prefixes.
constexpr size_t kMaxGrowth = 32, kMaxPrefix = 256;

constexpr std::array<std::pair<std::string_view, NormalForm>, 4> kForms = {{
    {"NFC", NormalForm::kNfc},
    {"NFD", NormalForm::kNfd},
    {"NFKC", NormalForm::kNfkc},
    {"NFKD", NormalForm::kNfkd},
}};

void read_normalizer_steps(const TokenizerJson& object, const std::string& where, Normalizer& out) {
  const std::string type = type_of(object, where);
  const auto* const form = std::find_if(kForms.begin(), kForms.end(),
                                        [&](const auto& entry) { return entry.first == type; });
  if (type == "Sequence") {
    check_keys(object, {"type", "normalizers"}, where);
    for (const TokenizerJson& part : list_member(object, "normalizers", where)) {
      read_normalizer_steps(part, where, out);
    }
    return;
  }
  if (form != kForms.end()) {
    check_keys(object, {"type"}, where);
    out.steps.emplace_back(form->second);
  } else if (type == "Replace") {
    check_keys(object, {"type", "pattern", "content"}, where);
    out.steps.emplace_back(ReplaceStep{read_text_pattern(object, "pattern", where),
                                       string_member(object, "content", where)});
  } else if (type == "Prepend") {
    check_keys(object, {"type", "prepend"}, where);
    out.steps.emplace_back(PrependStep{string_member(object, "prepend", where)});
  } else if (type == "Lowercase") {
    check_keys(object, {"type"}, where);
    out.steps.emplace_back(LowercaseStep{});
  } else if (type == "Strip") {
    check_keys(object, {"type", "strip_left", "strip_right"}, where);
    out.steps.emplace_back(StripStep{bool_member(object, "strip_left", true, where),
                                     bool_member(object, "strip_right", true, where)});
  } else {
    refuse_tokenizer("normalizer '" + type + "'", where);
  }
  if (out.steps.size() > kMaxNormalizers) {
    refuse_tokenizer("more than " + std::to_string(kMaxNormalizers) + " normalizers", where);
  }
}

// What a step may make of a text: replacements can be repeated until memory ends.
class Limit {
 public:
  explicit Limit(size_t size) : most_(kMaxGrowth * size + kMaxPrefix) {}
  void check(size_t size) const {
    if (size <= most_) return;
    throw Error({.what = "normalizer makes a text much longer",
                 .where = "tokenizer.json: normalizer",
                 .expected = "at most " + std::to_string(most_) + " bytes"});
  }

 private:
  size_t most_;
};

std::string run(NormalForm form, const std::string& text, const Limit& /*limit*/) {
  return normalize_unicode(text, form);
}

std::string run(const ReplaceStep& step, const std::string& text, const Limit& limit) {
  std::string out;
  size_t offset = 0;
  while (const auto match = find_pattern(step.pattern, text, offset)) {
    out.append(text, offset, match->begin - offset);
    out += step.content;
    limit.check(out.size());
    offset = match->end;
  }
  if (offset == 0) return text;
  out.append(text, offset);
  return out;
}

std::string run(const PrependStep& step, const std::string& text, const Limit& /*limit*/) {
  return text.empty() ? text : step.content + text;
}

std::string run(LowercaseStep /*step*/, const std::string& text, const Limit& /*limit*/) {
  return lowercase(text);
}

std::string run(StripStep step, const std::string& text, const Limit& /*limit*/) {
  std::string_view kept = text;
  if (step.left) kept.remove_prefix(white_space_end(kept, 0));
  if (step.right) kept = kept.substr(0, white_space_begin(kept, kept.size()));
  return std::string(kept);
}

}  // namespace

Normalizer read_normalizer(const TokenizerJson& object, const std::string& where) {
  Normalizer normalizer;
  if (!object.is_null()) read_normalizer_steps(object, where, normalizer);
  return normalizer;
}

std::string normalize(const Normalizer& normalizer, std::string_view text) {
  const Limit limit(text.size());
  std::string normal(text);
  for (const NormalizerStep& step : normalizer.steps) {
    normal = std::visit([&](const auto& s) { return run(s, normal, limit); }, step);
    limit.check(normal.size());
  }
  return normal;
}

}  // namespace oscar
