// Identity is decided by hashes; what a run may change besides, by comparing it.
#include "oscar/report/bundle_evaluation.h"

#include <fmt/format.h>

#include "oscar/base/error.h"
#include "oscar/bundle/strip.h"
#include "oscar/cache/metadata.h"

namespace oscar {
namespace {

std::string text_at(const Json& json, const char* key) {
  if (!json.is_object() || !json.contains(key)) return "";
  const Json& value = json.at(key);
  return value.is_string() ? value.get<std::string>() : value.is_number() ? value.dump() : "";
}

const Json& part(const Json& json, const char* key) {
  static const Json none;
  return json.is_object() && json.contains(key) ? json.at(key) : none;
}

[[noreturn]] void refuse(const std::string& file, const std::string& what,
                         const std::string& expected, const std::string& found,
                         const std::string& hint = "") {
  throw Error({.what = what, .where = file, .expected = expected, .found = found, .hint = hint});
}

void require_content(const Bundle& bundle, const Json& report, const std::string& file) {
  const std::string content = text_at(part(report, "bundle"), "content_sha256");
  const std::string serving = text_at(part(report, "bundle"), "serving_sha256");
  if (!content.empty() && content == bundle.content_sha256) return;
  const std::string own = serving_sha256(bundle);
  if (serving == own || content == own) return;
  refuse(file, "the evaluation is of another bundle",
         fmt::format("content {}, or serving profile {}", bundle.content_sha256, own),
         content.empty() ? "a report without a bundle" : fmt::format("content {}", content),
         "oscar-eval --bundle FILE --json makes one");
}

void require_cache(const Bundle& bundle, const Json& report, const std::string& file) {
  const QuantizerSettings& q = bundle.quantizer;
  const std::pair<const char*, std::string> own[] = {
      {"bits", std::to_string(q.bits)},
      {"sink", std::to_string(q.sink_tokens)},
      {"recent", std::to_string(q.recent_tokens)},
      {"quant_group_size", std::to_string(q.quant_group_size)},
      {"metadata_dtype", codec_word(q.metadata_dtype)},
      {"demote_block", std::to_string(q.demote_block)},
      {"clip_span", codec_word(q.rules.clip_span)},
      {"zero", codec_word(q.rules.zero)},
      {"ties", codec_word(q.rules.ties)},
      {"metadata_rounding", codec_word(q.rules.metadata_rounding)}};
  const Json& measured = part(report, "quantizer");
  for (const auto& [key, value] : own) {
    const std::string found = text_at(measured, key);
    if (found == value || found.empty()) continue;  // reports of earlier versions name fewer
    refuse(file, "the evaluation ran with another cache than the bundle asks for",
           fmt::format("{} {}", key, value), fmt::format("{} {}", key, found),
           "leave --sink, --recent and the like away");
  }
}

}  // namespace

BundleEvaluation evaluation_of(const Bundle& bundle, const Json& report, const std::string& file) {
  BundleEvaluation evaluation{.file = file, .data = {}, .tool = {}};
  try {
    evaluation.data = read_report(report);
  } catch (const Error& error) {
    ErrorInfo info = error.info();
    info.where = file + ": " + info.where;
    throw Error(info);
  }
  require_content(bundle, report, file);
  const std::string weights = text_at(part(report, "model"), "weights_fingerprint");
  if (weights != bundle.model.weights_fingerprint) {
    refuse(file, "the evaluation is of other weights", bundle.model.weights_fingerprint, weights);
  }
  require_cache(bundle, report, file);
  const MethodFigures* const method = evaluation.data.find("bundle");
  if (method == nullptr || !(method->has_text || method->needles)) {
    refuse(file, "the evaluation did not measure the bundle", "figures of method \"bundle\"",
           "none", "oscar-eval --compare bundle");
  }
  evaluation.tool = fmt::format("{} ({})", text_at(part(report, "tool"), "version"),
                                text_at(part(report, "tool"), "commit"));
  return evaluation;
}

}  // namespace oscar
