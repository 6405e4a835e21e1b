// oscar-eval MODEL [--bundle B]: what a 2-bit cache costs this model, beside baselines.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "common/options.h"
#include "common/output_paths.h"
#include "common/processes.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/base/json.h"
#include "oscar/base/process.h"
#include "oscar/base/strings.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/cache/pages.h"
#include "oscar/cache/rival_formats.h"
#include "oscar/eval/evaluate.h"
#include "oscar/eval/report/page.h"
#include "oscar/eval/report/report_data.h"
#include "oscar/eval/report/verdict.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace {

using namespace oscar;
using namespace oscar::app;

constexpr const char* kDescription =
    "Compares MODEL with a 2-bit KV cache against itself with a BF16 cache:\n"
    "perplexity, KL divergence, top-1 agreement and needle tasks.\n";

constexpr const char* kMethodsHelp =
    "METHODS bf16, exact (the INT2 path with the codec off), identity, identity-clip,\n"
    "        hadamard, hadamard-clip, random-clip, and with --bundle: oscar,\n"
    "        oscar-perhead, oscar-released, bundle, portable, portable-perhead.\n"
    "        With --bundle NAME=FILE also NAME, the transforms of that bundle.\n"
    "        Variants behind @: bundle@k (keys only), @v, @layer:N, @clip:K/V,\n"
    "        @window:SINK/RECENT, @bits:K/V (codes of other widths, unclipped).\n"
    "CODECS OF OTHERS, with bits of a value of keys / values at head_dim 128. They\n"
    "        keep the exact windows and layers of their authors; NAME@common\n"
    "        takes the windows of this comparison, and every layer.\n";

constexpr const char* kFooter =
    "A warning says so when the evaluated text is in a bundle's calibration text.\n"
    "Exit codes: 0 done, 1 failed, 2 usage, 130 stopped on request.";

// A line for each codec.
std::string rivals_help() {
  constexpr int kHeadDim = 128;
  std::string text;
  for (const RivalFormat& rival : rival_formats()) {
    text += fmt::format("  {:<19} {:>6.4g} / {:<6.4g} {}\n", rival.name, rival.key.at(kHeadDim),
                        rival.value.at(kHeadDim), rival.source);
  }
  return text;
}

struct Arguments {
  EvaluateOptions options;
  ComputeArguments compute;
  MemoryArguments memory;
  CacheFormat quantizer;
  std::vector<std::string> tasks = {"ppl"}, bundles;
  std::string rope_scaling, json, html, separators;
  int64_t first_position = 0;
  bool dry_run = false, quiet = false, force = false, quick = false;
  int processes = 1;
};

constexpr int64_t kQuickTokens = 16384;  // of --quick

void add_measurement_options(CLI::App& program, Arguments& arguments) {
  const char* const section = "Measurement";
  EvaluateOptions& options = arguments.options;
  program
      .add_option("--bundle", arguments.bundles,
                  "Rotation bundle from oscar-calibrate; NAME=FILE: a further one that "
                  "--compare calls NAME (repeatable)")
      ->allow_extra_args(false)
      ->group(section);
  program
      .add_option("--corpus", options.corpus,
                  "Held-out text or token ids (default: heldout.jsonl in MODEL)")
      ->group(section);
  program.add_option("--compare", options.compare, "Methods, separated by commas")
      ->delimiter(',')
      ->group(section);
  program.add_option("--tasks", arguments.tasks, "ppl, niah")
      ->delimiter(',')
      ->transform(one_of({"ppl", "niah"}))
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--first-position", arguments.first_position,
                  "First predicted token that counts (default: sink + recent)")
      ->transform(positive())
      ->group(section);
  program
      .add_option("--position-offset", options.position_offset,
                  "Shift positions, so that a short text tests late ones")
      ->transform(non_negative())
      ->capture_default_str()
      ->group(section);
  program
      .add_option(
          "--mode", options.mode,
          "How the prompt is read: decode, prefill or chunked:N. Of --corpus the prompt is all "
          "before --first-position (prefill), or the whole sequence (chunked:N)")
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--engine", options.engine,
                  "simulate, or token by token through a paged cache: reference or kernel")
      ->transform(one_of({"simulate", "reference", "kernel"}))
      ->capture_default_str()
      ->group(section);
}

void add_text_options(CLI::App& program, Arguments& arguments) {
  const char* const section = "Measurement";
  EvaluateOptions& options = arguments.options;
  program
      .add_option("--sequence-length", options.sequence_length,
                  "Tokens per sequence (default: the model's context, 4096 at most)")
      ->transform(positive())
      ->group(section);
  program
      .add_option("--stride", options.stride,
                  "Overlap: windows of --sequence-length advance by this many tokens and "
                  "count their last ones, so that each has a long context")
      ->transform(positive())
      ->group(section);
  program.add_option("--max-tokens", options.max_tokens, "Use this many tokens (default: all)")
      ->transform(positive())
      ->group(section);
  program
      .add_flag("--quick", arguments.quick,
                fmt::format("A first look: {} tokens, none of them measured with separators too",
                            format_count(kQuickTokens)))
      ->group(section);
  add_strict(program, options.strict, section);
  program.add_option("--seed", options.seed, "Of document order, bootstrap, needles and rotations")
      ->transform(non_negative())
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--separators", arguments.separators,
                  "Measure the text once more with a token that ends documents or turns as every "
                  "N-th one, as packed documents and chats have them")
      ->check([](const std::string& text) {
        const bool number = !text.empty() && text.size() < 8 && text[0] != '0' &&
                            text.find_first_not_of("0123456789") == std::string::npos;
        return text == "off" || number ? "" : "must be off or a whole number above 0, not " + text;
      })
      ->option_text("N|off [64]")
      ->group(section);
  program
      .add_option("--rope-scaling", arguments.rope_scaling,
                  "JSON that replaces the checkpoint's rope scaling, as servers do")
      ->group(section);
}

void add_needle_options(CLI::App& program, NeedlePlan& plan, bool& generate) {
  const char* const section = "Needle tasks";
  program
      .add_option("--needle-kinds", plan.kinds,
                  "single, multikey, multivalue, multiquery, tracking, verbatim (default: all)")
      ->delimiter(',')
      ->group(section);
  program.add_option("--needle-lengths", plan.lengths, "Tokens of a prompt")
      ->delimiter(',')
      ->transform(positive())
      ->capture_default_str()
      ->group(section);
  program.add_option("--needle-depths", plan.depths, "Places of the needle, 0 to 1")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0))
      ->check(CLI::Validator(
          [](const std::string& text) {
            return std::isnan(std::strtod(text.c_str(), nullptr)) ? "must be from 0 to 1" : "";
          },
          ""))
      ->capture_default_str()
      ->group(section);
  program.add_option("--needle-prompts", plan.prompts, "Prompts in all")
      ->transform(positive())
      ->capture_default_str()
      ->group(section);
  program
      .add_flag("--needle-generate", generate,
                "Generate the answers too (otherwise teacher forcing alone)")
      ->group(section);
}

void add_study_options(CLI::App& program, EvaluateOptions& options) {
  program
      .add_flag("--keep-units", options.keep_units,
                "Also report KL and NLL of each resampling unit, for comparisons of your own")
      ->group(kStudySection);
  program
      .add_flag("--layer-errors", options.layer_errors,
                "Also report what each layer and KV head errs by itself, which is what a "
                "calibration's search predicts")
      ->group(kStudySection);
}

void add_output_options(CLI::App& program, Arguments& arguments) {
  const char* const section = "Output";
  program.add_option("--json", arguments.json, "Write the report as JSON (-: to stdout)")
      ->group(section);
  program
      .add_option("--html", arguments.html,
                  "Write the report as one HTML page with verdict and charts (-: to stdout)")
      ->group(section);
  program.add_flag("--force", arguments.force, "Replace the files of --json and --html")
      ->group(section);
  program
      .add_flag("--resume", arguments.options.resume,
                "Continue from the checkpoint beside the report")
      ->group(section);
  program.add_flag("--dry-run", arguments.dry_run, "Say what the run would cost, and stop")
      ->group(section);
  program.add_flag("--write-back", arguments.options.write_back, "Store the report in the bundle")
      ->group(section);
  program
      .add_flag("--quiet", arguments.quiet, "No progress and no table: warnings and errors only")
      ->group(section);
}

// Only what the user gave overrides the bundle's settings.
void take_overrides(const CLI::App& program, Arguments& arguments) {
  EvaluateOptions& options = arguments.options;
  const auto given = [&](const char* name) { return program.get_option(name)->count() > 0; };
  const CacheFormat& q = arguments.quantizer;
  if (given("--sink")) options.sink = q.sink_tokens;
  if (given("--recent")) options.recent = q.recent_tokens;
  if (given("--quant-group-size")) options.quant_group_size = q.quant_group_size;
  if (given("--demote-block")) options.demote_block = q.demote_block;
  if (given("--metadata-dtype")) options.metadata_dtype = q.metadata_dtype;
  if (given("--first-position")) options.first_position = arguments.first_position;
  if (given("--separators")) {
    options.separators = arguments.separators == "off" ? 0 : std::stoll(arguments.separators);
  }
  if (!arguments.quick) return;
  if (!given("--max-tokens")) options.max_tokens = kQuickTokens;
  if (!given("--separators")) options.separators = 0;
}

// Length of the NAME= before the file of a bundle; 0: it has no name. "./a=b.h5" has none.
size_t name_prefix(const std::string& bundle) {
  const size_t end = bundle.find_first_not_of(
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._");
  return end != std::string::npos && end > 0 && bundle[end] == '=' ? end + 1 : 0;
}

void take_bundles(Arguments& arguments) {
  EvaluateOptions& options = arguments.options;
  for (const std::string& bundle : arguments.bundles) {
    const size_t prefix = name_prefix(bundle);
    if (prefix > 0) {
      options.named_bundles.emplace_back(bundle.substr(0, prefix - 1), bundle.substr(prefix));
    } else if (options.bundle.empty()) {
      options.bundle = bundle;
    } else {
      throw UsageError({.what = "two bundles without a name",
                        .where = "--bundle " + bundle,
                        .hint = "name all but one: --bundle NAME=FILE"});
    }
  }
}

// Folders of paths say nothing about a measurement, and would make reports differ by machine.
std::string without_folders(const std::string& value) {
  if (value.find_first_of("{}") != std::string::npos) return value;  // JSON, not a path
  std::string out;
  for (size_t begin = 0; begin <= value.size();) {
    const size_t end = std::min(value.find(',', begin), value.size());
    const std::string part = value.substr(begin, end - begin);
    const std::string last = std::filesystem::path(part).filename().string();
    out += (begin == 0 ? "" : ",") + (last.empty() ? part : last);
    begin = end + 1;
  }
  return out;
}

// The command line as reports quote it: what decides the figures, without outputs, memory and
// folders.
std::string command_line(const CLI::App& program, const Arguments& arguments) {
  std::string text = "oscar-eval " + quoted(without_folders(arguments.options.model));
  for (const CLI::Option* option : program.get_options()) {
    const std::string name = option->get_name();
    const auto is = [&](auto... names) { return ((name == names) || ...); };
    // Outputs, and limits on which no figure depends.
    const bool left_out = is("--json", "--html", "--force", "--quiet", "--host-memory",
                             "--gpu-memory", "--resume", "--dry-run");
    if (option->count() == 0 || left_out || !name.starts_with("--")) continue;
    if (name == "--bundle") {
      for (const std::string& bundle : option->results()) {
        const size_t prefix = name_prefix(bundle);
        text += " --bundle " +
                quoted(bundle.substr(0, prefix) + without_folders(bundle.substr(prefix)));
      }
      continue;
    }
    text += " " + name;
    if (option->get_expected_max() == 0) continue;  // a flag
    std::string value;
    for (const std::string& result : option->results()) {
      value += (value.empty() ? "" : ",") + result;
    }
    text += " " + quoted(name == "--corpus" ? without_folders(value) : value);
  }
  return text;
}

// With --resume the reports of the run that was stopped, which are partial: its checkpoint is
// there. One that has ended is looked at first.
Replace replacing(const Arguments& arguments) {
  const EvaluateOptions& options = arguments.options;
  std::error_code status;
  const bool stopped = options.resume && std::filesystem::exists(options.checkpoint, status);
  return arguments.force || stopped || options.finished ? Replace::kYes : Replace::kNo;
}

// The report that --resume finds without a checkpoint beside it; none where it is no report.
std::optional<Json> finished_report(const Arguments& arguments) {
  const EvaluateOptions& options = arguments.options;
  std::error_code status;
  if (!options.resume || arguments.force || options.checkpoint != checkpoint_path(arguments.json) ||
      !std::filesystem::is_regular_file(arguments.json, status) ||
      std::filesystem::exists(options.checkpoint, status)) {
    return {};
  }
  try {
    Json report = read_json_file(arguments.json);
    if (report.is_object() && report.contains("run_key")) return report;
  } catch (const Error&) {
  }
  return {};
}

// What the reports must not overwrite, and that all can be written, before the work.
void check_places(const Arguments& arguments) {
  const EvaluateOptions& options = arguments.options;
  std::vector<NamedPath> inputs = model_paths(options.model);
  inputs.push_back({"--bundle", options.bundle});
  for (const auto& [name, file] : options.named_bundles) inputs.push_back({"--bundle", file});
  if (!options.corpus.empty()) {
    const std::vector<NamedPath> corpus = corpus_paths("--corpus", options.corpus);
    inputs.insert(inputs.end(), corpus.begin(), corpus.end());
  }
  const std::vector<NamedPath> outputs = {{"--json", arguments.json}, {"--html", arguments.html}};
  std::vector<NamedPath> all = outputs;
  all.push_back({"the checkpoint beside the report", options.checkpoint});
  check_outputs(inputs, all);
  probe_outputs(outputs, replacing(arguments));
  probe_outputs({all.back()});
  if (options.write_back) probe_outputs({{"--write-back", options.bundle}});
}

void print_cost(const EvaluationCost& cost, const Ranks& ranks) {
  fmt::print("device     {}{}\n", cost.device, processes_text(ranks));
  if (cost.tokens > 0) {
    fmt::print("text       {} tokens count, of {} sequences; {} methods\n",
               format_count(cost.tokens), format_count(cost.sequences), cost.methods);
    fmt::print("time       about {} for the text (measured on one batch)\n",
               format_duration(cost.text_seconds));
  }
  if (cost.separated_seconds > 0) {
    fmt::print("           about {} for the text with separators\n",
               format_duration(cost.separated_seconds));
  }
  if (cost.prompts > 0) {
    fmt::print("{:<11}about {} for {} needle prompts of {} methods\n",
               cost.tokens > 0 ? "" : "time", format_duration(cost.needle_seconds),
               format_count(cost.prompts), cost.methods);
  }
  const double seconds = cost.text_seconds + cost.separated_seconds + cost.needle_seconds;
  if (cost.separated_seconds > 0 || (cost.tokens > 0 && cost.prompts > 0)) {
    fmt::print("           about {} in all\n", format_duration(seconds));
  }
  const MemoryPeak& peak = cost.peak;
  fmt::print("memory     {} at most where it computes, {} of it for {}\n",
             format_bytes(peak.device_bytes > 0 ? peak.device_bytes : peak.host_bytes),
             format_bytes(peak.largest_bytes), peak.largest);
  fmt::print("disk       checkpoint {}\n", format_bytes(cost.checkpoint_bytes));
}

// The checkpoint stands beside the first report that is a file.
std::filesystem::path checkpoint_of(const Arguments& arguments) {
  for (const std::string& report : {arguments.json, arguments.html}) {
    if (report.empty() || report == kStandardOutput || leads_to_stream(report)) continue;
    return checkpoint_path(report);
  }
  return {};
}

// With what keeps it from "close".
void print_verdict(const Verdict& verdict) {
  std::string text;
  add_line(text, "verdict", verdict.headline, 11);
  if (!verdict.beside_fp8.empty()) add_line(text, "", verdict.beside_fp8, 11);
  for (const Check& check : verdict.checks) {
    if (check.standing != Standing::kCare && check.standing != Standing::kLost) continue;
    const bool more = !check.note.empty() && !check.is_caution;
    add_line(text, "",
             fmt::format("{}: {} (limit: {}){}{}", check.what, check.measured, check.limits,
                         more ? ". " : "", more ? check.note : ""),
             11);
  }
  fmt::print("\n{}", text);
}

// Whether the verdict is of what the bundle would be served as, and proposes to serve it. What the
// plugin refuses (python/oscar_int2/vllm/settings.py) is not proposed.
bool is_to_be_served(const Verdict& verdict, const ReportData& data,
                     const EvaluateOptions& options) {
  const bool of_the_bundle = verdict.judged && verdict.judged->name == "bundle" &&
                             std::ranges::none_of(data.cautions, [](const Caution& caution) {
                               return caution.kind == "other-cache" && caution.method == "bundle";
                             });
  const bool passed = verdict.standing == Standing::kClose || verdict.standing == Standing::kCare;
  if (!of_the_bundle || !passed || options.rope_scaling) return false;
  const CacheFormat own = read_bundle(options.bundle).quantizer;
  return own.rules == CodecRules{} && own.sink_tokens % kPageTokens == 0;
}

// vLLM over the bundle and the folder `model`. vLLM for CPUs has a server and no command `vllm`.
std::vector<std::string> vllm_command(const EvaluateOptions& options, const std::string& model,
                                      bool on_cpu) {
  const std::string server =
      on_cpu ? "python -m vllm.entrypoints.openai.api_server --model " : "vllm serve ";
  std::vector<std::string> command{"VLLM_OSCAR_BUNDLE=" + quoted(options.bundle.string()),
                                   server + quoted(model)};
  if (on_cpu) command.emplace_back("--dtype bfloat16");
  return command;
}

// vLLM serves folders: a GGUF file is written as one first.
std::vector<std::string> serve_command(const EvaluateOptions& options, bool on_cpu) {
  const std::filesystem::path model = find_model(options.model);
  if (const auto file = gguf_file_of(options.model)) {
    const std::string folder = file->stem().string() + "-hf";
    std::vector<std::string> command = vllm_command(options, folder, on_cpu);
    command.front() = "&& " + command.front();
    command.insert(command.begin(), "python -m oscar_int2 dequantize " + quoted(file->string()) +
                                        " " + quoted(folder));
    return command;
  }
  if (!std::filesystem::is_directory(model)) return {};
  std::vector<std::string> command = vllm_command(options, model.string(), on_cpu);
  const Json config = read_json_file(model / "config.json");
  if (config.contains("vision_config")) command.emplace_back("--language-model-only");
  return command;
}

// The files written, and the next command: a page of the report, else a server of the bundle.
void print_end(const Verdict& verdict, const ReportData& data, const Arguments& arguments,
               std::vector<std::string> written) {
  const EvaluateOptions& options = arguments.options;
  const std::string bundle = options.bundle.string();
  if (options.write_back && !options.finished) {
    written.push_back(printable(bundle) + " (its evaluation)");
  }
  if (!written.empty()) fmt::print("wrote {}\n", fmt::join(written, ", "));
  if (arguments.html.empty() && !arguments.json.empty()) {
    const auto page = std::filesystem::path(arguments.json).replace_extension(".html").string();
    print_next({"oscar-bundle report " + quoted(arguments.json), "-o " + quoted(page)});
  } else if (is_to_be_served(verdict, data, options)) {
    const auto command = serve_command(options, data.device.starts_with("cpu"));
    if (!command.empty()) print_next(command);
  }
}

bool holds(const std::filesystem::path& file, const std::string& text) {
  std::error_code status;
  return std::filesystem::is_regular_file(file, status) &&
         std::filesystem::file_size(file, status) == text.size() && read_text_file(file) == text;
}

// The files that were asked for; returns those that it wrote. A finished report lies where --json
// says, and may lack its page: another file in the page's place stays.
std::vector<std::string> write_reports(const Json& report, const Arguments& arguments) {
  const bool finished = arguments.options.finished.has_value();
  std::vector<std::string> written;
  if (!arguments.json.empty() && !finished) {
    write_text_output(arguments.json, json_text(report, 2) + "\n", replacing(arguments));
    written.push_back(printable(arguments.json));
  }
  if (arguments.html.empty()) return written;
  const std::string page = render_html_report(report);
  if (finished && holds(arguments.html, page)) return written;
  write_text_output(arguments.html, page, finished ? Replace::kNo : replacing(arguments));
  written.push_back(printable(arguments.html));
  return written;
}

// What was measured, on the screen and in files.
void show(const Json& report, const Arguments& arguments) {
  const std::vector<std::string> written = write_reports(report, arguments);
  const bool printed = arguments.json == kStandardOutput || arguments.html == kStandardOutput;
  if (!arguments.quiet && !printed) {
    print_text(format_table(report));
    const ReportData data = read_report(report);  // which the verdict points into
    const Verdict verdict = judge(data);
    print_verdict(verdict);
    if (!report.contains("partial")) print_end(verdict, data, arguments, written);
  } else {  // whose last lines these are
    for (const Caution& caution : cautions_of(report)) warn(caution.sentence);
  }
}

// Options that others decide.
void complete_options(const CLI::App& program, Arguments& arguments) {
  EvaluateOptions& options = arguments.options;
  take_overrides(program, arguments);
  take_bundles(arguments);
  const auto asked = [&](const char* task) {
    return std::find(arguments.tasks.begin(), arguments.tasks.end(), task) != arguments.tasks.end();
  };
  options.perplexity = asked("ppl");
  options.needles = asked("niah");
  options.needle_plan.seed = options.seed;
  options.device = arguments.compute.device;
  options.dtype = arguments.compute.dtype;
  options.host_memory = parse_bytes(arguments.memory.host_memory, "--host-memory");
  options.gpu_memory = parse_bytes(arguments.memory.gpu_memory, "--gpu-memory");
  options.rope_scaling = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  options.command = command_line(program, arguments);
  options.checkpoint = checkpoint_of(arguments);
  if (options.resume && options.checkpoint.empty()) {
    throw UsageError({.what = "there is no report beside which a checkpoint could be",
                      .where = "--resume",
                      .hint = "repeat the --json or --html of the run that was stopped"});
  }
  options.finished = finished_report(arguments);
}

int run_first(const CLI::App& program, Arguments& arguments, Ranks& ranks) {
  TerminalProgress progress(arguments.quiet);
  complete_options(program, arguments);
  const EvaluateOptions& options = arguments.options;
  check_places(arguments);
  if (arguments.dry_run) {
    print_cost(estimate_evaluation(options, ranks, progress), ranks);
    return kExitDone;
  }
  if (!options.resume && !arguments.force && !options.checkpoint.empty()) {
    refuse_to_replace_checkpoint(options.checkpoint);
  }
  const Json report = evaluate(options, ranks, progress);
  show(report, arguments);
  if (options.finished) {
    if (!arguments.quiet && arguments.html != kStandardOutput) {
      fmt::print("{} is finished already: nothing was measured again\n", printable(arguments.json));
    }
    return kExitDone;
  }
  if (report.contains("partial")) {
    throw Interrupted(options.checkpoint.empty()
                          ? "stopped on request; the figures are of what was counted until then"
                          : fmt::format("stopped on request; the figures are of what was counted "
                                        "until then,\n  which is in {};\n  repeat the command "
                                        "with --resume to continue",
                                        options.checkpoint.string()));
  }
  if (!options.checkpoint.empty()) remove_checkpoint(options.checkpoint);
  return kExitDone;
}

// Where a process was lost.
std::string hint_of(const Arguments& arguments) {
  return checkpoint_of(arguments).empty() ? "" : kResumeWithAny;
}

int run(const CLI::App& program, Arguments& arguments) {
  install_interrupt_handlers();
  Ranks ranks;
  return share_work(
      ranks, hint_of(arguments), [&] { return run_first(program, arguments, ranks); },
      [&](Progress& silent) {
        complete_options(program, arguments);
        if (!arguments.dry_run) evaluate(arguments.options, ranks, silent);
      });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program(kDescription, "oscar-eval");
  program.footer(kMethodsHelp + rivals_help() + kFooter);
  Arguments arguments;
  program.add_option("MODEL", arguments.options.model, kModelHelp)->required();
  add_measurement_options(program, arguments);
  add_text_options(program, arguments);
  add_needle_options(program, arguments.options.needle_plan, arguments.options.generate_needles);
  add_quantizer_options(program, arguments.quantizer);
  add_compute_options(program, arguments.compute);
  add_processes_option(program, arguments.processes);
  add_memory_options(program, arguments.memory);
  add_output_options(program, arguments);
  add_study_options(program, arguments.options);
  return run_program(program, argc, argv, [&] {
    return arguments.processes > 1
               ? run_processes(arguments.processes, argc, argv, hint_of(arguments))
               : run(program, arguments);
  });
}
