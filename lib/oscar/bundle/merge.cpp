// Merging is addition; the work is in refusing what must not be added.
#include "oscar/bundle/merge.h"

#include <algorithm>
#include <array>
#include <map>

#include "oscar/base/add_counts.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/schema.h"

namespace oscar {
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
      throw Error({.what = "the same corpus would be counted twice",
                   .where = file + ": " + what,
                   .found = "also in " + place->second + ", sha256 " + hash,
                   .hint = "leave one file out, or pass --force to count it twice"});
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
  total.chunk_len = std::max(total.chunk_len, other.chunk_len);
  const auto join = [](std::string& text, const std::string& more) {
    if (text != more) text += "; " + more;
  };
  join(total.bos_eos_policy, other.bos_eos_policy);
  join(total.chat_template, other.chat_template);
}

}  // namespace

void require_statistics(const Bundle& bundle, const std::string& name) {
  if (!bundle.statistics.empty()) return;
  throw Error({.what = "file holds no statistics",
               .where = name,
               .hint = "it was written with --no-statistics or stripped"});
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
    throw Error({.what = "statistics of different models cannot be put together",
                 .where = other_name + ": /model attribute " + attribute,
                 .expected = value + " (" + name + ")",
                 .found = b.values[attribute]});
  }
}

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

Bundle merge_statistics(std::vector<Bundle> inputs, const std::vector<std::string>& names,
                        bool allow_repeats) {
  CorpusLedger ledger(allow_repeats);
  std::string hashes;
  Json held_back;
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_statistics(inputs[i], names[i]);
    require_same_model(inputs[0], inputs[i], names[0], names[i]);
    ledger.add(inputs[i].corpus, names[i]);
    hashes += inputs[i].corpus.tokens_sha256 + "\n";
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
  total.corpus.tokens_sha256 = sha256_of(hashes);
  return total;
}

}  // namespace oscar
