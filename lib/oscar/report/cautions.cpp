// One function for each kind.
#include "oscar/report/cautions.h"

#include <fmt/format.h>

#include <cmath>

#include "oscar/fit/convergence.h"
#include "oscar/stacks/plan.h"

namespace oscar {
namespace {

const Json& entry_of(const Json& json, const char* key) {
  static const Json none;
  if (!json.is_object()) return none;
  const auto found = json.find(key);
  return found == json.end() ? none : *found;
}

// NaN where it is no number.
double number_at(const Json& json, const char* key) {
  const Json& value = entry_of(json, key);
  return value.is_number() ? value.get<double>() : NAN;
}

std::string name_of_file(const Json& bundle) {
  const Json& file = entry_of(bundle, "file");
  return file.is_string() ? file.get<std::string>() : "the bundle";
}

// Notable, and not by chance: the interval's lower end counts.
std::optional<Caution> shared_text(const Json& bundle, const std::string& method) {
  const Json& overlap = entry_of(bundle, "overlap");
  const double share = number_at(overlap, "share"), ngram = number_at(overlap, "ngram");
  const bool by_files = entry_of(overlap, "by_files") == true;
  if (!(number_at(overlap, "low") > kNotableOverlap) || std::isnan(share) ||
      (!by_files && std::isnan(ngram))) {
    return std::nullopt;
  }
  const std::string found =
      by_files ? fmt::format("{:.0f}% of the evaluation's tokens, by their files,", 100 * share)
               : fmt::format("{:.0f}% of the evaluation's {:.0f}-grams", 100 * share, ngram);
  return Caution{
      .kind = "shared-text",
      .method = method,
      .measured = found + " are in the calibration text",
      .sentence = fmt::format("{} are in the calibration text of {}: the figures flatter "
                              "the bundle; evaluate on other text",
                              found, name_of_file(bundle))};
}

void add_of_bundle(const Json& bundle, const std::string& method, std::vector<Caution>& list) {
  if (auto caution = shared_text(bundle, method)) list.push_back(std::move(*caution));
  if (auto caution = little_text(entry_of(bundle, "convergence"), method, name_of_file(bundle))) {
    list.push_back(std::move(*caution));
  }
}

void add_portable(const Json& report, std::vector<Caution>& list) {
  const MeasuredKl kl = measured_kl(report);
  if (!kl.own || !(*kl.own > 0)) return;
  for (const auto& [name, value] :
       {std::pair{"portable", kl.shared}, std::pair{"portable-perhead", kl.per_head}}) {
    if (!value || *value / *kl.own < kTooManyTimes) continue;
    const std::string times =
        fmt::format("{:.{}f} times", *value / *kl.own, *value / *kl.own < 9.95 ? 1 : 0);
    list.push_back(
        {.kind = "portable",
         .method = "bundle",
         .measured = times + " its KL",
         .sentence = fmt::format("KL of the variant {}, which other stacks run, is about "
                                 "{} the bundle's: do not serve it",
                                 name, times)});
  }
}

}  // namespace

std::vector<Caution> cautions_of(const Json& report) {
  std::vector<Caution> list;
  add_of_bundle(entry_of(report, "bundle"), "bundle", list);
  if (const Json& bundles = entry_of(report, "bundles"); bundles.is_object()) {
    for (const auto& [name, bundle] : bundles.items()) add_of_bundle(bundle, name, list);
  }
  add_portable(report, list);
  return list;
}

std::optional<Caution> little_text(const Json& record, const std::string& method,
                                   const std::string& file) {
  if (!needs_more_text(record)) return std::nullopt;
  const double fall = number_at(record, "fall_per_doubling"),
               needed = number_at(record, "tokens_needed");
  std::string measured = "not enough";
  if (std::isfinite(fall)) {
    measured += fmt::format(": predicted loss still falls by {:.1f}% per doubling", 100 * fall);
  }
  std::string sentence = fmt::format("the calibration text of {} is {}", file, measured);
  if (std::isfinite(needed)) sentence += fmt::format("; use about {:.0f} tokens", needed);
  return Caution{.kind = "little-text",
                 .method = method,
                 .measured = std::move(measured),
                 .sentence = std::move(sentence)};
}

}  // namespace oscar
