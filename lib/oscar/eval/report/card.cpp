// The model card of a bundle.
#include "oscar/eval/report/card.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/fold.h"
#include "oscar/bundle/import.h"
#include "oscar/cache/codec.h"
#include "oscar/eval/report/figures.h"
#include "oscar/eval/report/page.h"
#include "oscar/eval/report/verdict.h"
#include "oscar/io/gguf.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace oscar {

// Identity is decided by hashes; what a run may change besides, by comparing it.

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
         "oscar-eval MODEL --bundle FILE --json REPORT makes one");
}

void require_cache(const Bundle& bundle, const Json& report, const std::string& file) {
  if (auto gap = other_cache(bundle.quantizer, report)) {
    gap->where = file;
    throw Error(*std::move(gap));
  }
}

// Figures that no program of ours has written: a mean outside the interval or the parts beside it.
void require_consistent(const ReportData& data, const std::string& file) {
  const auto check = [&file](const std::string& name, const Figure& mean, double low, double high) {
    if (!is_finite(mean) || !std::isfinite(low) || !std::isfinite(high)) return;
    const double slack = 1e-6 * std::abs(*mean) + 1e-9;  // of rounding
    if (*mean >= low - slack && *mean <= high + slack) return;
    refuse(file, "a figure contradicts the ones beside it",
           fmt::format("{} within {:.6g} to {:.6g}", name, low, high), fmt::format("{:.6g}", *mean),
           "take the report as oscar-eval wrote it");
  };
  for (const MethodFigures& m : data.methods) {
    check("nll_increase of " + m.name, m.nll_increase.mean, m.nll_increase.low.value_or(NAN),
          m.nll_increase.high.value_or(NAN));
    if (m.kl_by_position.empty()) continue;  // whose mean over tokens it is
    const auto [low, high] = std::ranges::minmax(m.kl_by_position);
    check("kl of " + m.name, m.kl.mean, low, high);
  }
}

bool measures_the_bundle(const BundleEvaluation& evaluation) {
  const MethodFigures* const method = evaluation.data.find("bundle");
  return method != nullptr && (method->has_text || method->needles);
}

BundleEvaluation read_evaluation(const Json& report, const std::string& file) {
  BundleEvaluation evaluation{
      .file = file, .data = {}, .tool = {}, .content_sha256 = {}, .kl = measured_kl(report)};
  try {
    evaluation.data = read_report(report);
  } catch (const Error& error) {
    ErrorInfo info = error.info();
    info.where = file + ": " + info.where;
    throw Error(info);
  }
  require_consistent(evaluation.data, file);
  evaluation.tool = fmt::format("{} ({})", text_at(part(report, "tool"), "version"),
                                text_at(part(report, "tool"), "commit"));
  evaluation.content_sha256 = text_at(part(report, "bundle"), "content_sha256");
  return evaluation;
}

}  // namespace

BundleEvaluation evaluation_of(const Bundle& bundle, const Json& report, const std::string& file) {
  BundleEvaluation evaluation = read_evaluation(report, file);
  require_content(bundle, report, file);
  const std::string weights = text_at(part(report, "model"), "weights_fingerprint");
  const std::string& own = bundle.model.weights_fingerprint;  // empty: oscar-eval compared samples
  if (!own.empty() && weights != own) {
    refuse(file, "the evaluation is of other weights", own, weights,
           "evaluate the files that were calibrated, and not a copy in another format");
  }
  if (!evaluation.data.partial.empty()) {
    refuse(file, "the evaluation was stopped before its end", "", evaluation.data.partial,
           "oscar-eval --resume with the same options goes on with it");
  }
  require_cache(bundle, report, file);
  if (!measures_the_bundle(evaluation)) {
    refuse(file, "the evaluation did not measure the bundle", "figures of method \"bundle\"",
           "none", "oscar-eval --compare bundle");
  }
  return evaluation;
}

std::optional<BundleEvaluation> stored_evaluation(const Bundle& bundle, const std::string& file) {
  if (!bundle.evaluation || other_cache(bundle.quantizer, *bundle.evaluation)) return std::nullopt;
  BundleEvaluation evaluation = read_evaluation(*bundle.evaluation, file);
  return measures_the_bundle(evaluation) ? std::optional(std::move(evaluation)) : std::nullopt;
}

// Lines of the form "key: value" between two lines of dashes; no other YAML is read.

namespace {

constexpr const char* kReadme = "README.md";
constexpr size_t kLongestReadme = size_t{4} << 20, kLongestId = 64, kLongestLink = 512;

bool all_of(std::string_view text, const char* marks) {
  return std::all_of(text.begin(), text.end(), [marks](char c) {
    const bool word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    return word || std::string_view(marks).find(c) != std::string_view::npos;
  });
}

std::string word_or_none(std::string_view text) {
  const bool good = !text.empty() && text.size() <= kLongestId && all_of(text, ".-_");
  return good ? std::string(text) : "";
}

std::string link_or_none(std::string_view text) {
  const bool good = text.size() <= kLongestLink && all_of(text, ".-_/:%~#?=&+");
  return good ? std::string(text) : "";
}

std::string_view trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  const bool quoted = text.size() >= 2 && text.front() == text.back() &&
                      (text.front() == '"' || text.front() == '\'');
  return quoted ? text.substr(1, text.size() - 2) : text;
}

std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::optional<StatedLicence> licence_of_readme(std::string_view text) {
  constexpr std::string_view kFence = "---";
  if (trimmed(take_line(text)) != kFence) return std::nullopt;
  StatedLicence licence{.place = kReadme};
  bool closed = false;
  while (!text.empty() && !closed) {
    const std::string_view line = take_line(text);
    closed = trimmed(line) == kFence;
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;
    const std::string_view key = line.substr(0, colon), value = trimmed(line.substr(colon + 1));
    if (key == "license") licence.id = word_or_none(value);
    if (key == "license_name") licence.name = word_or_none(value);
    if (key == "license_link") licence.link = link_or_none(value);
  }
  return closed && !licence.id.empty() ? std::optional(licence) : std::nullopt;
}

std::optional<StatedLicence> licence_of_gguf(const GgufFile& file) {
  const auto text = [&file](const char* key) { return file.text(key).value_or(""); };
  const StatedLicence licence{.id = word_or_none(text("general.license")),
                              .name = word_or_none(text("general.license.name")),
                              .link = link_or_none(text("general.license.link")),
                              .place = "general.license"};
  return licence.id.empty() ? std::nullopt : std::optional(licence);
}

}  // namespace

std::optional<StatedLicence> read_licence(const std::filesystem::path& model) {
  const bool folder = std::filesystem::is_directory(model);
  if (!folder) {
    if (const auto stated = licence_of_gguf(GgufFile(model))) return stated;
  }
  const std::filesystem::path readme = (folder ? model : model.parent_path()) / kReadme;
  if (!std::filesystem::is_regular_file(readme)) return std::nullopt;
  return licence_of_readme(read_text_file(readme, kLongestReadme));
}

// One function for each section of the card.

namespace {

constexpr const char* kLibrary = "oscar-toolkit";

void require_hub_name(const std::string& name) {
  if (is_hub_name(name)) return;
  throw Error({.what = "no name of a model on Hugging Face",
               .where = "base model",
               .expected = "ORG/NAME",
               .found = name});
}

std::string front_matter(const Bundle& bundle, const CardRequest& request) {
  std::string text = "---\n";
  if (request.licence) {
    text += fmt::format("license: {}\n", request.licence->id);
    if (!request.licence->name.empty()) {
      text += fmt::format("license_name: {}\n", request.licence->name);
    }
    if (!request.licence->link.empty()) {
      text += fmt::format("license_link: \"{}\"\n", request.licence->link);
    }
  }
  if (!request.base_model.empty()) text += fmt::format("base_model: {}\n", request.base_model);
  text += fmt::format("library_name: {}\ntags:\n", kLibrary);
  for (const char* tag : {"oscar", "kv-cache", "kv-cache-quantization", "int2", "rotation"}) {
    text += fmt::format("- {}\n", tag);
  }
  if (!bundle.model.quantization.empty()) text += "- gguf\n";
  return text + "---\n";
}

std::string cell(const Span95& span) {
  return is_finite(span.mean) ? with_interval(span.mean, span.low, span.high) : figure(span.mean);
}

std::string rate_cell(const NeedleRate& rate) {
  if (!is_finite(rate.rate)) return percent(rate.rate, 0);
  return fmt::format("{} [{}, {}]", percent(rate.rate), percent(rate.low), percent(rate.high));
}

std::string figure_table(const ReportData& data) {
  const double length = quoted_length(data);
  std::string head = "| cache |", rule = "|---|", rows;
  const auto column = [&](const std::string& name) {
    head += " " + name + " |";
    rule += "---|";
  };
  if (length > 0) column(fmt::format("bits per value at {} tokens", token_length(length)));
  if (data.has_text) {
    column("perplexity");
    column("KL to BF16, nats per token");
    column("same top token as BF16");
  }
  if (data.has_needles) column("needles found");
  for (const MethodFigures& m : data.methods) {
    if (m.variant) continue;
    const bool own = m.name == "bundle";
    rows += own ? "| **this bundle** |"
                : fmt::format("| {} ({}) |", escape_markdown(m.name), escape_markdown(m.summary));
    if (length > 0) rows += fmt::format(" {} |", figure(m.bits_at(length)));
    if (data.has_text) {
      rows += fmt::format(" {} | {} | {} |", cell(m.perplexity), m.reference ? "" : cell(m.kl),
                          m.reference ? "" : percent(m.top1.mean));
    }
    if (data.has_needles) rows += fmt::format(" {} |", m.needles ? rate_cell(m.needles->all) : "–");
    rows += '\n';
  }
  return head + "\n" + rule + "\n" + rows;
}

// Methods that oscar-eval fits from a bundle's statistics, as code, separated by commas.
std::string fitted_methods(const ReportData& data) {
  std::string names;
  for (const MethodFigures& m : data.methods) {
    if (m.variant || (m.name != "oscar" && !m.name.starts_with("oscar-"))) continue;
    names += (names.empty() ? "" : ", ") + markdown_code(m.name);
  }
  return names;
}

std::string evaluation_section(const Bundle& bundle, const BundleEvaluation& evaluation) {
  const ReportData& data = evaluation.data;
  std::string text = "\n" + figure_table(data) + "\n";
  std::vector<std::string> how;
  if (data.has_text) {
    how.push_back(fmt::format("{} predicted tokens in {} sequences of at most {}, from position {}",
                              count(data.tokens), count(data.sequences), count(data.longest),
                              count(data.first_position)));
  }
  if (data.has_needles) {
    how.push_back(fmt::format("{} needle prompts per method", count(data.needle_prompts)));
  }
  if (data.has_text && data.resampling_units != data.sequences) {
    how.push_back("Intervals take as independent: " + data.pieces);
  }
  for (const auto& [label, value] : data.facts) {
    const std::set<std::string> told = {
        "Corpus", "Mode",    "Engine",       "Position offset",
        "Device", "Version", "Cache format", "Text seen in calibration"};
    if (told.contains(label)) how.push_back(fmt::format("{}: {}", label, escape_markdown(value)));
  }
  text += "Measured so:\n\n";
  for (const std::string& line : how) text += "- " + line + "\n";
  text += fmt::format("- Command: {}\n", markdown_code(data.command));
  if (const std::string fitted = fitted_methods(data);
      !fitted.empty() && bundle.statistics.empty()) {
    text += fmt::format(
        "- {} in it: fitted from the calibration's statistics, which this file does not have. "
        "Leave {} out to repeat the rest.\n",
        fitted, fitted.find(',') == std::string::npos ? "it" : "them");
  }
  text += fmt::format("- All figures: {}\n", escape_markdown(evaluation.file));
  if (evaluation.content_sha256 != bundle.content_sha256) {
    text += fmt::format(
        "- Measured on the content {}: this bundle with its statistics, of the same serving "
        "content.\n",
        markdown_code(evaluation.content_sha256));
  }
  if (!data.separated.empty()) {
    const auto own = std::ranges::find(data.separated, "bundle", &MethodFigures::name);
    if (own != data.separated.end()) {
      text += fmt::format(
          "\nThe same text with a token that ends documents or turns as every {} token: KL {}, "
          "same top token {}.\n",
          ordinal(static_cast<int64_t>(data.separator_gap.value_or(0))), cell(own->kl),
          percent(own->top1.mean));
    }
  }
  return text;
}

// A line for each caution; python/oscar_int2/commands/published.py reads their kinds.
std::string caution_lines(const Bundle& bundle, const CardRequest& request) {
  std::vector<Caution> list;
  for (const BundleEvaluation& evaluation : request.evaluations) {
    for (const Caution& caution : evaluation.data.cautions) {
      const bool shared = caution.kind == "shared-text" && caution.method == "bundle";
      const bool of_all = caution.kind == "few-tokens" || caution.kind == "repeated-text" ||
                          caution.kind == "predicts-nothing";
      if (shared || of_all) list.push_back(caution);
    }
  }
  if (auto caution = little_text(bundle.convergence, "bundle", request.bundle_file)) {
    list.push_back(std::move(*caution));
  }
  std::string text;
  for (const Caution& caution : list) {
    text += fmt::format("\n> **Caution** (`{}`): {}.\n", caution.kind,
                        escape_markdown(caution.sentence));
  }
  return text;
}

// What the first evaluation that compared a portable variant says of it; else what the bundle does.
MeasuredKl measured_by(const Bundle& bundle, const CardRequest& request) {
  const auto first =
      std::ranges::find_if(request.evaluations, &MeasuredKl::compares, &BundleEvaluation::kl);
  return first == request.evaluations.end() ? measured_kl(bundle) : first->kl;
}

std::string figures_part(const Bundle& bundle, const CardRequest& request) {
  std::string text = "\n## What 2 bits cost\n" + caution_lines(bundle, request);
  if (request.evaluations.empty()) {
    const std::string word = left_out_evaluation(bundle);
    return text + fmt::format("\nNot measured: {}. `oscar-eval MODEL --bundle FILE` measures it.\n",
                              word.empty() ? "no evaluation was stored with this bundle" : word);
  }
  text +=
      "\nEvery figure is of the stored evaluation and was measured, none is predicted. [ ] are 95% "
      "intervals.\n";
  for (const BundleEvaluation& evaluation : request.evaluations) {
    text += evaluation_section(bundle, evaluation);
  }
  return text;
}

void require_same_bundle(const Bundle& bundle, const CardExport& written) {
  const Json& from = written.manifest.is_object() && written.manifest.contains("created_from")
                         ? written.manifest.at("created_from")
                         : Json();
  const std::string found =
      from.is_object() ? from.value("weights_fingerprint", std::string()) : std::string();
  const std::string content =
      from.is_object() ? from.value("content_sha256", std::string()) : std::string();
  const bool same = content == bundle.content_sha256 && found == bundle.model.weights_fingerprint;
  if (!same) {
    throw Error({.what = "the export is of another bundle",
                 .where = written.folder,
                 .expected = bundle.content_sha256,
                 .found = content.empty() ? "none" : content});
  }
}

std::string export_line(const CardExport& written) {
  const Json& m = written.manifest;
  const std::string variant = m.value("variant", std::string());
  std::string said = variant == "own"        ? "the bundle's own transforms"
                     : variant == "portable" ? "the portable variant, one rotation a layer"
                                             : "the portable variant, one rotation a KV head";
  if (m.contains("relative_error") && m.at("relative_error").is_number()) {
    said += fmt::format("; predicted error of the attention output {} that of this bundle",
                        times(m.at("relative_error").get<double>()));
  }
  return fmt::format("| [{0}]({1}) | {2} |\n", escape_markdown(m.value("format", std::string())),
                     written.folder, said);
}

std::string serving_part(const Bundle& bundle, const CardRequest& request) {
  const std::string& file = request.bundle_file;
  const bool gguf = !bundle.model.quantization.empty();
  const std::string model = gguf                         ? "FOLDER"
                            : request.base_model.empty() ? "MODEL"
                                                         : request.base_model;
  std::string text = fmt::format(
      "\n## How to serve it\nWith OSCAR Toolkit installed "
      "(package `oscar_int2`), in vLLM 0.26:\n\n```\nVLLM_OSCAR_BUNDLE={} vllm serve {}\n```\n\n"
      "In transformers:\n\n```python\nimport oscar_int2.transformers\n"
      "oscar_int2.transformers.apply(model, \"{}\")\n```\n\n",
      file, model, file);
  if (gguf) {
    text +=
        "It was fitted to the GGUF file named below, whose numbers differ from the original "
        "weights. Those two servers take that file as a Hugging Face folder. PyPI's gguf and "
        "accelerate are needed to write it:\n\n"
        "```\npython -m oscar_int2 dequantize FILE.gguf FOLDER\n```\n\n";
  }
  text += fmt::format(
      "The first {} and the last {} tokens stay in BF16, the others take {} bits with {} scale and "
      "zero for each {} values.\n",
      bundle.quantizer.sink_tokens, bundle.quantizer.recent_tokens, bundle.quantizer.bits,
      codec_word(bundle.quantizer.metadata_dtype), bundle.quantizer.quant_group_size);
  if (!request.exports.empty()) {
    text +=
        "\nFiles for other backends, each folder with its variables and launch line. They were "
        "read "
        "back and checked, none of these servers has run with them; what error is said here is "
        "predicted from calibration, not measured:\n\n| folder | holds |\n|---|---|\n";
    for (const CardExport& written : request.exports) {
      require_same_bundle(bundle, written);
      text += export_line(written);
    }
  }
  text += fmt::format(
      "\nWhat each backend can run of it. KL is measured and over this bundle's, in this toolkit's "
      "codec. An error is predicted from calibration and gives the order alone: measured KL was {} "
      "such a figure.\n\n| backend | |\n|---|---|\n",
      kPredictionWorth);
  for (const Json& plan : plans_json(plan_for_all(bundle, measured_by(bundle, request)))) {
    text += fmt::format("| {} | {} |\n", escape_markdown(plan["name"].get<std::string>()),
                        escape_markdown(plan["line"].get<std::string>()));
  }
  return text;
}

std::string making_part(const Bundle& bundle) {
  std::string text = "\n## How it was made\n| | |\n|---|---|\n";
  const auto row = [&text](const char* name, const std::string& value) {
    if (!value.empty()) text += fmt::format("| {} | {} |\n", name, value);
  };
  row("model",
      fmt::format("{} ({}), {} layers, {} query and {} KV heads, head_dim {}",
                  escape_markdown(bundle.model.name), escape_markdown(bundle.model.architecture),
                  bundle.model.num_layers, bundle.model.num_qo_heads, bundle.model.num_kv_heads,
                  bundle.model.head_dim_k));
  row("weights", markdown_code(bundle.model.weights_fingerprint));
  if (!bundle.model.quantization.empty()) {
    row("GGUF file", fmt::format("{}, sha256 {}", escape_markdown(bundle.model.quantization),
                                 markdown_code(bundle.model.file_sha256)));
  }
  row("method", fmt::format("{}, preset {}, {}", escape_markdown(bundle.method),
                            escape_markdown(bundle.preset), escape_markdown(bundle.granularity)));
  std::string sources;
  for (const CorpusSource& source : bundle.corpus.sources) {
    sources += fmt::format("{}{} (sha256 {})", sources.empty() ? "" : ", ",
                           escape_markdown(source.name), markdown_code(source.sha256));
  }
  row("text", sources);
  if (bundle.corpus.tokens > 0) {
    row("tokens", fmt::format("{} in sequences of at most {}",
                              count(static_cast<double>(bundle.corpus.tokens)),
                              count(bundle.corpus.sequence_length)));
  }
  if (bundle.position_span > 0) {
    row("positions",
        fmt::format("averaged over {}", count(static_cast<double>(bundle.position_span))));
  }
  row("content", markdown_code(bundle.content_sha256));
  row("serving content", markdown_code(serving_sha256(bundle)));
  row("fitted by", fmt::format("OSCAR Toolkit {}", escape_markdown(bundle.fitted_by)));
  row("written by", fmt::format("OSCAR Toolkit {} ({})", escape_markdown(bundle.tool_version),
                                escape_markdown(bundle.tool_commit)));
  return text;
}

std::string limits_part(const Bundle& bundle, const CardRequest& request) {
  std::string text = "\n## Limits\n";
  text +=
      bundle.model.fitted_weights_fingerprint.empty()
          ? "- It is for these weights alone: a fine-tune, another quantization or another RoPE "
            "needs its own calibration, and what serves it refuses other weights.\n"
          : "- It was fitted to other weights than it is for. What that costs is not known "
            "until it is measured: calibrate these weights for a bundle that fits.\n";
  for (const LayerTransforms& layer : bundle.layers) {
    for (const std::string& warning : layer.warnings) {
      if (warning == kDroppedMean) {
        text += "- Folded: " + escape_markdown(warning) + "\n";
      } else if (bundle.preset == kImportedPreset) {
        text += "- Imported: " + escape_markdown(warning) + "\n";
      }
    }
  }
  std::set<std::string> gaps;
  for (const BundleEvaluation& evaluation : request.evaluations) {
    const auto missing = judge(evaluation.data).not_measured;
    const std::set<std::string> own(missing.begin(), missing.end());
    if (&evaluation == &request.evaluations.front()) {
      gaps = own;
      continue;
    }
    std::erase_if(gaps, [&own](const std::string& gap) { return !own.contains(gap); });
  }
  for (const std::string& gap : gaps)
    text += "- Not in this evaluation: " + escape_markdown(gap) + "\n";
  return text;
}

std::string licence_part(const CardRequest& request) {
  std::string text = "\n## Licence\n";
  if (!request.licence) {
    return text +
           "The model's files state no licence. The bundle is derived from its weights: look for "
           "the model's own licence before you pass it on.\n";
  }
  const StatedLicence& licence = *request.licence;
  return text + fmt::format("As of the model, whose {} states {}{}.\n",
                            markdown_code(licence.place),
                            markdown_code(licence.name.empty() ? licence.id : licence.name),
                            licence.link.empty() ? "" : " (" + markdown_code(licence.link) + ")");
}

}  // namespace

std::string model_card(const Bundle& bundle, const CardRequest& request) {
  if (bundle.statistics_only) {
    throw Error({.what = "a statistics file has no card",
                 .where = request.bundle_file,
                 .expected = "a rotation bundle"});
  }
  if (!request.base_model.empty()) require_hub_name(request.base_model);
  std::string text = front_matter(bundle, request);
  const std::string published = request.base_model.substr(request.base_model.find('/') + 1);
  text += fmt::format("# A 2-bit KV cache for {}\n\n",
                      escape_markdown(published.empty() ? bundle.model.name : published));
  text += fmt::format(
      "`{}` is a rotation bundle of OSCAR Toolkit: for each layer and KV head the transform, means "
      "and clipping ratios by which keys and values are stored in {} bits. The model's weights are "
      "not in it and stay as they are.\n",
      request.bundle_file, bundle.quantizer.bits);
  text += figures_part(bundle, request);
  if (request.answers) {
    require_answers_of(*request.answers, serving_sha256(bundle));
    text += answers_markdown(*request.answers);
  }
  return text + serving_part(bundle, request) + making_part(bundle) + limits_part(bundle, request) +
         licence_part(request);
}

}  // namespace oscar
