// The statistics of several runs, added.
#include "oscar/bundle/merge.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <map>

#include "oscar/base/add_counts.h"
#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/moments.h"

namespace oscar {

bool is_weighted(const Bundle& bundle) {
  return std::ranges::any_of(bundle.statistics,
                             [](const auto& layer) { return !layer.attended.empty(); });
}

Windows collected_windows(const Bundle& bundle) {
  return bundle.collected.value_or(bundle.quantizer.windows());
}

std::string differing(const Windows& windows, const Windows& other) {
  std::string text;
  const auto add = [&text](const char* option, int own, int theirs) {
    if (own != theirs) text += fmt::format("{}{} {}", text.empty() ? "" : " ", option, own);
  };
  add("--sink", windows.sink_tokens, other.sink_tokens);
  add("--recent", windows.recent_tokens, other.recent_tokens);
  add("--demote-block", windows.demote_block, other.demote_block);
  return text;
}

// Merging is addition; the work is in refusing what must not be added.

namespace {

// /model as text by attribute name.
struct ModelText {
  std::map<std::string, std::string> values;
  void operator()(const char* name, const std::string& value) { values[name] = value; }
  void operator()(const char* name, int value) { values[name] = std::to_string(value); }
  void operator()(const char* name, const Json& value) { values[name] = Json(value).dump(); }
};

constexpr const char* kHeldBackTokens = "held_back_tokens";
constexpr std::array kHeldBackCounts = {"search_chunks", "confirm_chunks", kHeldBackTokens};
constexpr std::array kWindows = {"sink_tokens", "recent_tokens"};

// Any program may have written the record: 0 for what is no count of at most `most`.
int64_t count_in(const Json& record, const char* name, int64_t most) {
  const auto place = record.find(name);
  if (place == record.end() || !place->is_number_integer()) return 0;
  const auto count = place->get<int64_t>();
  return count >= 0 && count <= most ? count : 0;
}

void add_held_back(Json& total, Json part) {
  if (total.is_null()) {
    total = std::move(part);
    return;
  }
  if (part.is_null()) return;
  for (const char* name : kHeldBackCounts) {
    total[name] = add_counts(total[name].get<int64_t>(), part[name].get<int64_t>(), name);
  }
  for (const char* name : kWindows) {
    if (total[name] != part[name]) total[name] = nullptr;
  }
}

[[noreturn]] void refuse_repeat(const std::string& where, const std::string& found) {
  throw Error({.what = "the same corpus would be counted twice",
               .where = where,
               .found = found,
               .hint = "leave one file out, or pass --allow-repeats to count it twice"});
}

// Sums of two texts are never equal to the bit.
bool have_equal_sums(const Bundle& a, const Bundle& b) {
  return std::ranges::equal(
      a.statistics, b.statistics, [](const LayerStatistics& x, const LayerStatistics& y) {
        return x.count_kv == y.count_kv && x.k_moment.data == y.k_moment.data &&
               x.v_moment.data == y.v_moment.data;
      });
}

// A span for which rows may count by attention.
constexpr int64_t kAnySpan = 1;

// Texts of which so much is the same are one text twice; below it they may share a prompt.
constexpr double kSameText = 0.5;

// Remembers who brought a corpus and refuses to see it again.
class CorpusLedger {
 public:
  explicit CorpusLedger(bool allow_repeats) : allow_repeats_(allow_repeats) {}

  void add(const CorpusRecord& corpus, const std::string& file) {
    std::map<std::string, std::string> mine;
    if (!corpus.tokens_sha256.empty()) mine[corpus.tokens_sha256] = "tokens";
    for (const auto& source : corpus.sources) {
      if (!source.sha256.empty()) mine[source.sha256] = source.name;
    }
    for (const auto& [hash, what] : mine) {
      const auto [place, is_new] = seen_.emplace(hash, file);
      if (is_new || allow_repeats_) continue;
      refuse_repeat(file + ": " + what, "also in " + place->second + ", sha256 " + hash);
    }
  }

 private:
  bool allow_repeats_;
  std::map<std::string, std::string> seen_;
};

void append_corpus(CorpusRecord& total, const CorpusRecord& other) {
  total.sources.insert(total.sources.end(), other.sources.begin(), other.sources.end());
  const auto add = [](int64_t& sum, int64_t more, const char* name) {
    sum = add_counts(sum, more, std::string("/corpus ") + name);
  };
  add(total.sequences_read, other.sequences_read, "sequences_read");
  add(total.sequences_used, other.sequences_used, "sequences_used");
  add(total.tokens, other.tokens, "tokens");
  total.sequence_length = std::max(total.sequence_length, other.sequence_length);
  const auto join = [](std::string& text, const std::string& more) {
    if (text != more) text += "; " + more;
  };
  join(total.bos_eos_policy, other.bos_eos_policy);
  join(total.chat_template, other.chat_template);
  join(total.separators, other.separators);
  if (total.recall != other.recall) {
    const auto said = [](const std::string& recall) { return recall.empty() ? "none" : recall; };
    total.recall = said(total.recall) + "; " + said(other.recall);
  }
}

}  // namespace

void require_statistics(const Bundle& bundle, const std::string& name) {
  if (!bundle.statistics.empty()) return;
  throw Error({.what = "file holds no statistics",
               .where = name,
               .hint = "it was written with --no-statistics or stripped"});
}

bool names_its_text(const Bundle& bundle) {
  return !bundle.corpus.tokens_sha256.empty() ||
         std::ranges::any_of(bundle.corpus.sources,
                             [](const CorpusSource& source) { return !source.sha256.empty(); });
}

bool have_comparable_weights(const Bundle& bundle, const Bundle& other) {
  const bool named =
      !bundle.model.weights_fingerprint.empty() && !other.model.weights_fingerprint.empty();
  return named || (!bundle.weight_samples.empty() && !other.weight_samples.empty());
}

void require_same_model(const Bundle& bundle, const Bundle& other, const std::string& name,
                        const std::string& other_name) {
  ModelText a, b;
  schema::visit_model(bundle.model, a);
  schema::visit_model(other.model, b);
  for (const auto& [attribute, value] : a.values) {
    // The model's name is a label, and of its file other parts may change; the fingerprint decides.
    if (attribute == "name" || attribute == schema::kFileHash) continue;
    if (b.values[attribute] == value) continue;
    // Files of earlier versions do not say.
    const bool unknown = bundle.model.numerics.is_null() || other.model.numerics.is_null();
    if (attribute == schema::kNumerics && unknown) continue;
    const auto shown = [](const std::string& text) { return text.empty() ? "none" : text; };
    throw Error({.what = "statistics of different models cannot be put together",
                 .where = other_name + ": /model attribute " + attribute,
                 .expected = shown(value) + " (" + name + ")",
                 .found = shown(b.values[attribute])});
  }
  const std::string difference =
      weight_difference(bundle.weight_samples, other.weight_samples, false);
  if (difference.empty()) return;
  throw Error(
      {.what = "statistics of different weights cannot be put together",
       .where = other_name + ": weight_samples",
       .expected = "those of " + name,
       .found = difference,
       .hint = "calibrate the same weights; a model in memory may be other than its files"});
}

namespace {

// Whether a row counts, and how much, in a sum weighted by attention depends on the windows.
void require_same_windows(const Bundle& bundle, const Bundle& other, const std::string& name,
                          const std::string& other_name) {
  if (!is_weighted(bundle) || !is_weighted(other)) return;
  const Windows ours = collected_windows(bundle), theirs = collected_windows(other);
  if (ours == theirs) return;
  throw Error(
      {.what = "sums weighted by attention were collected with different windows",
       .where = other_name,
       .expected = differing(ours, theirs) + " (" + name + ")",
       .found = differing(theirs, ours),
       .hint = "calibrate with the same windows; or one of them with --row-weights even: sums by "
               "attention are then left out, and rows count alike"});
}

}  // namespace

Json held_back_part(const Bundle& bundle) {
  const Json& search = bundle.search;
  Json part = {{"searched", Json::array()}};
  for (const char* name : kHeldBackCounts)
    part[name] = count_in(search, name, bundle.corpus.tokens);
  if (part[kHeldBackTokens] == 0) return nullptr;
  const bool whole = std::ranges::any_of(bundle.statistics, [&](const LayerStatistics& layer) {
    return layer.count_kv == bundle.corpus.tokens;
  });
  if (whole) return nullptr;  // its sums were added after the choices were made
  // A file made from another's sums may have other windows than those that decided.
  const std::array own = {bundle.quantizer.sink_tokens, bundle.quantizer.recent_tokens};
  for (size_t i = 0; i < own.size(); ++i)
    part[kWindows[i]] = search.value(kWindows[i], Json(own[i]));
  return part;
}

std::vector<std::string> merge_warnings(const std::vector<Bundle>& inputs,
                                        const std::vector<std::string>& names) {
  std::vector<std::string> warnings;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const double share = shared_text(inputs[j].fingerprint, inputs[i].fingerprint);
      if (share <= kNotableOverlap) continue;
      warnings.push_back(
          fmt::format("{}: about {:.0f}% of the smaller text is in {} too, and "
                      "counts twice",
                      names[i], 100 * share, names[j]));
    }
  }
  // Files with sums by attention, where others have none, and the layers for which that is so.
  std::map<std::pair<std::string, std::string>, int> partly;
  int weighted = 0;
  for (size_t layer = 0; layer < inputs.at(0).statistics.size(); ++layer) {
    std::string with, without;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (layer >= inputs[i].statistics.size()) continue;  // of another model, which merge refuses
      std::string& list = inputs[i].statistics[layer].attended.empty() ? without : with;
      list += (list.empty() ? "" : ", ") + names[i];
    }
    if (with.empty()) continue;
    ++weighted;
    if (!without.empty()) ++partly[{with, without}];
  }
  for (const auto& [files, layers] : partly) {
    const std::string where =
        layers == weighted ? "" : fmt::format(" in {} of {} layers", layers, weighted);
    warnings.push_back(
        fmt::format("sums by attention are of {} alone{} and are left out (none in {}): "
                    "fits of the result count rows alike{}",
                    files.first, where, files.second, layers == weighted ? "" : " there"));
  }
  return warnings;
}

Bundle merge_statistics(std::vector<Bundle> inputs, const std::vector<std::string>& names,
                        bool allow_repeats) {
  CorpusLedger ledger(allow_repeats);
  std::string hashes;
  Json held_back;
  // A fit asks the model where its inputs do not agree.
  int64_t common_span = inputs.at(0).position_span;
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_statistics(inputs[i], names[i]);
    require_same_model(inputs[0], inputs[i], names[0], names[i]);
    for (size_t j = 0; j < i; ++j) require_same_windows(inputs[j], inputs[i], names[j], names[i]);
    ledger.add(inputs[i].corpus, names[i]);
    for (size_t j = 0; j < i && !allow_repeats; ++j) {
      if (have_equal_sums(inputs[j], inputs[i])) {
        refuse_repeat(names[i] + ": statistics", "the same sums as in " + names[j]);
      }
      const double share = shared_text(inputs[j].fingerprint, inputs[i].fingerprint);
      if (share < kSameText) continue;
      refuse_repeat(
          names[i] + ": " + schema::kFingerprint,
          fmt::format("about {:.0f}% of the smaller text, also in {}", 100 * share, names[j]));
    }
    hashes += inputs[i].corpus.tokens_sha256 + "\n";
    if (inputs[i].position_span != common_span) common_span = 0;
    add_held_back(held_back, held_back_part(inputs[i]));
  }
  Bundle total = std::move(inputs.at(0));
  total.statistics_only = true;
  total.layers.clear();
  total.portable.clear();
  total.evaluation.reset();
  total.search = std::move(held_back);
  total.convergence = nullptr;
  total.run_key.clear();  // no run made this
  total.created_utc.clear();
  total.fitted_by.clear();
  for (auto& statistics : total.statistics) statistics.v_energy_moment = {};
  for (size_t i = 1; i < inputs.size(); ++i) {
    for (size_t layer = 0; layer < total.statistics.size(); ++layer) {
      add_statistics(total.statistics[layer], inputs[i].statistics[layer]);
    }
    append_corpus(total.corpus, inputs[i].corpus);
    if (total.weight_samples.empty()) total.weight_samples = inputs[i].weight_samples;
    const bool known = !total.fingerprint.empty() && !inputs[i].fingerprint.empty();
    total.fingerprint =
        known ? merged(total.fingerprint, inputs[i].fingerprint) : NgramFingerprint{};
  }
  total.position_span = common_span;
  if (!is_weighted(total)) total.collected.reset();
  total.row_weights = used_row_weights(
      total.statistics, {.row_weights = RowWeights::kAttention, .position_span = kAnySpan});
  total.corpus.tokens_sha256 = sha256_of(hashes);
  return total;
}

}  // namespace oscar
