// Option tables and the parsing of their values.
#include "common/options.h"

#include <fmt/format.h>
#include <cmath>
#include <cstdlib>

#include "common/program.h"
#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/fit/fit.h"

namespace oscar::app {

// From command-line words to a limited choice.

namespace {

// The options that name a value, with that word; "auto" names none.
NamedOptions named_options(const CLI::App& program) {
  NamedOptions named;
  for (const char* name : {"--method", "--granularity", "--center", "--key-centers", "--rounding",
                           "--scale-correction", "--clip", "--quant-group-size", "--metadata-dtype",
                           "--sink", "--recent"}) {
    const CLI::Option* option = program.get_option(name);
    if (option->count() > 0 && option->as<std::string>() != "auto") {
      named[name] = option->as<std::string>();
    }
  }
  return named;
}

std::string in_words(const ErrorInfo& info) {
  std::string text = info.what;
  if (!info.expected.empty()) text += "\n  expected: " + info.expected;
  return info.hint.empty() ? text : text + "\n  " + info.hint;
}

}  // namespace

void add_backend_option(CLI::App& program, std::string& backend) {
  program
      .add_option("--for", backend,
                  fmt::format("Only what this backend runs, with its codec:\n{}\n(not yet: "
                              "{};\noscar-bundle backends says why)",
                              backend_names(true), backend_names(false)))
      ->option_text("BACKEND")
      ->group("Fit");
}

BackendChoice choose_for_backend(const CLI::App& program, const std::string& backend,
                                 const FitArguments& fit, const CacheFormat& quantizer) {
  BackendChoice choice;
  try {
    const auto restricted = [&](bool for_backend) {
      return restrict_to(find_backend(backend),
                         {fit.resolve(), fit.resolve_search(for_backend), quantizer},
                         named_options(program));
    };
    choice = restricted(true);
    if (choice.fit == fit.resolve()) choice = restricted(false);  // nothing had to give way
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    throw CLI::ValidationError(info.where.empty() ? "--for " + backend : info.where,
                               in_words(info));
  }
  if (program.count("--search") > 0 && fit.search != "off" && !choice.search.any()) {
    throw CLI::ValidationError(
        "--search " + fit.search,
        fmt::format("nothing is left to search, as {} and the options given fix it all:\n"
                    "  leave out --search",
                    backend));
  }
  return choice;
}

namespace {

std::string preset_help() {
  std::string text = "Recipe of the fit:";
  for (const Preset& preset : presets())
    text += fmt::format("\n{}: {}", preset.name, preset.summary);
  return text;
}

double parse_ratio(const std::string& text, const std::string& whole) {
  char* end = nullptr;
  const double ratio = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(ratio > 0.0 && ratio <= 1.0)) {
    throw UsageError({.what = "malformed clipping ratios",
                      .where = "--clip",
                      .expected = "search, off, or K,V with each in (0, 1], for example 0.96,0.92",
                      .found = whole});
  }
  return ratio;
}

void parse_clip(const std::string& text, FitOptions& fit) {
  if (text == "off") {
    fit.clip_k = fit.clip_v = 0.0;
    return;
  }
  const size_t comma = text.find(',');
  fit.clip_k = parse_ratio(text.substr(0, comma), text);
  fit.clip_v = parse_ratio(comma == std::string::npos ? "" : text.substr(comma + 1), text);
}

CLI::Validator count(const char* name, const char* expected, int64_t least) {
  return CLI::Validator(
      [expected, least](std::string& text) -> std::string {
        const std::optional<int64_t> value = parse_count(text);
        if (value && *value >= least) {
          text = std::to_string(*value);
          return "";
        }
        return fmt::format("must be a whole number {} (or 64K, 1M, 1e4), not {}", expected,
                           printable(text));
      },
      name);
}

// At most kLargestWindow, so that what is not checked against a model is no absurdity either.
CLI::Validator window_limit() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        if (std::strtod(text.c_str(), nullptr) <= kLargestWindow) return "";
        return fmt::format("must be at most {}, not {}", kLargestWindow, text);
      },
      "");
}

// A device by its name, in any case. Whether the machine has it shows later.
CLI::Validator device_name() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        const std::string name = CLI::detail::to_lower(text);
        const std::string index = name.starts_with("cuda:") ? name.substr(5) : "0";
        const bool known = name == "auto" || name == "cpu" || name.starts_with("cuda");
        const bool number = !index.empty() && index.size() <= 3 &&
                            index.find_first_not_of("0123456789") == std::string::npos;
        if (known && number && (name.size() <= 4 || name[4] == ':')) {
          text = name;
          return "";
        }
        const std::string nearest = nearest_word(name, {"auto", "cpu", "cuda"});
        return fmt::format("must be auto, cpu, cuda or cuda:INDEX, not {}{}", printable(text),
                           nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest));
      },
      "");
}

// The options that can leave a part of the fit to held-out loss, and their word for that.
struct SearchableOption {
  const char* name;
  const char* open;
  std::string FitArguments::*text;
  bool SearchOptions::*part;
};
constexpr SearchableOption kSearchableOptions[] = {
    {"--method", "auto", &FitArguments::method, &SearchOptions::kind},
    {"--center", "auto", &FitArguments::center, &SearchOptions::center},
    {"--granularity", "auto", &FitArguments::granularity, &SearchOptions::granularity},
    {"--row-weights", "auto", &FitArguments::row_weights, &SearchOptions::row_weights},
    {"--key-centers", "auto", &FitArguments::key_centers, &SearchOptions::key_centers},
    {"--clip", "search", &FitArguments::clip, &SearchOptions::clip},
    {"--rounding", "auto", &FitArguments::rounding, &SearchOptions::rounding},
    {"--scale-correction", "auto", &FitArguments::scale_correction,
     &SearchOptions::scale_correction}};

constexpr const char* kOrthogonal = "orthogonal";  // --method: rotations alone, by held-out loss

bool leaves_open(const SearchableOption& option, const std::string& text) {
  return text == option.open || (option.part == &SearchOptions::kind && text == kOrthogonal);
}

// The value whose name is `text`; CLI11 has checked that there is one.
template <typename Value, typename Name>
void choose(const std::string& text, std::initializer_list<Value> values, Name name, Value& out) {
  for (const Value value : values) {
    if (text == name(value)) out = value;
  }
}

}  // namespace

CLI::Validator positive() { return count("POSITIVE", "above 0", 1); }

CLI::Validator non_negative() { return count("NONNEGATIVE", "from 0 on", 0); }

void add_strict(CLI::App& program, bool& strict, const std::string& section) {
  program
      .add_flag("--strict", strict,
                "Rows of text that hold no document end the run (default: they are left out and "
                "counted)")
      ->group(section);
}

CLI::Validator one_of(const std::vector<std::string>& words) {
  return CLI::IsMember(words, CLI::ignore_case);
}

FitOptions FitArguments::resolve() const {
  FitOptions fit = find_preset(preset).fit;
  using enum TransformKind;
  choose(method, {kBalanced, kOscar, kHadamard, kIdentity}, method_name, fit.kind);
  if (method == kOrthogonal && fit.kind == kBalanced) fit.kind = kOscar;
  choose(objective_v, {ValueObjective::kAttentionOutput, ValueObjective::kEnergy}, objective_name,
         fit.objective_v);
  choose(granularity, {Granularity::kPerHead, Granularity::kShared}, granularity_name,
         fit.granularity);
  choose(row_weights, {RowWeights::kEven, RowWeights::kAttention}, row_weights_name,
         fit.row_weights);
  choose(rounding, {Rounding::kShaped, Rounding::kPlain}, rounding_name, fit.rounding);
  choose(scale_correction,
         {ScaleCorrection::kNone, ScaleCorrection::kUnbiased, ScaleCorrection::kMetric},
         scale_correction_name, fit.scale_correction);
  if (!center.empty() && center != "auto") fit.center = center == "on";
  if (!key_centers.empty() && key_centers != "auto") fit.key_centers = key_centers == "two";
  if (!clip.empty() && clip != "search") parse_clip(clip, fit);
  if (position_span) fit.position_span = *position_span;
  if (!key_centers_problem(fit).empty()) {
    if (key_centers == "two") {
      throw UsageError(
          {.what = "keys can't have two centers with these options",
           .where = "--key-centers two",
           .expected = "--row-weights attention, --center on and a position span above 0"});
    }
    fit.key_centers = false;
  }
  return fit;
}

SearchOptions FitArguments::resolve_search(bool for_backend) const {
  SearchOptions result =
      for_backend ? find_preset(preset).server_search : find_preset(preset).search;
  for (const SearchableOption& option : kSearchableOptions) {
    const std::string& text = this->*option.text;
    if (!text.empty()) result.*option.part = leaves_open(option, text);
  }
  result.key_centers = result.key_centers && key_centers_problem(resolve()).empty();
  result.orthogonal = method == kOrthogonal;
  result.fallback = result.fallback && (method.empty() || method == "auto");
  return search == "off" ? SearchOptions{} : result;
}

void FitArguments::check_search(bool asked) const {
  if (search == "off") {
    for (const SearchableOption& option : kSearchableOptions) {
      if (!leaves_open(option, this->*option.text)) continue;
      throw CLI::ValidationError(
          fmt::format("{} {}", option.name, this->*option.text),
          fmt::format("needs a search, and --search is off:\n  name a value for {}, or leave out "
                      "--search off",
                      option.name));
    }
  } else if (asked && !resolve_search().any()) {
    throw CLI::ValidationError(
        "--search " + search,
        fmt::format("nothing is left to search, as preset {} and the options given fix it all:\n"
                    "  open a part (--clip search, --method auto), use --preset best, or leave "
                    "out --search",
                    preset));
  }
}

void add_fit_options(CLI::App& program, FitArguments& arguments, bool searchable) {
  const char* const section = "Fit";
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  program.add_option("--preset", arguments.preset, preset_help())
      ->transform(one_of(names))
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--clip", arguments.clip,
                  searchable ? "search, off, or clipping ratios K,V in (0,1]"
                             : "off, or clipping ratios K,V in (0,1]")
      ->check([searchable](const std::string& text) {
        return text == "search" && !searchable ? std::string("a search needs the model") : "";
      })
      ->group(section);
  if (searchable) {
    program
        .add_option(
            "--search", arguments.search,
            "Let held-out text decide what is open: clipping in preset best, with --for all "
            "that the server takes")
        ->transform(one_of({"on", "off"}))
        ->capture_default_str()
        ->group(section);
    program.parse_complete_callback(
        [&program, &arguments] { arguments.check_search(program.count("--search") > 0); });
  }
  program
      .add_option("--position-span", arguments.position_span,
                  "Fit for positions 0 to N (default: all that the model serves; 0: as collected)")
      ->transform(non_negative())
      ->group(section);
}

void add_fit_study_options(CLI::App& program, FitArguments& arguments, bool searchable) {
  // One value of `allowed`, or auto where held-out loss may decide.
  const auto add = [&](const char* name, std::string& value, const std::string& help,
                       std::vector<std::string> allowed, bool automatic) {
    if (automatic && searchable) allowed.insert(allowed.begin(), "auto");
    program.add_option(name, value, help)->transform(one_of(allowed))->group(kStudySection);
  };
  std::vector<std::string> methods = {"balanced", "oscar", "hadamard", "identity"};
  if (searchable) methods.insert(methods.begin(), kOrthogonal);
  add("--method", arguments.method, "Transform of keys and values", std::move(methods), true);
  add("--objective-v", arguments.objective_v,
      "Value covariance: attention output (sv), or the published energy proxy (a second pass)",
      {"sv", "energy"}, false);
  add("--granularity", arguments.granularity, "One transform per KV head, or one per layer",
      {"per-head", "shared"}, true);
  add("--row-weights", arguments.row_weights,
      "Rows count alike, or by the attention that they receive in the 2-bit history",
      {"even", "attention"}, true);
  add("--center", arguments.center, "Subtract the mean key and value before rounding",
      {"on", "off"}, true);
  add("--key-centers", arguments.key_centers,
      "Keys about one mean, or about the nearer of two centers of each 1024 positions",
      {"one", "two"}, true);
  add("--rounding", arguments.rounding, "Noise-shaped rounding of codes, or nearest",
      {"shaped", "plain"}, true);
  add("--scale-correction", arguments.scale_correction, "Correction of the stored scale",
      {"none", "unbiased", "metric"}, true);
}

void add_quantizer_options(CLI::App& program, CacheFormat& settings) {
  const char* const section = "Cache format";
  settings.quant_group_size = 0;
  program.add_option("--sink", settings.sink_tokens, "First tokens kept in BF16")
      ->transform(non_negative())
      ->check(window_limit())
      ->capture_default_str()
      ->group(section);
  program.add_option("--recent", settings.recent_tokens, "Last tokens kept in BF16")
      ->transform(positive())
      ->check(window_limit())
      ->capture_default_str()
      ->group(section);
  program
      .add_option("--quant-group-size", settings.quant_group_size,
                  "Values that share scale and zero (default: head_dim)")
      ->transform(positive())
      ->group(section);
  program
      .add_option_function<std::string>(
          "--metadata-dtype",
          [&settings](const std::string& word) { parse_codec_word(word, settings.metadata_dtype); },
          "Of scale and zero")
      ->transform(one_of({"fp16", "bf16", "fp32"}))
      ->default_str(codec_word(settings.metadata_dtype))
      ->group(section);
  program
      .add_option("--demote-block", settings.demote_block,
                  "Tokens that leave the recent window at once")
      ->transform(positive())
      ->capture_default_str()
      ->group(section);
}

CacheFormat with_given(const CLI::App& program, const CacheFormat& parsed, CacheFormat settings) {
  const auto take = [&program](const char* option, auto& value, const auto& given) {
    if (program.get_option(option)->count() > 0) value = given;
  };
  take("--sink", settings.sink_tokens, parsed.sink_tokens);
  take("--recent", settings.recent_tokens, parsed.recent_tokens);
  take("--quant-group-size", settings.quant_group_size, parsed.quant_group_size);
  take("--metadata-dtype", settings.metadata_dtype, parsed.metadata_dtype);
  take("--demote-block", settings.demote_block, parsed.demote_block);
  return settings;
}

void add_compute_options(CLI::App& program, ComputeArguments& arguments) {
  const char* const section = "Machine";
  program.add_option("--device", arguments.device, "auto, cpu, cuda or cuda:INDEX")
      ->transform(device_name())
      ->capture_default_str()
      ->group(section);
  program.add_option("--dtype", arguments.dtype, "Precision: auto is bf16 on a GPU, else fp32")
      ->transform(one_of({"auto", "bf16", "fp32"}))
      ->capture_default_str()
      ->group(section);
}

void add_memory_options(CLI::App& program, MemoryArguments& arguments) {
  const char* const section = "Machine";
  program
      .add_option("--host-memory", arguments.host_memory,
                  "Memory that may be used, for example 8G (default: what is free)")
      ->group(section);
  program.add_option("--gpu-memory", arguments.gpu_memory, "The same for the GPU")->group(section);
}

namespace {

constexpr const char* kSizeExpected = "a number with K, M, G or T, for example 8G";

// A number without a unit that nobody means in bytes: 80 is of GiB, 81920 of MiB.
void refuse_bare_size(const std::string& text, double bytes, const char* option) {
  constexpr double kLeastBytes = 1 << 20, kMostGib = 4096;
  if (bytes >= kLeastBytes || text.find_first_not_of("0123456789.") != std::string::npos) return;
  throw UsageError({.what = "a memory size without a unit",
                    .where = option,
                    .expected = kSizeExpected,
                    .found = text + ", which is in bytes",
                    .hint = fmt::format("did you mean {}{}?", text, bytes < kMostGib ? 'G' : 'M')});
}

}  // namespace

int64_t parse_bytes(const std::string& text, const char* option) {
  if (text.empty()) return 0;
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const std::string units = "KMGT";
  double factor = 1;
  if (*end != '\0') {
    const size_t power = units.find(static_cast<char>(std::toupper(*end)));
    factor = power == std::string::npos ? 0 : std::pow(1024.0, static_cast<double>(power + 1));
    ++end;
    if (*end == 'i') ++end;
    if (*end == 'B') ++end;
  }
  const double bytes = value * factor;
  if (*end != '\0' || !(bytes >= 1.0) || bytes > 1e18) {
    throw UsageError({.what = "malformed memory size",
                      .where = option,
                      .expected = kSizeExpected,
                      .found = text});
  }
  refuse_bare_size(text, bytes, option);
  return static_cast<int64_t>(bytes);
}

std::optional<Json> parse_json_option(const std::string& text, const char* option) {
  if (text.empty()) return std::nullopt;
  Json value;
  try {
    value = parse_json(text, option);
  } catch (const Error& error) {
    throw UsageError(error.info());
  }
  if (!value.is_object()) {
    throw UsageError({.what = "not a JSON object",
                      .where = option,
                      .expected = "an object in braces",
                      .found = value.dump()});
  }
  return value;
}

}  // namespace oscar::app
