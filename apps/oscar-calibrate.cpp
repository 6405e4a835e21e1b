// oscar-calibrate MODEL CORPUS OUT.h5: collect statistics, fit transforms, write the bundle.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <optional>

#include "common/options.h"
#include "common/output_paths.h"
#include "common/processes.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/process.h"
#include "oscar/base/strings.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/match.h"
#include "oscar/calibrate/calibrate.h"
#include "oscar/calibrate/recording.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fit.h"

namespace {

using namespace oscar;
using namespace oscar::app;

constexpr const char* kDescription =
    "Runs MODEL over CORPUS, collects attention statistics, fits the transforms and\n"
    "clipping of a 2-bit KV cache and writes them as one HDF5 bundle.\n";

constexpr const char* kFooter =
    "MODEL   Hugging Face folder (config.json, safetensors, tokenizer.json), a .gguf\n"
    "        file (llama, qwen2 or qwen3), the name of a model that was fetched from\n"
    "        the Hub (Qwen/Qwen3-8B), tiny-gqa, which is embedded, or smollm2 or\n"
    "        qwen2.5-coder-1.5b, once python -m oscar_int2 fetch NAME has fetched it.\n"
    "CORPUS  .txt; .jsonl, .json or .parquet (text, prompt/completion, messages,\n"
    "        ShareGPT or Alpaca), also .gz and .zst; .npy or .h5 token ids; a folder\n"
    "        of these; self:N (the model writes N tokens); or several joined with\n"
    "        weights: chat.jsonl:0.5,code.jsonl:0.5\n"
    "        recorded: the text of a MODEL that another engine ran, which is a folder\n"
    "        of sums and held-back rows (python -m oscar_int2 calibrate makes it).\n"
    "The run ends with whether the text was enough: what it would cost, by predicted\n"
    "loss, to have used another text as long, or how many tokens to use instead.\n"
    "Ctrl-C saves a checkpoint beside OUT; --resume continues from it.\n"
    "Exit codes: 0 done, 1 failed, 2 usage, 130 stopped on request.";

struct Arguments {
  CalibrateOptions options;
  FitArguments fit;
  ComputeArguments compute;
  MemoryArguments memory;
  std::string rope_scaling, json, backend, recall = "auto", separators = "auto";
  std::optional<BackendChoice> for_backend;  // with --for, once the command line is read
  bool no_statistics = false, quiet = false;
  int processes = 1;
};

void add_corpus_options(CLI::App& program, Arguments& arguments) {
  const char* const section = "Corpus";
  CalibrateOptions& options = arguments.options;
  program
      .add_option("--sequence-length", options.sequence_length,
                  "Tokens per sequence (default: the model's context, 4096 at most)")
      ->transform(positive())
      ->group(section);
  program.add_option("--max-tokens", options.max_tokens, "Use this many tokens (default: all)")
      ->transform(positive())
      ->group(section);
  add_strict(program, options.strict, section);
  program
      .add_option("--recall", arguments.recall,
                  "Let the second half of every second sequence repeat stretches of its first, so "
                  "that queries look far back; auto: in text, not in ids, of sequences that are at "
                  "least four times as long as the exact windows")
      ->transform(one_of({"auto", "on", "off"}))
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--separators", arguments.separators,
                  "Put tokens that end documents and turns into every second sequence, as packed "
                  "documents and chats have them; auto: into text that has few, not into ids")
      ->transform(one_of({"auto", "on", "off"}))
      ->capture_default_str()
      ->group(section);
  program.add_option("--seed", options.seed, "Order of documents")
      ->transform(non_negative())
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--tokens-out", options.tokens_out,
                  "Also write the token ids that are used (.npy)")
      ->group(section);
  program
      .add_option("--rope-scaling", arguments.rope_scaling,
                  "JSON that replaces the checkpoint's rope scaling, as servers do")
      ->group(section);
}

void add_run_options(CLI::App& program, Arguments& arguments) {
  const char* const section = "Run";
  CalibrateOptions& options = arguments.options;
  program.add_flag("--statistics-only", options.statistics_only, "Write sums, fit nothing")
      ->group(section);
  program.add_flag("--no-statistics", arguments.no_statistics, "Leave the sums out of the bundle")
      ->group(section);
  program.add_flag("--hash-weights", options.hash_weights, "Fingerprint every byte of the weights")
      ->group(section);
  program
      .add_option("--checkpoint-every", options.checkpoint_every,
                  "Sequences between checkpoints while all weights fit in memory")
      ->transform(positive())
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--batch-tokens", options.batch_tokens,
                  "Tokens that run together (default: 4096 on the CPU, 32768 on a GPU); "
                  "fewer take less memory and change the last bits of the sums")
      ->transform(positive())
      ->group(section);
  program.add_flag("--resume", options.resume, "Continue from the checkpoint beside OUT")
      ->group(section);
  program.add_flag("--force", options.force, "Replace OUT")->group(section);
  program.add_flag("--dry-run", options.dry_run, "Say what the run would cost, and stop")
      ->group(section);
  program.add_option("--json", arguments.json, "Write the summary as JSON (-: to stdout)")
      ->group(section);
  program
      .add_flag("--quiet", arguments.quiet, "No progress and no summary: warnings and errors only")
      ->group(section);
}

void print_corpus(const CorpusRecord& corpus) {
  for (const CorpusSource& source : corpus.sources) {
    fmt::print("corpus     {}: {} of {} documents, {} of {} tokens used\n", printable(source.name),
               format_count(source.documents_used), format_count(source.documents_read),
               format_count(source.tokens_used), format_count(source.tokens_read));
    for (const std::string& reason : source.dropped)
      fmt::print("           left out: {}\n", printable(reason));
  }
  fmt::print("tokens     {} in {} sequences of up to {}\n", format_count(corpus.tokens),
             format_count(corpus.sequences_used), format_count(corpus.sequence_length));
}

void print_cost(const CalibrateResult& result, const Ranks& ranks) {
  const CostEstimate& cost = result.cost;
  fmt::print("device     {}{}\n", result.device, processes_text(ranks));
  fmt::print("time       about {} to collect (measured on one batch of layer 0)\n",
             format_duration(cost.seconds));
  if (cost.convergence_seconds > 0) {
    fmt::print("           about {} to judge the text (measured on layer 0)\n",
               format_duration(cost.convergence_seconds));
  }
  if (cost.fit_seconds > 0) {
    fmt::print("           about {} to fit (measured on layer 0)\n",
               format_duration(cost.fit_seconds));
  }
  if (cost.search_seconds > 0) {
    fmt::print("           about {} to search on {} tokens held back (measured on layer 0)\n",
               format_duration(cost.search_seconds), format_count(result.held_back_tokens));
  }
  fmt::print("memory     {} host", format_bytes(cost.peak.host_bytes));
  if (cost.peak.device_bytes > 0) fmt::print(", {} GPU", format_bytes(cost.peak.device_bytes));
  fmt::print(" at most\n           {} of it for {}\nweights    {}\n",
             format_bytes(cost.peak.largest_bytes), cost.peak.largest,
             cost.weights_resident ? "stay in memory, read once"
                                   : fmt::format("stream from disk, {} pass{}", cost.num_waves,
                                                 cost.num_waves == 1 ? "" : "es"));
  fmt::print("disk       bundle {} at most, checkpoint {}, of a stop {}\n",
             format_bytes(cost.bundle_bytes), format_bytes(cost.checkpoint_bytes),
             format_bytes(cost.stop_bytes));
}

// Said before the time is spent: whoever has a GGUF file may want the bundle for llama.cpp.
void print_servers_of_gguf(const std::string& model) {
  const auto file = gguf_file_of(model);
  if (!file) return;
  fmt::print(
      "servers    vLLM and transformers, over the folder that\n"
      "           python -m oscar_int2 dequantize {} FOLDER writes;\n"
      "           llama.cpp has no 2-bit cache for it (docs/llama-cpp.md)\n",
      quoted(file->string()));
}

void print_held_back(int64_t tokens) {
  if (tokens == 0) return;
  fmt::print("held back  {} tokens that the choices were made on\n", format_count(tokens));
}

// Whether oscar-eval finds text in the model's folder.
bool has_held_out_text(const std::string& model) {
  return std::ranges::any_of(model_paths(model), [](const NamedPath& file) {
    return file.path.filename() == "heldout.jsonl";
  });
}

// The next command, of a bundle or a file of sums.
void print_next_of(const CalibrateOptions& options) {
  const std::string out = quoted(options.output.string());
  if (options.statistics_only) {
    std::filesystem::path fitted = options.output;
    fitted.replace_filename(fitted.stem().string() + "-fitted.h5");
    return print_next({"oscar-bundle fit " + out, "-o " + quoted(fitted.string())});
  }
  std::vector<std::string> command{"oscar-eval " + quoted(options.model), "--bundle " + out};
  const bool found = has_held_out_text(options.model);
  if (!found) command.emplace_back("--corpus HELDOUT");
  if (options.rope_scaling) {
    command.push_back("--rope-scaling " + quoted(json_text(*options.rope_scaling)));
  }
  print_next(command);
  if (!found) fmt::print("           HELDOUT: text as you serve it, and none of the corpus\n");
}

void print_written(const std::filesystem::path& output) {
  std::error_code status;
  fmt::print("\nwrote {} ({})\n", printable(std::filesystem::absolute(output).string()),
             format_bytes(static_cast<int64_t>(std::filesystem::file_size(output, status))));
}

constexpr const char* kMixed = "mixed";  // the names of eight heads would not fit a column

// The kind that every head of a side has.
std::string kinds_text(const SideTransform& side) {
  const auto differs = [&](TransformKind kind) { return kind != side.kind.front(); };
  return std::any_of(side.kind.begin(), side.kind.end(), differs) ? kMixed
                                                                  : method_name(side.kind.front());
}

// "0.95" or "0.93-off": clipping ratios of a side's heads, from the strongest on.
std::string clips_text(const SideTransform& side) {
  std::vector<float> ratios = side.recipe.clip_ratio;
  std::sort(ratios.begin(), ratios.end(), [](float a, float b) {
    return (a > 0 ? a : 2) < (b > 0 ? b : 2);  // off clips least
  });
  const std::string least = clip_text(ratios.front()), most = clip_text(ratios.back());
  return least == most ? least : least + "-" + most;
}

double largest_condition(const SideTransform& side) {
  return *std::max_element(side.condition_number.begin(), side.condition_number.end());
}

// "1.2%": the worst head's predicted error of the attention output; "" where nothing was searched.
std::string error_text(const LayerTransforms& layer) {
  double worst = 0;
  for (const double nmse : layer.predicted_output_nmse) {
    if (!(nmse >= 0)) return "";
    worst = std::max(worst, nmse);
  }
  return fmt::format("{:.2f}%", 100 * worst);
}

// Why heads do not have the asked kind.
void print_fallbacks(const Bundle& bundle) {
  std::string text;
  for (const LayerTransforms& layer : bundle.layers) {
    const std::string where = fmt::format("layer {}", layer.geometry.layer_id);
    for (const auto& [name, side] : {std::pair{"key", &layer.key}, {"value", &layer.value}}) {
      for (size_t head = 0; head < side->fallback.size(); ++head) {
        const std::string& reason = side->fallback[head];
        if (!reason.empty())
          add_line(text, where, fmt::format("{} head {}: {}", name, head, printable(reason)));
      }
    }
  }
  fmt::print("{}", text);
}

// One row a layer: what was chosen, how far from orthogonal, and after a search what error to
// expect.
void print_layers(const Bundle& bundle) {
  const bool searched = !bundle.search.is_null();
  fmt::print("\n                           clipping                condition number\n");
  fmt::print("layer  keys      values    keys       values       keys    values{}\n",
             searched ? "   error" : "");
  bool mixed = false;
  for (const LayerTransforms& layer : bundle.layers) {
    if (!layer.geometry.fitted()) continue;
    if (!layer.geometry.quantized) {
      fmt::print("{:5}  window fits into the recent tokens: never quantized\n",
                 layer.geometry.layer_id);
      continue;
    }
    const std::string keys = kinds_text(layer.key), values = kinds_text(layer.value);
    mixed = mixed || keys == kMixed || values == kMixed;
    fmt::print("{:5}  {:<9} {:<9} {:<10} {:<10} {:6.1f}    {:6.1f}{}\n", layer.geometry.layer_id,
               keys, values, clips_text(layer.key), clips_text(layer.value),
               largest_condition(layer.key), largest_condition(layer.value),
               searched ? fmt::format("  {:>6}", error_text(layer)) : "");
  }
  const auto count_of = [&](AttentionKind kind) {
    return std::ranges::count_if(bundle.layers, [kind](const LayerTransforms& layer) {
      return layer.geometry.attention == kind;
    });
  };
  if (const auto local = count_of(AttentionKind::kLocal); local > 0) {
    fmt::print("{} local layers are not listed: their windows stay in BF16\n", local);
  }
  if (const auto linear = count_of(AttentionKind::kNone); linear > 0) {
    fmt::print("{} linear layers are not listed: they cache no keys and values\n", linear);
  }
  if (mixed) fmt::print("mixed: heads differ; oscar-bundle inspect OUT --json - lists them\n");
  if (searched) {
    fmt::print("error: predicted squared error of the attention output, the worst head's share\n");
  }
  print_fallbacks(bundle);
}

// Verdict and figures; inspect shows the rest.
void print_convergence(const Json& record) {
  std::vector<std::string> lines = verdict_lines(record);
  lines.resize(std::min<size_t>(lines.size(), 2));
  for (const std::string& line : lines) {
    fmt::print("{:<11}{}\n", &line == &lines.front() ? "text" : "", line);
  }
}

// What --for left open and what it fixed.
void print_backend(const std::string& backend, const BackendChoice& choice) {
  std::string text;
  add_line(text, "for", fmt::format("{}: {}", backend, fmt::join(describe_choice(choice), ", ")),
           11);
  fmt::print("{}", text);
}

// `backends`: plans for the bundle; none without transforms.
Json summary_json(const CalibrateResult& result, const CalibrateOptions& options,
                  const std::vector<BackendPlan>& backends) {
  Json json = {{"output", options.output.string()}, {"device", result.device},
               {"tokens", result.corpus.tokens},    {"sequences", result.corpus.sequences_used},
               {"dry_run", result.dry_run},         {"already_done", result.already_done}};
  if (result.dry_run) {
    json["seconds"] = result.cost.seconds;
    json["convergence_seconds"] = result.cost.convergence_seconds;
    json["fit_seconds"] = result.cost.fit_seconds;
    json["search_seconds"] = result.cost.search_seconds;
    json["host_bytes"] = result.cost.peak.host_bytes;
    json["device_bytes"] = result.cost.peak.device_bytes;
    json["weights_resident"] = result.cost.weights_resident;
    json["bundle_bytes"] = result.cost.bundle_bytes;
    json["checkpoint_bytes"] = result.cost.checkpoint_bytes;
    json["stop_checkpoint_bytes"] = result.cost.stop_bytes;
  } else {
    json["convergence"] = result.bundle.convergence;
    json["collect_seconds"] = result.collect_seconds;
    json["convergence_seconds"] = result.convergence_seconds;
    json["fit_seconds"] = result.fit_seconds;
    json["search_seconds"] = result.search_seconds;
  }
  if (!backends.empty()) json["stacks"] = plans_json(backends);
  json["warnings"] = result.warnings;
  return json;
}

// Requests of which one would be dropped. --search has a default, which asks for nothing.
void check_requests(const CLI::App& program, const Arguments& arguments) {
  if (!arguments.options.statistics_only) return;
  if (arguments.no_statistics) {
    throw CLI::ValidationError("--statistics-only --no-statistics", "would leave nothing to write");
  }
  if (program.count("--search") > 0 && arguments.fit.search != "off") {
    throw CLI::ValidationError("--statistics-only --search " + arguments.fit.search,
                               "a search chooses among fits, and --statistics-only fits nothing:\n"
                               "  leave one of them out");
  }
}

// What the outputs must not overwrite, and that all can be written, before the work. The library
// looks at OUT itself.
void check_places(const Arguments& arguments) {
  const CalibrateOptions& options = arguments.options;
  std::vector<NamedPath> inputs = model_paths(options.model);
  const std::vector<NamedPath> corpus = corpus_paths("CORPUS", options.corpus);
  inputs.insert(inputs.end(), corpus.begin(), corpus.end());
  const std::vector<NamedPath> texts = {{"--json", arguments.json},
                                        {"--tokens-out", options.tokens_out}};
  std::vector<NamedPath> outputs = texts;
  outputs.push_back({"OUT", options.output});
  outputs.push_back({"the checkpoint beside OUT", checkpoint_path(options.output)});
  check_outputs(inputs, outputs);
  probe_outputs(texts);
}

// Options that others decide. The choice of --for.
BackendChoice complete_options(Arguments& arguments) {
  CalibrateOptions& options = arguments.options;
  BackendChoice choice = arguments.for_backend
                             ? *arguments.for_backend
                             : BackendChoice{arguments.fit.resolve(),
                                             arguments.fit.resolve_search(), options.quantizer};
  options.preset = arguments.fit.preset;
  options.fit = choice.fit;
  options.search = choice.search;
  options.quantizer = choice.quantizer;
  options.quant_group_sizes = choice.quant_group_sizes;
  options.device = arguments.compute.device;
  options.dtype = arguments.compute.dtype;
  options.host_memory = parse_bytes(arguments.memory.host_memory, "--host-memory");
  options.gpu_memory = parse_bytes(arguments.memory.gpu_memory, "--gpu-memory");
  options.rope_scaling = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const auto change = [](const std::string& name) {
    using enum CalibrateOptions::Change;
    return name == "auto" ? kAuto : name == "on" ? kOn : kOff;
  };
  options.recall = change(arguments.recall);
  options.separators = change(arguments.separators);
  options.keep_statistics = !arguments.no_statistics;
  return choice;
}

int run_first(Arguments& arguments, Ranks& ranks) {
  const BackendChoice choice = complete_options(arguments);
  const CalibrateOptions& options = arguments.options;
  check_places(arguments);
  TerminalProgress progress(arguments.quiet);
  const CalibrateResult result = calibrate(options, ranks, progress);
  if (result.dry_run) require_all(ranks, "");
  for (const std::string& warning : joined_by_layer(result.warnings)) {
    warn(warning);
  }
  std::vector<BackendPlan> backends;
  if (!result.bundle.layers.empty()) backends = plan_for_all(result.bundle);
  if (!arguments.json.empty()) {
    write_text_output(arguments.json, json_text(summary_json(result, options, backends), 2) + "\n");
  }
  if (arguments.quiet || arguments.json == kStandardOutput) return kExitDone;
  if (result.already_done) {
    fmt::print("{} is finished already: nothing to do\n", printable(options.output.string()));
    return kExitDone;
  }
  if (!arguments.backend.empty()) print_backend(arguments.backend, choice);
  print_corpus(result.corpus);
  if (result.dry_run) {
    print_cost(result, ranks);
    print_servers_of_gguf(options.model);
    return kExitDone;
  }
  const auto collected = static_cast<double>(result.corpus.tokens - result.held_back_tokens);
  fmt::print("device     {}{}\n", result.device, processes_text(ranks));
  fmt::print("collected  in {} ({} tokens/s), {} in {}\n", format_duration(result.collect_seconds),
             format_count(static_cast<int64_t>(collected / result.collect_seconds)),
             result.held_back_tokens > 0 ? "fitted and searched" : "fitted",
             format_duration(result.search_seconds + result.fit_seconds));
  print_held_back(result.held_back_tokens);
  print_convergence(result.bundle.convergence);
  const bool changes_cache = options.statistics_only || has_quantized_layer(result.bundle);
  if (!result.bundle.layers.empty()) {
    print_layers(result.bundle);
    if (changes_cache) fmt::print("\n{}", plans_text(backends));
  }
  print_written(options.output);
  if (changes_cache) print_next_of(options);
  return kExitDone;
}

// A model that another engine ran: MODEL is a folder with its sums and held-back rows.

constexpr const char* kRecorded = "recorded";  // the CORPUS of such a run

bool is_recorded(const Arguments& arguments) {
  return arguments.options.corpus == kRecorded && is_recording(arguments.options.model);
}

// What the engine that ran the model has decided already is refused by name.
void check_recorded_options(const CLI::App& program) {
  constexpr std::array kOwn = {"MODEL",          "CORPUS",       "OUT",     "--device",
                               "--host-memory",  "--gpu-memory", "--force", "--no-statistics",
                               "--quiet",        "--search",     "--clip",  "--preset",
                               "--position-span"};
  for (const CLI::Option* option : program.get_options()) {
    const std::string name = option->get_name();
    const bool fits = option->get_group() == kStudySection || option->get_group() == "Cache format";
    if (option->count() == 0 || fits || std::ranges::find(kOwn, name) != kOwn.end()) continue;
    throw CLI::ValidationError(
        name, "is no option of a recorded run, whose text has passed through its model already");
  }
}

int run_recorded(const Arguments& arguments, const CLI::App& program) {
  const CalibrateOptions& options = arguments.options;
  check_outputs({{"MODEL", options.model}}, {{"OUT", options.output}});
  probe_outputs({{"OUT", options.output}}, options.force ? Replace::kYes : Replace::kNo);
  Recording recording = read_recording(options.model);
  TerminalProgress progress(arguments.quiet);
  const RecordedOptions recorded{
      .refit = {.preset = arguments.fit.preset,
                .fit = arguments.fit.resolve(),
                .quantizer = with_given(program, options.quantizer, recording.all.quantizer),
                .keep_statistics = !arguments.no_statistics},
      .search = arguments.fit.resolve_search(),
      .device = arguments.compute.device,
      .host_memory = parse_bytes(arguments.memory.host_memory, "--host-memory"),
      .gpu_memory = parse_bytes(arguments.memory.gpu_memory, "--gpu-memory")};
  const RecordedResult result = calibrate_recorded(std::move(recording), recorded, progress);
  for (const std::string& warning : joined_by_layer(result.warnings)) warn(warning);
  write_bundle(result.bundle, options.output, options.force);
  if (arguments.quiet) return kExitDone;
  print_corpus(result.bundle.corpus);
  fmt::print("device     {}\n", result.device);
  print_held_back(result.held_back_tokens);
  print_convergence(result.bundle.convergence);
  print_layers(result.bundle);
  fmt::print("\n{}", plans_text(plan_for_all(result.bundle)));
  print_written(options.output);
  return kExitDone;
}

int run(Arguments& arguments) {
  install_interrupt_handlers();
  Ranks ranks;
  return share_work(
      ranks, kResumeWithAny, [&] { return run_first(arguments, ranks); },
      [&](Progress& silent) {
        complete_options(arguments);
        calibrate(arguments.options, ranks, silent);
      });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program(kDescription, "oscar-calibrate");
  program.footer(kFooter);
  Arguments arguments;
  program
      .add_option("MODEL", arguments.options.model,
                  "Folder, .gguf file or a model's name; see below")
      ->required();
  program.add_option("CORPUS", arguments.options.corpus, "Text or token ids; see below")
      ->required();
  program
      .add_option("OUT", arguments.options.output,
                  "HDF5 file to write: a rotation bundle, or with --statistics-only the sums alone")
      ->required();
  add_fit_options(program, arguments.fit, /*searchable=*/true);
  add_backend_option(program, arguments.backend);
  add_quantizer_options(program, arguments.options.quantizer);
  add_corpus_options(program, arguments);
  add_compute_options(program, arguments.compute);
  add_processes_option(program, arguments.processes);
  add_memory_options(program, arguments.memory);
  add_run_options(program, arguments);
  add_fit_study_options(program, arguments.fit, /*searchable=*/true);
  program.final_callback([&] {  // a conflict is a usage error
    if (is_recorded(arguments)) check_recorded_options(program);
    check_requests(program, arguments);
    if (arguments.backend.empty()) return;
    arguments.for_backend =
        choose_for_backend(program, arguments.backend, arguments.fit, arguments.options.quantizer);
  });
  return run_program(program, argc, argv, [&] {
    if (is_recorded(arguments)) {
      install_interrupt_handlers();
      return run_recorded(arguments, program);
    }
    return arguments.processes > 1 ? run_processes(arguments.processes, argc, argv, kResumeWithAny)
                                   : run(arguments);
  });
}
