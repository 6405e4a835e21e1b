// Three checks against fixed limits; the verdict is the worst that was measured.
#include "oscar/eval/report/verdict.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>

#include "oscar/bundle/match.h"
#include "oscar/eval/report/figures.h"
#include "oscar/text/repeats.h"

namespace oscar {
namespace {

// Conventions of this page, printed on it beside the figures. They are no standard.
constexpr double kPerplexityClose = 0.02, kPerplexityCare = 0.05;  // relative increase
constexpr double kTop1Close = 0.95, kTop1Care = 0.90;
constexpr double kNeedlesClose = 0.02, kNeedlesCare = 0.10;  // share of prompts lost
constexpr double kNeedlesInformative = 0.5;                  // BF16 passes at least this share
constexpr double kNeedlesEnough = 100;                       // prompts
constexpr double kSignificance = 0.05;

Standing stand(double loss, double close, double care) {
  return loss <= close ? Standing::kClose : loss <= care ? Standing::kCare : Standing::kLost;
}

Check perplexity_check(const MethodFigures& reference, const MethodFigures& m) {
  const auto ratio = [](const Figure& nats) { return nats ? Figure(std::expm1(*nats)) : Figure(); };
  const Figure mean = ratio(m.nll_increase.mean), low = ratio(m.nll_increase.low),
               high = ratio(m.nll_increase.high);
  const std::string increase = signed_percent(mean, low, high);  // one resampling unit: the mean
  Check check{.what = "Perplexity",
              .measured = fmt::format("{} → {} ({})", figure(reference.perplexity.mean),
                                      figure(m.perplexity.mean), increase),
              .limits = "increase up to 2%; with care up to 5%"};
  if (!is_finite(mean)) {
    check.standing = m.has_text ? Standing::kLost : Standing::kUnknown;
    return check;
  }
  check.standing = stand(*mean, kPerplexityClose, kPerplexityCare);
  if (is_finite(high) && stand(*high, kPerplexityClose, kPerplexityCare) != check.standing) {
    check.note = "The interval reaches over the limit: more tokens would decide.";
  }
  return check;
}

Check top1_check(const MethodFigures& m) {
  Check check{.what = "Same most likely token",
              .measured = fmt::format("{} [{}, {}]", percent(m.top1.mean), percent(m.top1.low),
                                      percent(m.top1.high)),
              .limits = "at least 95%; with care 90%"};
  if (!m.top1.low) check.measured = percent(m.top1.mean);
  if (!is_finite(m.top1.mean)) {
    check.standing = m.has_text ? Standing::kLost : Standing::kUnknown;
    return check;
  }
  check.standing = stand(1 - *m.top1.mean, 1 - kTop1Close, 1 - kTop1Care);
  if (is_finite(m.top1.low) &&
      stand(1 - *m.top1.low, 1 - kTop1Close, 1 - kTop1Care) != check.standing) {
    check.note = "The interval reaches over the limit: more tokens would decide.";
  }
  return check;
}

Check needle_check(const NeedleRate& reference, const NeedleFigures& needles) {
  const NeedleRate& rate = needles.all;
  const auto words = [](const NeedleRate& r) {
    return fmt::format("{} [{}, {}]", percent(r.rate, 0), percent(r.low, 0), percent(r.high, 0));
  };
  Check check{.what = "Needle tasks",
              .measured = fmt::format("{}, BF16 {}, {} prompts", words(rate), words(reference),
                                      count(rate.prompts)),
              .limits = "up to 2 points lost; with care 10"};
  if (!is_finite(rate.rate) || !is_finite(reference.rate)) return check;
  if (*reference.rate < kNeedlesInformative) {
    check.note = "BF16 itself fails most of these prompts: they say little about the cache.";
    return check;
  }
  check.standing = stand(*reference.rate - *rate.rate, kNeedlesClose, kNeedlesCare);
  const bool chance = is_finite(needles.mcnemar_p) && *needles.mcnemar_p >= kSignificance;
  if (check.standing != Standing::kClose && chance) {
    check.standing = Standing::kCare;
    check.note =
        fmt::format("The loss may be chance (McNemar p = {}).", figure(needles.mcnemar_p, 2));
  } else if (rate.prompts < kNeedlesEnough) {
    check.note = "Few prompts: a loss of several points would not show.";
    if (check.standing == Standing::kClose) check.standing = Standing::kCare;
  }
  return check;
}

// The text checks once more, on text with separators inside the history.
void add_separated(const ReportData& data, const MethodFigures& m, Verdict& verdict) {
  const auto named = [&](const std::string& name) -> const MethodFigures* {
    for (const MethodFigures& other : data.separated) {
      if (other.name == name) return &other;
    }
    return nullptr;
  };
  const MethodFigures *reference = named("bf16"), *judged = named(m.name);
  if (!reference || !judged || !judged->has_text) return;
  for (Check check : {perplexity_check(*reference, *judged), top1_check(*judged)}) {
    check.what += ", with separators";
    verdict.checks.push_back(std::move(check));
  }
  std::string text = fmt::format(
      "With a token that ends documents or turns as every {} token, KL divergence is {}",
      ordinal(static_cast<int64_t>(data.separator_gap.value_or(0))),
      with_interval(judged->kl.mean, judged->kl.low, judged->kl.high));
  if (is_finite(judged->kl.mean) && is_finite(m.kl.mean) && *m.kl.mean > 0) {
    text += fmt::format(", {} what it is without", times(*judged->kl.mean / *m.kl.mean));
  }
  verdict.sentences.push_back(text + ".");
}

std::string as_sentence(std::string text) {
  if (text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text + ".";
}

// What keeps the figures of the judged method from being taken at their word.
void add_cautions(const ReportData& data, const MethodFigures& m, Verdict& verdict) {
  for (const Caution& caution : data.cautions) {
    if (!caution.method.empty() && caution.method != m.name) continue;
    if (caution.kind == "portable") {
      verdict.sentences.push_back(as_sentence(caution.sentence));
      continue;
    }
    struct Words {
      const char *kind, *what, *limits;
    };
    constexpr Words kWords[] = {
        {"shared-text", "Text shared with calibration", "at most 1%"},
        {"little-text", "Calibration text",
         "the choice of text costs at most 2% of predicted loss"},
        {"few-tokens", "Evaluation text", "at least 8 sequences or 4,096 tokens"},
        {"repeated-text", "Copies", "at most 20%"},
        {"predicts-nothing", "Model",
         "perplexity below the size of the vocabulary, and not alike on all text"},
        {"other-cache", "Cache", "the one that is served"}};
    static_assert(kNotableRepeats == 0.2);
    static_assert(kFewestUnits == 8 && kFewestUnits * kUnitTokens == 4096);  // as said there
    const Words* const words =
        std::ranges::find_if(kWords, [&](const Words& w) { return caution.kind == w.kind; });
    if (words == std::end(kWords)) continue;
    verdict.checks.push_back({.what = words->what,
                              .measured = caution.measured,
                              .limits = words->limits,
                              .standing = Standing::kCare,
                              .note = as_sentence(caution.sentence),
                              .is_caution = true});
  }
}

std::string subject(const MethodFigures& m) {
  return m.name == "bundle" ? "this bundle" : fmt::format("the method “{}”", m.name);
}

std::string headline(const MethodFigures& m, Standing standing) {
  switch (standing) {
    case Standing::kClose:
      return fmt::format("With {}, a 2-bit cache stays close to BF16.", subject(m));
    case Standing::kCare:
      return fmt::format("With {}, a 2-bit cache is usable with care.", subject(m));
    case Standing::kLost:
      return fmt::format("With {}, a 2-bit cache loses too much to be used.", subject(m));
    case Standing::kUnknown:
      break;
  }
  return fmt::format("Nothing here decides whether a 2-bit cache is usable with {}.", subject(m));
}

// The paired bootstrap's interval of the difference of two KL, where the report has it.
const Span95* paired_interval(const MethodFigures& a, const MethodFigures& b) {
  const MethodFigures* const pair = a.against == b.name ? &a : b.against == a.name ? &b : nullptr;
  const bool known =
      pair && is_finite(pair->kl_difference.low) && is_finite(pair->kl_difference.high);
  return known ? &pair->kl_difference : nullptr;
}

bool has_interval(const MethodFigures& a, const MethodFigures& b) {
  return paired_interval(a, b) || (is_finite(a.kl.low) && is_finite(b.kl.low));
}

// True when the 95% interval of a's KL minus b's excludes zero; from the paired bootstrap where the
// report has it, else from the two intervals. Precondition: has_interval(a, b).
bool apart(const MethodFigures& a, const MethodFigures& b) {
  if (const Span95* const difference = paired_interval(a, b)) {
    return *difference->low > 0 || *difference->high < 0;
  }
  return *a.kl.low > *b.kl.high || *b.kl.low > *a.kl.high;
}

// "published OSCAR 0.101 (11 times as much)", or why no ratio is quoted.
std::string beside(const char* name, const MethodFigures& m, const MethodFigures& other) {
  std::string text = fmt::format("{} has {}", name, figure(other.kl.mean));
  if (!is_finite(m.kl.mean) || !is_finite(other.kl.mean)) return text;
  if (!has_interval(m, other)) return text + " (too few tokens to tell them apart)";
  if (!apart(m, other)) return text + " (not distinguishable: the intervals overlap)";
  const bool quotable = m.above_floor.value_or(true) && other.above_floor.value_or(true) &&
                        *m.kl.mean > 0 && *other.kl.mean > 0;
  if (!quotable) return text;
  const double ratio = *other.kl.mean / *m.kl.mean;
  return text + (ratio >= 1 ? fmt::format(" ({} as much)", times(ratio))
                            : fmt::format(" ({} less)", times(1 / ratio)));
}

std::string fp8_beside(const ReportData& data, const MethodFigures& m) {
  const MethodFigures* const fp8 = data.find("fp8");
  return fp8 && fp8->has_text ? beside("an FP8 cache without scales", m, *fp8) : "";
}

std::string divergence_sentence(const ReportData& data, const MethodFigures& m) {
  std::string text = fmt::format("KL divergence from BF16 is {} nats per token",
                                 with_interval(m.kl.mean, m.kl.low, m.kl.high));
  const MethodFigures* const naive = data.find("identity");
  const MethodFigures* const published = published_method(data);
  std::string others;
  if (published) others += beside("published OSCAR", m, *published);
  if (naive && naive != &m && naive->has_text) {
    others += (others.empty() ? "" : "; ") + beside("INT2 without rotation", m, *naive);
  }
  if (const std::string fp8 = fp8_beside(data, m); !fp8.empty()) {
    others += (others.empty() ? "" : "; ") + fp8;
  }
  if (!others.empty()) text += ": " + others;
  text += '.';
  if (m.above_floor && !*m.above_floor) {
    text += " That is within five times of what the arithmetic alone costs.";
  }
  return text;
}

std::string memory_sentence(const ReportData& data, const MethodFigures& m) {
  constexpr double kShort = 8192;
  const double length = model_length(data);
  const Figure bits = m.bits_at(length), bits_short = m.bits_at(kShort);
  if (!is_finite(bits) || !(*bits > 0)) return "";
  std::string text = fmt::format(
      "At {} tokens{} the cache{} takes {} bits per value, BF16 windows included: {} less memory "
      "than BF16",
      token_length(length), is_finite(data.max_positions) ? ", all that the model serves," : "",
      data.local_bytes(1) > 0 ? " of the layers that attend to all tokens" : "", figure(bits),
      times(16 / *bits));
  if (is_finite(data.elements_per_token)) {
    text += fmt::format(" ({} bytes per token instead of {})",
                        count(*data.elements_per_token * *bits / 8),
                        count(*data.elements_per_token * 2));
  }
  if (length > kShort && is_finite(bits_short) && *bits_short > 0) {
    text += fmt::format("; at 8K tokens {}", times(16 / *bits_short));
  }
  return text + ".";
}

std::vector<std::string> gaps(const ReportData& data, const MethodFigures* m) {
  std::vector<std::string> list;
  if (!data.has_text) list.emplace_back("Perplexity, KL divergence and agreement (--tasks ppl).");
  if (!data.has_needles) {
    list.emplace_back("Retrieval from long prompts (--tasks niah).");
  } else if (m && m->needles && !m->needles->generated) {
    list.emplace_back(
        "Free generation: needle answers were fed in, not generated (--needle-generate).");
  }
  if (data.has_text && data.separated.empty()) {
    list.emplace_back("Packed documents and turns: separators in the history (--separators).");
  }
  if (m && m->has_text && !published_method(data) && !m->name.starts_with("oscar")) {
    list.emplace_back(
        "Published OSCAR on the same text (--compare oscar, with a bundle that has statistics).");
  }
  if (m && m->has_text && !data.find("identity")) {
    list.emplace_back("INT2 without rotation on the same text (--compare identity).");
  }
  if (data.has_text && !is_finite(data.kl_floor)) {
    list.emplace_back("What the arithmetic alone costs (--compare exact).");
  }
  double longest = data.longest.value_or(0);
  for (const double length : data.needle_lengths) longest = std::max(longest, length);
  const double reached = longest + data.position_offset.value_or(0);
  if (is_finite(data.max_positions) && reached < *data.max_positions) {
    list.push_back(fmt::format("Positions beyond {}, of {} that the model serves.", count(reached),
                               count(data.max_positions)));
  }
  list.emplace_back("Speed, and downstream tasks such as reasoning, code or tool calls.");
  return list;
}

}  // namespace

const MethodFigures* judged_method(const ReportData& data) {
  if (const MethodFigures* const bundle = data.find("bundle")) return bundle;
  const MethodFigures* last = nullptr;
  for (const MethodFigures& m : data.methods) {
    if (std::ranges::count(data.named_bundles, m.name) > 0) return &m;
    if (!m.variant && !m.reference && !m.exact && !m.rival) last = &m;
  }
  return last;
}

const MethodFigures* published_method(const ReportData& data) {
  const MethodFigures* best = nullptr;
  const MethodFigures* const judged = judged_method(data);
  for (const char* name : {"oscar", "oscar-perhead", "oscar-released"}) {
    const MethodFigures* const m = data.find(name);
    if (!m || m == judged || !m->has_text) continue;
    const bool better = !best || !is_finite(best->kl.mean) ||
                        (is_finite(m->kl.mean) && *m->kl.mean < *best->kl.mean);
    if (better) best = m;
  }
  return best;
}

Verdict judge(const ReportData& data) {
  Verdict verdict;
  verdict.judged = judged_method(data);
  verdict.not_measured = gaps(data, verdict.judged);
  if (!verdict.judged) {
    verdict.headline = "No method at 2 bits was compared, so there is nothing to judge.";
    return verdict;
  }
  if (data.quantized_layers == 0.0) {
    verdict.judged = nullptr;
    verdict.headline = as_sentence(kNothingQuantized);
    return verdict;
  }
  const MethodFigures& m = *verdict.judged;
  const MethodFigures* const reference = data.find("bf16");
  if (m.has_text && reference) {
    verdict.checks.push_back(perplexity_check(*reference, m));
    verdict.checks.push_back(top1_check(m));
    verdict.sentences.push_back(divergence_sentence(data, m));
    if (const std::string fp8 = fp8_beside(data, m); !fp8.empty()) {
      verdict.beside_fp8 = fmt::format("KL is {}; {}", figure(m.kl.mean), fp8);
    }
    add_separated(data, m, verdict);
  }
  if (m.needles && reference && reference->needles) {
    verdict.checks.push_back(needle_check(reference->needles->all, *m.needles));
  }
  add_cautions(data, m, verdict);
  for (const Check& check : verdict.checks) {
    if (check.standing == Standing::kUnknown) continue;
    const bool first = verdict.standing == Standing::kUnknown;
    verdict.standing = first ? check.standing : std::max(verdict.standing, check.standing);
  }
  verdict.headline = headline(m, verdict.standing);
  if (const std::string memory = memory_sentence(data, m); !memory.empty()) {
    verdict.sentences.push_back(memory);
  }
  return verdict;
}

}  // namespace oscar
