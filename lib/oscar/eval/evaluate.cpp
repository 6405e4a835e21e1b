// An evaluation: its options, its parts in order, and what caches hold in it.
#include "oscar/eval/evaluate.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/coverage.h"
#include "oscar/bundle/match.h"
#include "oscar/bundle/measured.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/evaluation_cost.h"
#include "oscar/eval/layer_errors.h"
#include "oscar/eval/needles.h"
#include "oscar/eval/report/report_data.h"
#include "oscar/eval/report/verdict.h"
#include "oscar/eval/report_json.h"
#include "oscar/eval/session.h"
#include "oscar/eval/text_task.h"
#include "oscar/model/checkpoint/text.h"
#include "oscar/text/packing.h"
#include "oscar/text/repeats.h"

namespace oscar {

// The order of an evaluation: open, plan, measure batch by batch, assemble the report.

namespace {

// Of the passes that look at rows by class and at layers one by one.
constexpr int64_t kDeviceFirstTokens = 16384;

// Most tokens that a sequence can hold without a coded row: rows leave the recent window by whole
// blocks.
int64_t exact_tokens(const CacheView& view) {
  return view.sink + view.recent + view.demote_block - 1;
}

int64_t first_measured(const EvaluateOptions& options, int64_t sequence_length,
                       const std::vector<Method>& methods) {
  int64_t windows = 1;
  for (const Method& m : methods) windows = std::max(windows, exact_tokens(m.view));
  int64_t first = std::max<int64_t>(1, options.first_position.value_or(windows));
  if (options.stride > 0) first = std::max(first, sequence_length - options.stride);
  return first;
}

// The text once more, with the checkpoint's own separators inside the history: rows that draw much
// attention, and that calibration text may hardly have.
struct SeparatedText {
  std::vector<int32_t> separators = {};  // token ids
  std::vector<std::vector<int32_t>> sequences = {};
  TextTask task = {};
};

// Throws UsageError where some method would read exact rows alone, and agree with BF16.
void require_coded_rows(const std::vector<Method>& methods, const std::string& what, int64_t tokens,
                        const std::string& hint) {
  for (const Method& m : methods) {
    const int64_t exact = exact_tokens(m.view);
    if (m.reference || m.codec_off || tokens > exact) continue;
    throw UsageError({.what = "no token that counts would read a coded row",
                      .where = fmt::format("{}, method {}", what, m.name),
                      .expected = fmt::format("more than {} tokens: so many stay exact", exact),
                      .found = fmt::format("{} tokens", tokens),
                      .hint = hint});
  }
}

NeedleBook needle_book() { return read_needle_book(find_data("needle")); }

// Throws UsageError for words of options that nothing knows, before anything is opened.
void check_words(const EvaluateOptions& options) {
  text_view(options, 0);
  const std::vector<std::string>& kinds = options.needle_plan.kinds;
  if (!kinds.empty()) require_kinds(needle_book(), kinds);
}

// What a run will measure, opened and planned before anything is measured.
struct Work {
  Work(const EvaluateOptions& options, const Ranks& ranks, Progress& progress)
      : session(open_session(options, ranks, progress)),
        model(session.checkpoint, session.compute),
        methods(build_methods(options, session, text_view(options, 0), progress)),
        first(first_measured(options, session.corpus.record.sequence_length, methods)) {
    const CacheView view = text_view(options, first);
    for (Method& method : methods) method.view.prompt = view.prompt;
  }

  Session session;
  Transformer model;  // of session.checkpoint
  std::vector<Method> methods;
  int64_t first;  // predicted token that counts
  std::optional<TextTask> text;
  std::optional<SeparatedText> separated;
  NeedleResults needles;  // prompts alone
};

// The prompts. Throws Error where they are not possible.
NeedleResults plan_needles(const EvaluateOptions& options, const Session& session) {
  std::vector<int32_t> haystack;
  for (const auto& sequence : session.corpus.sequences) {
    const bool overlaps = options.stride > 0 && !haystack.empty();
    haystack.insert(haystack.end(), overlaps ? sequence.end() - options.stride : sequence.begin(),
                    sequence.end());
  }
  NeedleResults results;
  const ChatTemplate& chat_template = session.checkpoint.chat_template;
  results.chat_template = chat_template.name();
  std::optional<ChatFrame> chat;
  if (!chat_template.empty()) chat = make_chat_frame(chat_template);
  results.prompts = make_needle_prompts(needle_book(), options.needle_plan,
                                        {&*session.tokenizer, &haystack, std::move(chat)});
  const int64_t served = session.checkpoint.config.rope.max_positions;
  for (const NeedlePrompt& prompt : results.prompts) {
    const auto answer = static_cast<int64_t>(prompt.answer.size());
    require_served(served, options.position_offset, prompt.length + answer, "--needle-lengths");
  }
  return results;
}

void plan_tasks(const EvaluateOptions& options, Work& work, Progress& progress) {
  const Session& session = work.session;
  if (options.needles) {
    for (const int64_t length : options.needle_plan.lengths) {
      require_coded_rows(work.methods, "needle prompts", length, "--needle-lengths");
    }
    work.needles = plan_needles(options, session);
  }
  if (!options.perplexity) return;
  work.text = plan_text(session.corpus.sequences, work.first, session.compute.device);
  // The last token is predicted by the one before it.
  require_coded_rows(work.methods, "the longest sequence, without its last token",
                     work.text->longest - 1, "--sequence-length");
  if (options.separators == 0) return;
  SeparatedText separated{.separators = separator_tokens(session.checkpoint)};
  if (separated.separators.empty()) {
    progress.note("no token that ends documents or turns is known: nothing is measured with one");
    return;
  }
  separated.sequences =
      with_separators(session.corpus.sequences, separated.separators, options.separators);
  separated.task = plan_text(separated.sequences, work.first, session.compute.device);
  work.separated = std::move(separated);
}

// What has been counted when a run begins or goes on, in all of its processes.
struct Counted {
  size_t text = 0, separated = 0;    // batches
  size_t forced = 0, generated = 0;  // prompts, answers

  Json json() const { return {text, separated, forced, generated}; }
  static Counted from(const Json& json) { return {json.at(0), json.at(1), json.at(2), json.at(3)}; }
};

Counted counted_by(const EvaluationState& state, const Work& work) {
  Counted counted;
  if (work.text) counted.text = batches_done(*work.text, state.text);
  if (work.separated) counted.separated = batches_done(work.separated->task, state.separated);
  if (!state.forced.empty()) counted.forced = state.forced[0].size();
  counted.generated = state.generated.size();
  return counted;
}

void measure_needles(const EvaluateOptions& options, Work& work, Ranks& ranks, const Counted& done,
                     EvaluationState& state, const std::function<void()>& counted,
                     Progress& progress) {
  const Session& session = work.session;
  const std::vector<NeedlePrompt>& prompts = work.needles.prompts;
  int64_t tokens = 0;
  EvaluationSize size{.batch_tokens = largest_needle_batch(work.model, prompts),
                      .methods = work.methods.size(),
                      .all_weights = options.generate_needles};
  if (size.all_weights) size.sequences = most_needles_together(work.model, prompts);
  for (size_t i = 0; i < prompts.size(); ++i) {
    tokens += prompts[i].length;
    size.longest_sequence = std::max(size.longest_sequence, prompts[i].length);
  }
  // Each batch passes alone, if it fits.
  plan_hidden_room(evaluation_needs(work.model, size), session.memory, session.compute.device);
  hold_device_memory(session.memory, session.compute.device);
  progress.begin("needles",
                 needle_tokens(work.model, prompts, done.forced) * work.model.config().num_layers,
                 "token-layers");
  run_needles_forced(work.model, work.methods, session.engine, prompts, options.position_offset,
                     ranks, done.forced, state.forced, counted, progress);
  progress.end();
  if (!options.generate_needles) return;
  progress.begin("generation", tokens * static_cast<int64_t>(work.methods.size()), "tokens");
  run_needles_generated(work.model, work.methods, session.engine, prompts, options.position_offset,
                        ranks, done.generated, state.generated, counted, progress);
  progress.end();
}

// What passes over few rows find, anew when a run is resumed.
struct RowFindings {
  std::optional<KeyRow> key_row;
  Json classes;  // of the separated text; null when not measured
  std::vector<LayerErrorSums> text_errors, separated_errors;
};

// Of the longest sequence, so that there are 2-bit rows if any has them.
std::optional<KeyRow> find_key_row(const EvaluateOptions& options, Work& work) {
  const auto& sequences = work.session.corpus.sequences;
  if (sequences.empty()) return std::nullopt;
  const auto longest = std::ranges::max_element(sequences, {}, &std::vector<int32_t>::size);
  return measure_key_row(work.model, work.methods, *longest, options.position_offset);
}

torch::Tensor first_sequences(const std::vector<std::vector<int32_t>>& sequences,
                              const Session& session) {
  return make_batches(sequences, session.compute.device.is_cuda() ? kDeviceFirstTokens : 0).front();
}

// Continues `state` from `done` to the end. The rows are the first process' alone.
void measure(const EvaluateOptions& options, Work& work, Ranks& ranks, const Counted& done,
             EvaluationState& state, RowFindings& rows, const std::function<void()>& counted,
             Progress& progress) {
  const auto layer_errors = [&](const torch::Tensor& ids) {
    return options.layer_errors
               ? measure_layer_errors(work.model, work.methods, ids, options.position_offset)
               : std::vector<LayerErrorSums>{};
  };
  if (ranks.first()) rows.key_row = find_key_row(options, work);
  if (work.text) {
    measure_text(options, work.session, work.model, work.methods, *work.text, "perplexity", ranks,
                 done.text, state.text, counted, progress);
    if (ranks.first()) {
      rows.text_errors = layer_errors(first_sequences(work.session.corpus.sequences, work.session));
    }
  }
  if (work.separated) {
    const SeparatedText& separated = *work.separated;
    measure_text(options, work.session, work.model, work.methods, separated.task, "with separators",
                 ranks, done.separated, state.separated, counted, progress);
    if (ranks.first()) {
      const torch::Tensor ids = first_sequences(separated.sequences, work.session);
      rows.classes =
          row_classes_json(measure_row_classes(work.model, work.methods, ids, separated.separators,
                                               options.position_offset),
                           work.methods);
      rows.separated_errors = layer_errors(ids);
    }
  }
  if (options.needles) measure_needles(options, work, ranks, done, state, counted, progress);
}

// What of each task a stopped run has counted.
Json counted_part(const EvaluateOptions& options, const Work& work, const EvaluationState& state) {
  Json part = Json::object();
  const auto add = [&](const char* name, const char* unit, int64_t counted, int64_t of) {
    part[name] = {{unit, counted}, {"of", of}};
  };
  if (work.text) add("text", "tokens", counted_tokens(state.text), work.text->tokens);
  if (work.separated) {
    add("separators", "tokens", counted_tokens(state.separated), work.separated->task.tokens);
  }
  if (options.needles) {
    const auto prompts = static_cast<int64_t>(work.needles.prompts.size());
    const auto methods = static_cast<int64_t>(work.methods.size());
    const size_t forced = state.forced.empty() ? 0 : state.forced[0].size();
    add("needles", "prompts", static_cast<int64_t>(forced), prompts);
    if (options.generate_needles) {
      add("generated", "answers", static_cast<int64_t>(state.generated.size()), prompts * methods);
    }
  }
  return part;
}

// What the report is about (verdict.h): its row among `methods`.
std::optional<size_t> judged_method(const Json& report, const std::vector<Method>& methods) {
  const ReportData data = read_report(report);
  const MethodFigures* const judged = judged_method(data);
  if (!judged) return {};
  const auto found = std::ranges::find(methods, judged->name, &Method::name);
  return static_cast<size_t>(found - methods.begin());
}

// Adds what has been counted to `report`; whether there was anything. Parts with too little to say
// anything, and answers that not every method has generated, stay out.
bool add_figures(const EvaluateOptions& options, const Work& work, const EvaluationState& state,
                 const RowFindings& rows, Json& report) {
  bool any = false;
  const std::optional<size_t> judged = judged_method(report, work.methods);
  // Windows that advance by --stride repeat each other.
  const double copies =
      work.text && options.stride == 0
          ? repeated_share(counted_sequences(work.session.corpus.sequences, work.first))
          : 0;
  const auto add_text = [&](const TextTask& task, const TextState& counted,
                            const std::vector<LayerErrorSums>& errors, Json& to) {
    if (counted_tokens(counted) < kFewestTokens) return false;
    TextResults results = text_results(task, counted);
    results.one_text = options.stride > 0;
    results.repeated_share = copies;
    add_text_results(results, work.methods, judged, options.seed, to);
    if (options.keep_units) add_unit_results(results, work.methods, to);
    if (!errors.empty()) add_layer_errors(errors, work.methods, to);
    return any = true;
  };
  if (work.text) add_text(*work.text, state.text, rows.text_errors, report);
  if (work.separated) {
    Json separated = {{"gap", options.separators}, {"token_ids", work.separated->separators}};
    if (add_text(work.separated->task, state.separated, rows.separated_errors, separated)) {
      if (!rows.classes.is_null()) separated["rows"] = rows.classes;
      report["separators"] = std::move(separated);
    }
  }
  if (!state.forced.empty() && !state.forced[0].empty()) {
    NeedleResults needles = work.needles;
    needles.prompts.resize(state.forced[0].size());
    needles.forced = state.forced;
    const size_t prompts = work.needles.prompts.size();
    if (options.generate_needles && state.generated.size() == prompts * work.methods.size()) {
      for (size_t m = 0; m < work.methods.size(); ++m) {
        const auto begin = state.generated.begin() + static_cast<std::ptrdiff_t>(m * prompts);
        needles.generated.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(prompts));
      }
    }
    add_needle_results(needles, work.methods, report);
    any = true;
  }
  if (any && rows.key_row) {
    add_key_row(*rows.key_row, work.methods, options.position_offset, report);
  }
  return any;
}

// sha256 over everything that decides the figures. Paths, memory limits and which GPU of a machine
// it is are no part of it.
std::string run_key(const EvaluateOptions& options, const Work& work) {
  const NeedlePlan& plan = options.needle_plan;
  const ComputeOptions& compute = work.session.compute;
  Json identity = describe_session(options, work.session);
  identity.erase("command");
  identity["device"] = describe({compute.device.type(), compute.dtype});
  describe_methods(work.methods, identity);
  identity["tasks"] = {options.perplexity, options.needles, options.generate_needles};
  identity["first"] = work.first;
  identity["separators"] = work.separated ? options.separators : 0;
  identity["plan"] = {plan.kinds, plan.lengths, plan.depths, plan.prompts, plan.seed};
  return sha256_of(identity.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// The same with what a report holds of it.
std::string report_key(const EvaluateOptions& options, const std::string& run_key) {
  return sha256_of(Json{run_key, options.keep_units, options.layer_errors}.dump());
}

bool is_finished(const Json& report, const std::string& key) {
  return !report.contains("partial") && report.value("run_key", Json()) == key;
}

// What other_cache compares of a run.
Json cache_of_run(const EvaluateOptions& options, const Work& work) {
  Json run = {{"quantizer", format_json(work.session.quantizer)},
              {"mode", options.mode},
              {"position_offset", options.position_offset}};
  if (options.perplexity) run["first_position"] = work.first;
  return run;
}

// What is stored in a bundle counts as measured of what it serves.
void check_write_back(const EvaluateOptions& options, const Work& work) {
  if (!options.write_back || !work.session.bundle) return;
  const auto measures = [](const Method& method) { return method.name == "bundle"; };
  if (std::ranges::none_of(work.methods, measures)) {
    throw UsageError({.what = "the evaluation would not measure the bundle",
                      .where = "--write-back",
                      .expected = "bundle among --compare, not only variants of it"});
  }
  if (auto gap = other_cache(work.session.bundle->quantizer, cache_of_run(options, work))) {
    gap->where = "--write-back";
    gap->hint += ", or leave --write-back away";
    throw Error(*std::move(gap));
  }
}

Bundle describe_run(const EvaluateOptions& options, const Work& work) {
  Bundle run;
  run.model = describe_model(work.session.checkpoint, false);
  run.corpus = work.session.corpus.record;
  run.quantizer = work.session.quantizer;
  run.run_key = run_key(options, work);
  return run;
}

Json describe(const EvaluateOptions& options, const Work& work) {
  const Session& session = work.session;
  Json report = describe_session(options, session);
  const auto overlap = [&](const Bundle& bundle) {
    const Json found = overlap_json(bundle.fingerprint, session.corpus.sequences,
                                    options.needles ? 0 : work.first);
    return found["known"] ? found : same_files_json(bundle.corpus, session.corpus.record);
  };
  const auto add_texts = [&](const Bundle& bundle, Json& entry) {
    entry["overlap"] = overlap(bundle);
    if (const auto gap = other_cache(bundle.quantizer, cache_of_run(options, work))) {
      entry["other_cache"] = fmt::format("{}: {}, not {}", gap->what, gap->found, gap->expected);
    }
    entry["convergence"] = bundle.convergence;
    for (const char* table : {"layers", "splits"}) {
      if (entry["convergence"].is_object()) entry["convergence"].erase(table);
    }
  };
  if (session.bundle) add_texts(*session.bundle, report["bundle"]);
  for (const NamedBundle& named : session.named) {
    add_texts(named.bundle, report["bundles"][named.name]);
  }
  describe_methods(work.methods, report);
  return report;
}

std::string stopped_without_figures(const EvaluateOptions& options, bool saved) {
  if (!saved) return "stopped on request, before anything was counted";
  return fmt::format(
      "stopped on request, before enough was counted to report.\n  What was counted is in {};\n"
      "  repeat the command with --resume to continue",
      options.checkpoint.string());
}

// What the other processes do: they measure for the first.
void measure_for_first(const EvaluateOptions& options, Work& work, const std::string& run_key,
                       Ranks& ranks, Progress& progress) {
  const Json start = ranks.agree(run_key, {});
  if (start.is_null()) return;
  EvaluationState state;
  RowFindings rows;
  measure(
      options, work, ranks, Counted::from(start), state, rows, [] {}, progress);
  ranks.wait_until_taken();
  ranks.done();
}

// The report that is there already, of which the others are told.
Json finished_report(const EvaluateOptions& options, const std::string& report_key,
                     const std::string& run_key, Ranks& ranks) {
  if (!is_finished(*options.finished, report_key)) {
    throw Error({.what = "the report exists already and is of another run",
                 .where = std::filesystem::path(options.checkpoint).replace_extension().string(),
                 .hint = "choose another name, or replace it with --force"});
  }
  ranks.agree(run_key, nullptr);
  ranks.wait_until_taken();
  return *options.finished;
}

// What the run begins with: with --resume what the checkpoint has counted, if there is one.
EvaluationState first_state(const EvaluateOptions& options, const Work& work,
                            const EvaluationCheckpoint& checkpoint, Progress& progress) {
  if (!options.resume) return {};
  const ModelConfig& config = work.model.config();
  auto saved = checkpoint.load({.methods = work.methods.size(),
                                .layers = static_cast<size_t>(config.num_layers),
                                .heads = static_cast<size_t>(config.num_kv_heads)});
  if (!saved) progress.note("no checkpoint at " + options.checkpoint.string() + ": starting anew");
  return std::move(saved).value_or(EvaluationState{});
}

// Of a run that was asked to stop. Throws Interrupted where nothing can be reported yet.
Json partial_report(const EvaluateOptions& options, const Work& work, const EvaluationState& state,
                    const RowFindings& rows, bool saved, Json report) {
  report["partial"] = counted_part(options, work, state);
  if (!add_figures(options, work, state, rows, report)) {
    throw Interrupted(stopped_without_figures(options, saved));
  }
  return report;
}

}  // namespace

Json evaluate(const EvaluateOptions& options, Ranks& ranks, Progress& progress) {
  check_words(options);
  std::optional<AtomicFile> written_back;  // opened before the bundle that it replaces is read
  if (ranks.first() && options.write_back && !options.bundle.empty()) {
    written_back.emplace(options.bundle, Replace::kIfUnchanged);
  }
  Work work(options, ranks, progress);
  check_write_back(options, work);
  plan_tasks(options, work, progress);
  const Bundle run = describe_run(options, work);
  const std::string key = report_key(options, run.run_key);
  if (!ranks.first()) {
    measure_for_first(options, work, run.run_key, ranks, progress);
    return nullptr;
  }
  if (options.finished) return finished_report(options, key, run.run_key, ranks);
  Json report = describe(options, work);
  report["run_key"] = key;
  EvaluationCheckpoint checkpoint(options.checkpoint, run);
  EvaluationState state = first_state(options, work, checkpoint, progress);
  RowFindings rows;
  const Counted done = counted_by(state, work);
  try {
    ranks.agree(run.run_key, done.json());
    measure(
        options, work, ranks, done, state, rows, [&] { checkpoint.save_if_due(state); }, progress);
  } catch (const Interrupted&) {
    const bool counted = counted_tokens(state.text) > 0 || !state.forced.empty();
    if (counted) checkpoint.save(state);
    if (!ranks.lost().empty()) throw;
    return partial_report(options, work, state, rows, counted && !options.checkpoint.empty(),
                          std::move(report));
  }
  add_figures(options, work, state, rows, report);
  const std::optional<Bundle>& bundle = work.session.bundle;
  if (bundle) {
    report["spectra"] = spectra_picture(*bundle);
    report["channels"] = channels_picture(*bundle);
  }
  work.session.weights.require_unchanged();
  if (written_back) {
    work.session.bundle->evaluation = report;
    write_bundle(*work.session.bundle, *written_back);
  }
  return report;
}

EvaluationCost estimate_evaluation(const EvaluateOptions& options, const Ranks& ranks,
                                   Progress& progress) {
  check_words(options);
  Work work(options, ranks, progress);
  check_write_back(options, work);
  plan_tasks(options, work, progress);
  std::vector<const TextTask*> texts;
  if (work.text) texts.push_back(&*work.text);
  if (work.separated) texts.push_back(&work.separated->task);
  return estimate_cost(options, work.session, work.model, work.methods, texts, work.needles.prompts,
                       ranks);
}

// Options before bundles, and all bundles alike.

namespace {

CacheFormat with_overrides(CacheFormat settings, const EvaluateOptions& options) {
  if (options.sink) settings.sink_tokens = *options.sink;
  if (options.recent) settings.recent_tokens = *options.recent;
  if (options.quant_group_size) settings.quant_group_size = *options.quant_group_size;
  if (options.demote_block) settings.demote_block = *options.demote_block;
  if (options.metadata_dtype) settings.metadata_dtype = *options.metadata_dtype;
  return settings;
}

}  // namespace

Json format_json(const CacheFormat& settings) {
  return {{"bits", settings.bits},
          {"sink", settings.sink_tokens},
          {"recent", settings.recent_tokens},
          {"quant_group_size", settings.quant_group_size},
          {"metadata_dtype", codec_word(settings.metadata_dtype)},
          {"demote_block", settings.demote_block},
          {"clip_span", codec_word(settings.rules.clip_span)},
          {"zero", codec_word(settings.rules.zero)},
          {"ties", codec_word(settings.rules.ties)},
          {"metadata_rounding", codec_word(settings.rules.metadata_rounding)}};
}

CacheFormat common_format(const EvaluateOptions& options, int head_dim, const Bundle* bundle,
                          std::span<const NamedBundle> named) {
  CacheFormat settings;
  settings.quant_group_size = head_dim;
  if (!named.empty()) settings = named.front().bundle.quantizer;
  if (bundle) settings = bundle->quantizer;
  settings = with_overrides(settings, options);
  const Json shared = format_json(settings);
  for (const NamedBundle& other : named) {
    const Json own = format_json(with_overrides(other.bundle.quantizer, options));
    if (own == shared) continue;
    throw Error(
        {.what = "the bundles are for caches of different formats",
         .where = "--bundle " + other.name,
         .expected = shared.dump(),
         .found = own.dump(),
         .hint = "windows, groups and metadata can be given, as with --sink; rules of the codec "
                 "(clip_span, zero, ties, metadata_rounding) can't"});
  }
  return settings;
}

}  // namespace oscar
