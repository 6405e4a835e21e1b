// oscar-bench: measures the kernels beside peers and the hardware's limits, in one process.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "bench_attention.h"
#include "bench_calibrate.h"
#include "bench_quantize.h"
#include "oscar/base/error.h"

namespace {

using oscar::Json;

std::vector<std::pair<int, int>> parse_points(const std::vector<std::string>& texts) {
  std::vector<std::pair<int, int>> points;
  for (const std::string& text : texts) {
    int batch = 0, context = 0;
    char unit = 0;
    const int parts = std::sscanf(text.c_str(), "%dx%d%c", &batch, &context, &unit);
    if (parts < 2 || batch < 1 || context < 1 || (parts == 3 && unit != 'K')) {
      throw oscar::Error({.what = "a point is BATCHxCONTEXT, for example 8x32K", .found = text});
    }
    points.emplace_back(batch, parts == 3 ? context * 1024 : context);
  }
  return points;
}

void write_file(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) throw oscar::Error({.what = "cannot write", .where = path});
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
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
  fmt::print("{:>11} {:>9} {:>9} {:>9} {:>7} {:>9} {:>9} {:>9}  (us, medians)\n", "point", "int2",
             "+windows", "page-read", "share", "bf16", "flash", "cudnn");
  for (const Json& r : records) {
    const std::string share = r.contains("paged_read_us")
                                  ? fmt::format("{:.1f}%", 100 * r["paged_read_us"].get<double>() /
                                                               r["int2_us"].get<double>())
                                  : "-";
    fmt::print("{:>11} {:>9} {:>9} {:>9} {:>7} {:>9} {:>9} {:>9}\n",
               fmt::format("{}x{}", r["batch"].get<int>(), r["context"].get<int>()),
               cell(r, "int2_us"), cell(r, "int2_windows_us"), cell(r, "paged_read_us"), share,
               cell(r, "bf16_twin_us"), cell(r, "sdpa_flash_us"), cell(r, "sdpa_cudnn_us"));
  }
}

int run(int argc, char** argv) {
  CLI::App app{"Measures the INT2 kernels beside peers and the hardware limit."};
  app.require_subcommand(1);
  std::string json_path, csv_path, shape = "qwen3-8b";
  std::vector<std::string> points = {"1x32K", "1x128K", "8x32K", "8x100K", "32x32K"};
  int replays = 21;
  bool no_bf16 = false, no_peers = false, no_ceilings = false;
  const auto outputs = [&](CLI::App* sub) {
    sub->add_option("--json", json_path, "write every number as JSON");
    sub->add_option("--csv", csv_path, "write every number as CSV");
    sub->add_option("--replays", replays, "graph replays behind each median")
        ->check(CLI::Range(3, 1000));
  };
  CLI::App* attention = app.add_subcommand("attention", "paged decode attention");
  attention->add_option("--shape", shape, "model whose heads are taken");
  attention->add_option("--points", points, "BATCHxCONTEXT, for example 8x32K")->delimiter(',');
  attention->add_flag("--no-bf16", no_bf16, "leave out our bf16 twin");
  attention->add_flag("--no-peers", no_peers, "leave out SDPA");
  attention->add_flag("--no-ceilings", no_ceilings, "leave out the read ceilings");
  outputs(attention);
  oscar::QuantizeBenchOptions quantize_options;
  CLI::App* quantize = app.add_subcommand("quantize", "quantize and append of a prefill");
  quantize->add_option("--tokens", quantize_options.tokens)->check(CLI::Range(64, 1 << 20));
  quantize->add_option("--kv-heads", quantize_options.num_kv_heads)->check(CLI::Range(1, 128));
  quantize->add_option("--head-dim", quantize_options.head_dim)
      ->check(CLI::IsMember({64, 128, 256}));
  outputs(quantize);
  CLI::App* selftest = app.add_subcommand("selftest", "checks the kernels on this GPU");
  selftest->add_option("--json", json_path, "write every number as JSON");
#if defined(OSCAR_BENCH_TORCH)
  oscar::CalibrateBenchOptions calibrate_options;
  CLI::App* calibrate = app.add_subcommand("calibrate", "collecting beside the bare forward pass");
  calibrate->add_option("CORPUS", calibrate_options.corpus, "as for oscar-calibrate")->required();
  calibrate->add_option("--model", calibrate_options.model, "folder, or tiny-gqa")
      ->capture_default_str();
  calibrate->add_option("--batch-tokens", calibrate_options.batch_tokens, "tokens run together")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  calibrate->add_option("--json", json_path, "write every number as JSON");
#endif
  CLI11_PARSE(app, argc, argv);

  const Json machine = oscar::machine_record();
  Json records;
  if (attention->parsed()) {
    records = oscar::bench_attention({.shape = oscar::attention_bench_shape(shape),
                                      .points = parse_points(points),
                                      .replays = replays,
                                      .bf16 = !no_bf16,
                                      .peers = !no_peers,
                                      .ceilings = !no_ceilings});
    print_attention(records);
  }
  if (quantize->parsed()) {
    quantize_options.replays = replays;
    records = oscar::bench_quantize(quantize_options);
    for (const Json& r : records) {
      fmt::print("{:>7}: {:.1f} us, {:.2f} x the copy of its bytes ({:.1f} us)\n",
                 r["rounding"].get<std::string>(), r["append_us"].get<double>(),
                 r["times_copy"].get<double>(), r["copy_us"].get<double>());
    }
  }
#if defined(OSCAR_BENCH_TORCH)
  if (calibrate->parsed()) {
    const Json r = oscar::bench_calibrate(calibrate_options);
    records.push_back(r);
    fmt::print("{} on {}: forward alone {:.0f} tokens/s, with all statistics {:.0f} (+{:.0f}%)\n",
               r["model"].get<std::string>(), r["device"].get<std::string>(),
               r["forward"]["tokens_per_second"].get<double>(),
               r["collect"]["tokens_per_second"].get<double>(),
               100 * r["collecting_adds"].get<double>());
  }
#endif
  if (selftest->parsed()) {
    records = oscar::bench_selftest();
    bool held = true;
    fmt::print("{}\n", machine["device"].get<std::string>());
    for (const Json& r : records) {
      held = held && r["held"].get<bool>();
      fmt::print("  {} {}: {}\n", r["held"].get<bool>() ? "ok  " : "FAIL",
                 r["check"].get<std::string>(), r["detail"].get<std::string>());
    }
    if (!held) throw oscar::Error({.what = "the kernels give wrong results on this GPU"});
  }
  if (!json_path.empty()) {
    write_file(json_path, Json{{"machine", machine}, {"records", records}}.dump(2) + "\n");
  }
  if (!csv_path.empty()) write_file(csv_path, to_csv(machine, records));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "oscar-bench: {}\n", error.what());
    return 1;
  }
}
