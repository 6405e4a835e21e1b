// Sub-commands for other tools: export, import, fold.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bundle/commands.h"
#include "common/options.h"
#include "common/output_paths.h"
#include "common/program.h"
#include "common/terminal.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/fold.h"
#include "oscar/bundle/import.h"
#include "oscar/fit/fit.h"

namespace oscar::app {

// oscar-bundle export: a bundle in the files of a backend.

namespace {

struct ExportArguments {
  std::string input, output, backend, base;
  std::vector<std::string> evaluations;
  bool reduce = false;
};

void print_files(const std::vector<std::string>& files) {
  for (const std::string& name : files) print_line("file        " + name);
}

int run_export(const ExportArguments& arguments) {
  if (arguments.backend == kStatisticsExport) {
    const Bundle bundle = read_bundle(arguments.input);
    print_files(export_statistics(bundle, arguments.input, arguments.output));
    print_line(fmt::format("wrote       {}, {} layers, {} tokens", arguments.output,
                           bundle.statistics.size(), bundle.corpus.tokens));
    return kExitDone;
  }
  const ExchangeFormat& format = find_exchange_format(arguments.backend, kStatisticsExport);
  Bundle bundle = read_bundle(arguments.input);
  if (auto measured = read_evaluation(bundle, arguments.evaluations)) {
    bundle.evaluation = std::move(measured);
  }
  const ExportResult result = export_bundle(bundle, arguments.input, format, arguments.reduce,
                                            arguments.output, arguments.base);
  const std::string said =
      result.plan ? plans_json({*result.plan})[0]["line"].get<std::string>() : "holds all of it";
  print_line(fmt::format("{}: {}", format.name, said));
  if (result.plan && result.plan->verdict() == BackendVerdict::kPortable) {
    if (const std::string word = left_out_evaluation(bundle); !word.empty()) warn(word);
  }
  if (result.plan && is_not_to_serve(*result.plan->run)) {
    warn(
        "do not serve this export: as measured, what the backend runs of the bundle loses too "
        "much");
  }
  if (!result.warning.empty()) warn(result.warning);
  print_files(result.files);
  print_line(fmt::format("wrote       {}, {} layers, read back and checked", arguments.output,
                         result.layers));
  return kExitDone;
}

}  // namespace

void add_export(CLI::App& program, Work& work) {
  add_command<ExportArguments>(
      program, work, "export", "Write a bundle in the files of a backend", run_export,
      [](CLI::App& sub, ExportArguments& arguments) {
        sub.add_option("BUNDLE", arguments.input, "Rotation bundle")->required();
        sub.add_option("--for", arguments.backend,
                       "sglang-v1, sglang-v2, sglang-0c88a, vllm-pr46774,\n"
                       "mlx, gguf-rot; or npz, safetensors: plain arrays, which\n"
                       "hold any bundle; or statistics: its sums, as .npz")
            ->required()
            ->option_text("BACKEND REQUIRED");
        sub.add_option("-o,--output", arguments.output,
                       "Folder to write; must not exist. Its README has the\n"
                       "server's variables and launch line")
            ->required();
        sub.add_flag("--reduce", arguments.reduce,
                     "Where the backend cannot run the bundle's own\n"
                     "transforms, write the portable variant and say what\n"
                     "error is predicted");
        add_evaluations_option(sub, arguments.evaluations);
        sub.add_option("--base", arguments.base,
                       "With gguf-rot: a .gguf of the model, of any\n"
                       "quantization (other weights are refused); the file is\n"
                       "then a copy of it with the rotations, as llama.cpp's\n"
                       "branch reads them")
            ->option_text("MODEL.gguf");
      });
}

// oscar-bundle import: transforms of other tools as a bundle.

namespace {

struct ImportArguments {
  std::vector<std::string> inputs;
  std::string model, output, backend, clip, rope_scaling, statistics;
  ImportOptions options;
  WriterOptions writer;
  const CLI::App* program = nullptr;  // which says what was given
  bool force = false;
};

const Backend& served_backend(const std::string& name) {
  const Backend& backend = find_backend(name);
  if (is_served(backend)) return backend;
  throw UsageError(
      {.what = "not served yet, because\n  " + codec_gap(backend, default_codec(backend)),
       .where = "--for " + name,
       .expected = backend_names(true)});
}

// The cache that was asked for; what was not asked for is the exported bundle's, where there is
// one. With --for in the codec of that backend, so that the bundle runs there as it is.
CacheFormat format_of(const ImportArguments& arguments, const std::optional<ExportOrigin>& origin,
                      int head_dim) {
  const CacheFormat& parsed = arguments.options.quantizer;
  const CacheFormat kept =
      origin ? with_given(*arguments.program, parsed, origin->quantizer) : parsed;
  if (arguments.backend.empty()) return kept;
  const Backend& backend = served_backend(arguments.backend);
  CacheFormat quantizer = default_codec(backend);
  if (arguments.program->get_option("--metadata-dtype")->count() > 0) {
    quantizer.metadata_dtype = parsed.metadata_dtype;
    take_rules_of(backend, quantizer);
    const std::string gap = codec_gap(backend, quantizer);
    if (!gap.empty()) {
      throw UsageError(
          {.what = std::string(backend.name) + " is not served with it:\n  " + gap,
           .where = std::string("--metadata-dtype ") + codec_word(quantizer.metadata_dtype)});
    }
  }
  quantizer.sink_tokens = kept.sink_tokens;
  quantizer.recent_tokens = kept.recent_tokens;
  quantizer.demote_block = kept.demote_block;
  const int named = parsed.quant_group_size;
  quantizer.quant_group_size =
      named != 0 ? named : group_size_for(backend.quant_group_sizes, head_dim);
  if (named == 0 && quantizer.quant_group_size != 0 && head_dim % quantizer.quant_group_size != 0) {
    throw UsageError({.what = "no quantization group of this backend divides a head",
                      .where = "--for " + arguments.backend,
                      .expected = fmt::format("a divisor of {}, the model's head_dim", head_dim),
                      .found = fmt::format("{}", fmt::join(backend.quant_group_sizes, ", "))});
  }
  return quantizer;
}

// What is read to make the bundle.
std::vector<std::string> inputs_of(const ImportArguments& arguments) {
  std::vector<std::string> inputs = arguments.inputs;
  for (const NamedPath& file : model_paths(arguments.model)) inputs.push_back(file.path.string());
  if (!arguments.statistics.empty()) inputs.push_back(arguments.statistics);
  return inputs;
}

// The options of the writer, which mean nothing without sums.
constexpr const char* kWriterOptions[] = {"--rounding", "--scale-correction", "--center",
                                          "--position-span"};

void check_writer(const ImportArguments& arguments) {
  if (!arguments.statistics.empty() && !arguments.backend.empty()) {
    throw UsageError({.what = "backends of other servers write rows plainly",
                      .where = "--statistics with --for " + arguments.backend});
  }
  for (const char* option : kWriterOptions) {
    if (arguments.statistics.empty() && arguments.program->get_option(option)->count() > 0) {
      throw UsageError(
          {.what = "what writes rows so follows from the sums of a calibration",
           .where = option,
           .hint = "give --statistics FILE, a bundle of oscar-calibrate of this model"});
    }
  }
}

int run_import(const ImportArguments& arguments) {
  check_output(inputs_of(arguments), arguments.output,
               arguments.force ? Replace::kYes : Replace::kNo);
  if (!arguments.backend.empty()) served_backend(arguments.backend);  // before anything is read
  check_writer(arguments);
  const auto rope = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const Checkpoint checkpoint = open_checkpoint(arguments.model, rope);
  ImportOptions options = arguments.options;
  if (!arguments.clip.empty()) {
    FitArguments given;
    given.clip = arguments.clip;
    const FitOptions fit = given.resolve();
    options.clip = ClipPair{fit.clip_k, fit.clip_v};
  }
  // Written as a calibration's rows are, they are clipped as its recipe begins.
  if (!arguments.statistics.empty() && arguments.writer.rounding == Rounding::kShaped) {
    const FitOptions& recipe = presets().front().fit;
    options.default_clip = {recipe.clip_k, recipe.clip_v};
  }
  const ReadTransforms read = read_transforms({arguments.inputs.begin(), arguments.inputs.end()},
                                              checkpoint.config.num_layers);
  options.quantizer = format_of(arguments, read.origin, checkpoint.config.head_dim);
  Bundle bundle = import_bundle(read, checkpoint, options);
  if (!arguments.statistics.empty()) {
    bundle = set_writer(std::move(bundle), read_bundle(arguments.statistics), arguments.writer,
                        arguments.output, arguments.statistics);
  }
  print_layer_warnings(bundle);
  write_bundle(bundle, arguments.output, arguments.force);
  print_line(fmt::format("read        {}, {} layers", read.kind, read.set.size()));
  print_line(fmt::format("wrote       {} as method {}, {}", arguments.output, bundle.method,
                         bundle.granularity));
  return kExitDone;
}

void add_writer_options(CLI::App& sub, ImportArguments& arguments) {
  const char* const section = "Writer";
  WriterOptions& writer = arguments.writer;
  sub.add_option("--statistics", arguments.statistics,
                 "A statistics file of this model, or a bundle that holds\n"
                 "statistics: rows are then written as a calibration's\n"
                 "are. Without it they are rounded to the nearest code")
      ->option_text("FILE")
      ->group(section);
  add_choice<Rounding>(sub, "--rounding", writer.rounding,
                       {{"shaped", Rounding::kShaped}, {"plain", Rounding::kPlain}},
                       "With --statistics: noise-shaped rounding of codes\n"
                       "(default), or nearest")
      ->group(section);
  add_choice<ScaleCorrection>(sub, "--scale-correction", writer.scale_correction,
                              {{"metric", ScaleCorrection::kMetric},
                               {"unbiased", ScaleCorrection::kUnbiased},
                               {"none", ScaleCorrection::kNone}},
                              "With --statistics: correction of the stored scale\n"
                              "(default: metric)")
      ->group(section);
  add_choice<bool>(sub, "--center", writer.center, {{"on", true}, {"off", false}},
                   "With --statistics: take the mean key and value off,\n"
                   "where the files give no means (default: on)")
      ->group(section);
  sub.add_option("--position-span", writer.position_span,
                 "With --statistics: positions that will be served\n"
                 "(default: as recorded there)")
      ->check(CLI::NonNegativeNumber)
      ->option_text("N")
      ->group(section);
}

}  // namespace

void add_import(CLI::App& program, Work& work) {
  add_command<ImportArguments>(
      program, work, "import", "Make a bundle of transforms from elsewhere", run_import,
      [](CLI::App& sub, ImportArguments& arguments) {
        add_files(sub, arguments.inputs, 1,
                  "A folder of an export or of mlx-lm; SGLang's two .pt\n"
                  "files; a .gguf with attn_k_rot; one .npz or .safetensors\n"
                  "with k_rotation and v_rotation [layers, heads, d, d],\n"
                  "and what else docs/exchange.md names");
        sub.add_option("--model", arguments.model,
                       "Its Hugging Face folder, .gguf file or name: that of\n"
                       "a model on the Hub, tiny-gqa, or smollm2 or\n"
                       "qwen2.5-coder-1.5b, once python -m oscar_int2 fetch\n"
                       "NAME has fetched it")
            ->required();
        sub.add_option("-o,--output", arguments.output, "Bundle to write")->required();
        sub.add_option("--name", arguments.options.name, "Of the method, in the bundle")
            ->capture_default_str();
        sub.add_option("--for", arguments.backend, "Rows in the codec of this backend")
            ->option_text("BACKEND");
        sub.add_option("--clip", arguments.clip,
                       "K,V where the files hold no ratios (default: the\n"
                       "export's, else 0.96,0.92; 0.92,0.92 with shaped\n"
                       "rounding, as the recipe without a search)")
            ->check([](const std::string& text) {
              return text.find(',') == std::string::npos ? "not two ratios K,V" : "";
            })
            ->option_text("K,V");
        sub.add_option("--rope-scaling", arguments.rope_scaling,
                       "JSON, where the model is served with it");
        add_choice<AcceptedWeights>(
            sub, "--weights", arguments.options.weights,
            {{"same", AcceptedWeights::kSame}, {"any", AcceptedWeights::kAny}},
            "same: an export of a bundle of other weights is\n"
            "refused (default). any: it is taken, and the bundle\n"
            "says so in a warning; for a fine-tune of that model");
        add_writer_options(sub, arguments);
        sub.add_flag("--force", arguments.force, "Replace the output if it exists");
        add_quantizer_options(sub, arguments.options.quantizer);
        for (const char* option : {"--sink", "--recent", "--metadata-dtype", "--demote-block"}) {
          CLI::Option* const given = sub.get_option(option);
          given->default_str(given->get_default_str() + ", or the export's");
        }
        sub.get_option("--quant-group-size")
            ->description(
                "Values that share scale and zero (default: head_dim,\n"
                "or the export's)");
        arguments.program = &sub;
      });
}

// oscar-bundle fold: value transforms into a copy of the model.

namespace {

struct FoldArguments {
  std::string bundle, model, output, rope_scaling;
  ValueMean value_mean = ValueMean::kAuto;
};

std::string gets_in_llama_cpp(ValueMean mean) {
  const bool uncentered = mean == ValueMean::kKeep || mean == ValueMean::kDrop;
  return std::string("llama.cpp   needs no bundle: its cache gets the transformed values") +
         (uncentered ? ", not centered" : "");
}

int fold(const FoldArguments& arguments) {
  const auto rope = parse_json_option(arguments.rope_scaling, "--rope-scaling");
  const Checkpoint checkpoint = open_checkpoint(arguments.model, rope);
  for (const std::string& warning : checkpoint.warnings) warn(warning);
  const auto result = fold_model(read_bundle(arguments.bundle), arguments.bundle, checkpoint,
                                 arguments.output, arguments.value_mean);
  if (!result.warning.empty()) warn(result.warning);
  for (const auto& name : result.left_out) {
    const bool adapter = name.starts_with("adapter_");
    print_line("not copied  " + name + (adapter ? " (the adapter is not folded)" : ""));
  }
  print_line(fmt::format("folded      {} tensors of {} layers, {} as bundle", result.tensors,
                         result.layers, kFoldedBundleName));
  if (result.mean != ValueMean::kAuto) {
    print_line(fmt::format("value mean  {}", describe(result.mean)));
  }
  if (gguf_file_of(arguments.model)) print_line(gets_in_llama_cpp(result.mean));
  print_line(fmt::format("check       attention's contribution changes by {:.2g} at most, relative",
                         result.largest_change));
  print_line(fmt::format("wrote       {}", arguments.output));
  return kExitDone;
}

}  // namespace

void add_fold(CLI::App& program, Work& work) {
  add_command<FoldArguments>(
      program, work, "fold", "Fold value transforms into a copy of the model", fold,
      [](CLI::App& sub, FoldArguments& arguments) {
        sub.add_option("BUNDLE", arguments.bundle, "Rotation bundle of the model")->required();
        sub.add_option("MODEL", arguments.model,
                       "Its Hugging Face folder, its .gguf file in F16,\n"
                       "BF16 or F32 (for llama.cpp and what is made of it),\n"
                       "or tiny-gqa")
            ->required();
        sub.add_option("OUT", arguments.output, "Folder to write; must not exist")->required();
        add_choice<ValueMean>(sub, "--value-mean", arguments.value_mean,
                              {{"auto", ValueMean::kAuto},
                               {"fold", ValueMean::kFold},
                               {"keep", ValueMean::kKeep},
                               {"drop", ValueMean::kDrop}},
                              "Where values are centered: fold the mean into\n"
                              "biases, keep it in the bundle (for servers that\n"
                              "center; llama.cpp does not), drop it (values are\n"
                              "then not centered), or auto: fold if v_proj and\n"
                              "o_proj have biases, else keep");
        sub.add_option("--rope-scaling", arguments.rope_scaling,
                       "JSON, where the model was calibrated with it");
      });
}

}  // namespace oscar::app
