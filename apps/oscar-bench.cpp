// oscar-bench: measures the kernels beside peers and the hardware's limits, in one process.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "bench/attention.h"
#include "bench/calibrate.h"
#include "bench/kernels.h"
#include "common/options.h"
#include "common/output_paths.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/base/error.h"

namespace {

using oscar::Json;

std::vector<std::pair<int, int>> parse_points(const std::vector<std::string>& texts) {
  std::vector<std::pair<int, int>> points;
  for (const std::string& text : texts) {
    int batch = 0, context = 0;
    char unit = 0, rest = 0;
    const int parts = std::sscanf(text.c_str(), "%dx%d%c%c", &batch, &context, &unit, &rest);
    if (parts < 2 || parts > 3 || batch < 1 || context < 1 || (parts == 3 && unit != 'K')) {
      throw oscar::Error({.what = "a point is BATCHxCONTEXT, for example 8x32K",
                          .where = "--points",
                          .found = text});
    }
    points.emplace_back(batch, parts == 3 ? context * 1024 : context);
  }
  return points;
}

// All records as CSV; the columns are the union of their keys, in order of appearance.
std::string to_csv(const Json& machine, const Json& records) {
  std::vector<std::string> columns;
  for (const Json& record : records) {
    for (const auto& item : record.items()) {
      if (std::find(columns.begin(), columns.end(), item.key()) == columns.end()) {
        columns.push_back(item.key());
      }
    }
  }
  std::string text = "# " + machine.dump() + "\n";
  for (size_t i = 0; i < columns.size(); ++i) text += (i ? "," : "") + columns[i];
  for (const Json& record : records) {
    text += "\n";
    for (size_t i = 0; i < columns.size(); ++i) {
      if (i) text += ",";
      if (!record.contains(columns[i])) continue;
      const Json& value = record[columns[i]];
      text += value.is_number_float() ? fmt::format("{:.6g}", value.get<double>()) : value.dump();
    }
  }
  return text + "\n";
}

void print_attention(const Json& records) {
  const auto cell = [](const Json& r, const char* key) {
    return r.contains(key) ? fmt::format("{:.1f}", r[key].get<double>()) : std::string("-");
  };
  constexpr const char* kRow = "{:>10} {:>7} {:>7} {:>8} {:>8} {:>9} {:>6} {:>7} {:>7} {:>7}\n";
  fmt::print("medians in us; share: page-read / int2\n");
  fmt::print(kRow, "point", "int2", "settled", "+centers", "+windows", "page-read", "share", "bf16",
             "flash", "cudnn");
  for (const Json& r : records) {
    const std::string share = r.contains("paged_read_us")
                                  ? fmt::format("{:.1f}%", 100 * r["paged_read_us"].get<double>() /
                                                               r["int2_us"].get<double>())
                                  : "-";
    fmt::print(kRow, fmt::format("{}x{}", r["batch"].get<int>(), r["context"].get<int>()),
               cell(r, "int2_us"), cell(r, "int2_settled_us"), cell(r, "int2_centers_us"),
               cell(r, "int2_windows_us"), cell(r, "paged_read_us"), share,
               cell(r, "bf16_baseline_us"), cell(r, "sdpa_flash_us"), cell(r, "sdpa_cudnn_us"));
  }
}

void print_quantize(const Json& records) {
  for (const Json& r : records) {
    const bool corrected = r["scale_correction"] != "none";
    fmt::print("{:>33}: {:.1f} us, {:.2f} x the copy of its bytes ({:.1f} us)\n",
               r["rounding"].get<std::string>() + (corrected ? ", metric scale" : "") +
                   (r["key_centers"].get<bool>() ? ", key centers" : ""),
               r["append_us"].get<double>(), r["times_copy"].get<double>(),
               r["copy_us"].get<double>());
  }
}

void print_history(const Json& records) {
  for (const Json& r : records) {
    fmt::print("{:>20}: {:.1f} us, {:.2f} x the copy of its bytes ({:.1f} us)\n",
               r["key_centers"].get<bool>() ? "with key centers" : "without key centers",
               r["history_us"].get<double>(), r["times_copy"].get<double>(),
               r["copy_us"].get<double>());
  }
}

void print_transform(const Json& records) {
  for (const Json& r : records) {
    fmt::print(
        "{:>6} rows, {:>6}: {:.1f} us, {:.2f} x the copy of its bytes ({:.1f} us), {:.1f} "
        "TFLOP/s\n",
        r["rows"].get<int>(), r["tensors"].get<std::string>(), r["transform_us"].get<double>(),
        r["times_copy"].get<double>(), r["copy_us"].get<double>(), r["tflops"].get<double>());
  }
}

void print_selftest(const Json& records, const std::string& device) {
  fmt::print("{}\n", device);
  for (const Json& r : records) {
    fmt::print("  {} {}: {}\n", r["held"].get<bool>() ? "ok  " : "FAIL",
               r["check"].get<std::string>(), r["detail"].get<std::string>());
  }
}

#if defined(OSCAR_BENCH_TORCH)
void print_calibrate(const Json& r) {
  fmt::print("{} on {}: forward alone {:.0f} tokens/s,\nwith all statistics {:.0f} (+{:.0f}%)\n",
             r["model"].get<std::string>(), r["device"].get<std::string>(),
             r["forward"]["tokens_per_second"].get<double>(),
             r["collect"]["tokens_per_second"].get<double>(),
             100 * r["collecting_adds"].get<double>());
}
#endif

struct Arguments {
  std::string json_path, csv_path, shape = "qwen3-8b";
  std::vector<std::string> points = {"1x32K", "1x128K", "8x32K", "8x100K", "32x32K"};
  int replays = 21;
  bool centers = false, force = false, no_bf16 = false, no_peers = false, no_ceilings = false;
  oscar::QuantizeBenchOptions quantize;
  oscar::HistoryBenchOptions history;
  oscar::TransformBenchOptions transform;
#if defined(OSCAR_BENCH_TORCH)
  oscar::CalibrateBenchOptions calibrate;
#endif
};

oscar::Replace replacing(const Arguments& arguments) {
  return arguments.force ? oscar::Replace::kYes : oscar::Replace::kNo;
}

// That no output is an input or another output, and that all can be written, before the work.
void check_places(const Arguments& arguments) {
  std::vector<oscar::app::NamedPath> inputs;
#if defined(OSCAR_BENCH_TORCH)
  const oscar::CalibrateBenchOptions& calibrate = arguments.calibrate;
  if (!calibrate.corpus.empty()) {
    inputs = oscar::app::model_paths(calibrate.model);
    const auto corpus = oscar::app::corpus_paths("CORPUS", calibrate.corpus);
    inputs.insert(inputs.end(), corpus.begin(), corpus.end());
  }
#endif
  const std::vector<oscar::app::NamedPath> outputs = {{"--json", arguments.json_path},
                                                      {"--csv", arguments.csv_path}};
  oscar::app::check_outputs(inputs, outputs);
  oscar::app::probe_outputs(outputs, replacing(arguments));
}

void write_results(const Arguments& arguments, const Json& machine, const Json& records) {
  const oscar::Replace replace = replacing(arguments);
  if (!arguments.json_path.empty()) {
    const std::string text = Json{{"machine", machine}, {"records", records}}.dump(2) + "\n";
    oscar::app::write_text_output(arguments.json_path, text, replace);
  }
  if (!arguments.csv_path.empty()) {
    oscar::app::write_text_output(arguments.csv_path, to_csv(machine, records), replace);
  }
}

// The options of each subcommand.

void add_outputs(CLI::App& sub, Arguments& arguments) {
  sub.add_option("--json", arguments.json_path, "Write every number as JSON (-: to stdout)");
  sub.add_option("--csv", arguments.csv_path, "Write every number as CSV (-: to stdout)");
  sub.add_flag("--force", arguments.force, "Replace the files of --json and --csv");
}

void add_replays(CLI::App& sub, Arguments& arguments) {
  sub.add_option("--replays", arguments.replays, "Graph replays behind each median")
      ->check(CLI::Range(3, 1000))
      ->capture_default_str();
}

void add_heads(CLI::App& sub, int& num_kv_heads, int& head_dim) {
  sub.add_option("--kv-heads", num_kv_heads, "KV heads")
      ->check(CLI::Range(1, 128))
      ->capture_default_str();
  sub.add_option("--head-dim", head_dim, "64, 128 or 256")
      ->check(CLI::IsMember({64, 128, 256}))
      ->capture_default_str();
}

void add_attention(CLI::App& program, Arguments& arguments) {
  CLI::App& sub =
      *program.add_subcommand("attention", "Paged INT2 decode beside bf16 and bare reading");
  sub.add_option("--shape", arguments.shape,
                 "Model whose heads are taken:\n" + oscar::attention_bench_shapes())
      ->capture_default_str();
  sub.add_option("--points", arguments.points, "BATCHxCONTEXT, separated by commas; K is 1024")
      ->delimiter(',')
      ->capture_default_str();
  sub.add_flag("--centers", arguments.centers, "Measure int2 with key centers besides");
  sub.add_flag("--no-bf16", arguments.no_bf16, "Leave out the same kernel over bf16 pages");
  sub.add_flag("--no-peers", arguments.no_peers, "Leave out SDPA (flash, cuDNN)");
  sub.add_flag("--no-ceilings", arguments.no_ceilings, "Leave out bare reading");
  add_replays(sub, arguments);
  add_outputs(sub, arguments);
}

void add_quantize(CLI::App& program, Arguments& arguments) {
  CLI::App& sub =
      *program.add_subcommand("quantize", "Quantize and append of a prefill beside a copy");
  oscar::QuantizeBenchOptions& options = arguments.quantize;
  sub.add_option("--tokens", options.tokens, "Tokens of the call")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  add_heads(sub, options.num_kv_heads, options.head_dim);
  sub.add_flag("--centers", options.centers,
               "Measure each way of writing with key centers besides");
  add_replays(sub, arguments);
  add_outputs(sub, arguments);
}

void add_transform(CLI::App& program, Arguments& arguments) {
  CLI::App& sub =
      *program.add_subcommand("transform", "Rows in and out of the cache's basis beside a copy");
  oscar::TransformBenchOptions& options = arguments.transform;
  sub.add_option("--rows", options.rows, "Rows of a call, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  sub.add_option("--qo-heads", options.num_qo_heads, "Query heads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  add_heads(sub, options.num_kv_heads, options.head_dim);
  add_replays(sub, arguments);
  add_outputs(sub, arguments);
}

void add_history(CLI::App& program, Arguments& arguments) {
  CLI::App& sub = *program.add_subcommand("history", "INT2 tokens back to rows beside a copy");
  oscar::HistoryBenchOptions& options = arguments.history;
  sub.add_option("--tokens", options.tokens, "INT2 tokens of the request")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  add_heads(sub, options.num_kv_heads, options.head_dim);
  add_replays(sub, arguments);
  add_outputs(sub, arguments);
}

#if defined(OSCAR_BENCH_TORCH)
void add_calibrate(CLI::App& program, Arguments& arguments) {
  CLI::App& sub =
      *program.add_subcommand("calibrate", "Collecting statistics beside the bare forward pass");
  oscar::CalibrateBenchOptions& options = arguments.calibrate;
  sub.add_option("CORPUS", options.corpus, "Text or token ids, as for oscar-calibrate")->required();
  sub.add_option("--model", options.model, oscar::app::kModelHelp)->capture_default_str();
  sub.add_option("--batch-tokens", options.batch_tokens, "Tokens run together")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  add_outputs(sub, arguments);
}
#endif

// What the subcommand measures; on standard output with `table`.
Json measure(const CLI::App& program, Arguments& arguments, const Json& machine, bool table) {
  const auto shown = [table](Json records, const auto& print) {
    if (table) print(records);
    return records;
  };
  arguments.quantize.replays = arguments.history.replays = arguments.transform.replays =
      arguments.replays;
  if (program.got_subcommand("attention")) {
    return shown(oscar::bench_attention({.shape = oscar::attention_bench_shape(arguments.shape),
                                         .points = parse_points(arguments.points),
                                         .replays = arguments.replays,
                                         .centers = arguments.centers,
                                         .bf16 = !arguments.no_bf16,
                                         .peers = !arguments.no_peers,
                                         .ceilings = !arguments.no_ceilings}),
                 print_attention);
  }
  if (program.got_subcommand("quantize")) {
    return shown(oscar::bench_quantize(arguments.quantize), print_quantize);
  }
  if (program.got_subcommand("history")) {
    return shown(oscar::bench_history(arguments.history), print_history);
  }
  if (program.got_subcommand("transform")) {
    return shown(oscar::bench_transform(arguments.transform), print_transform);
  }
#if defined(OSCAR_BENCH_TORCH)
  if (program.got_subcommand("calibrate")) {
    return shown(Json::array({oscar::bench_calibrate(arguments.calibrate)}),
                 [](const Json& records) { print_calibrate(records.front()); });
  }
#endif
  return shown(oscar::bench_selftest(), [&](const Json& records) {
    print_selftest(records, machine["device"].get<std::string>());
  });
}

int run(const CLI::App& program, Arguments& arguments) {
  check_places(arguments);
  const Json machine = oscar::machine_record();
  // Standard output is the table's or a file's.
  const bool table = arguments.json_path != oscar::app::kStandardOutput &&
                     arguments.csv_path != oscar::app::kStandardOutput;
  const Json records = measure(program, arguments, machine, table);
  write_results(arguments, machine, records);
  const auto failed = [](const Json& r) { return r.contains("held") && !r["held"].get<bool>(); };
  if (std::any_of(records.begin(), records.end(), failed)) {
    throw oscar::Error({.what = "the kernels give wrong results on this GPU"});
  }
  return oscar::app::kExitDone;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program{"Times the kernels, and collecting statistics, beside what bounds them",
                   "oscar-bench"};
  program.require_subcommand(1);
  Arguments arguments;
  add_attention(program, arguments);
  add_quantize(program, arguments);
  add_transform(program, arguments);
  add_history(program, arguments);
  add_outputs(*program.add_subcommand("selftest", "Check attention on this GPU"), arguments);
#if defined(OSCAR_BENCH_TORCH)
  add_calibrate(program, arguments);
#endif
  return oscar::app::run_program(program, argc, argv, [&] { return run(program, arguments); });
}
