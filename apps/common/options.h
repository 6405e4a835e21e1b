// Command-line options that mean the same in every program, each described once.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/bundle.h"
#include "oscar/fit/fit.h"

namespace oscar::app {

// Whole numbers above 0, and 0 or above, also as 64K, 1M or 2G (K is 1024) and as 1e4.
CLI::Validator positive();
CLI::Validator non_negative();

// What a MODEL may be, where it is described in a line.
inline constexpr const char* kModelHelp =
    "Hugging Face folder, .gguf file, name of a model that was fetched from the Hub "
    "(Qwen/Qwen3-8B), tiny-gqa, which is embedded, or smollm2 or qwen2.5-coder-1.5b, once "
    "python -m oscar_int2 fetch NAME has fetched it";

// --strict, of programs that read text.
void add_strict(CLI::App& program, bool& strict, const std::string& section);

// One of `words`, in upper or lower case.
CLI::Validator one_of(const std::vector<std::string>& words);

// An option of one of these words, each of which stands for a value.
template <typename Value>
CLI::Option* add_choice(CLI::App& program, const std::string& name, Value& value,
                        const std::vector<std::pair<std::string, Value>>& choices,
                        const std::string& help) {
  std::vector<std::string> words;
  for (const auto& choice : choices) words.push_back(choice.first);
  const auto choose = [&value, choices](const std::string& word) {
    for (const auto& choice : choices) {
      if (choice.first == word) value = choice.second;
    }
  };
  return program.add_option_function<std::string>(name, choose, help)
      ->transform(one_of(words))
      ->option_text(CLI::detail::join(words, "|"));
}

// --preset and every option that overrides one part of it.
struct FitArguments {
  std::string preset = "best";
  std::string method, objective_v, granularity, row_weights, center, key_centers, rounding,
      scale_correction, clip;
  std::string search = "on";
  std::optional<int64_t> position_span;

  // The preset with the overrides applied. Throws Error for a malformed --clip.
  FitOptions resolve() const;
  // What is left to held-out loss: an option that names a value fixes it, "auto" frees it. The rest
  // is that of the preset, which for a backend is more: it may take less than the preset has.
  SearchOptions resolve_search(bool for_backend = false) const;
  // Throws CLI::ValidationError (a usage error) for a request that would be dropped: a part left to
  // a search that is off or, with `asked` (--search was given), a search of nothing.
  void check_search(bool asked) const;
};

struct ComputeArguments {
  std::string device = "auto", dtype = "auto";
};

struct MemoryArguments {
  std::string host_memory, gpu_memory;  // "12G"; empty = what is free
};

// `searchable`: the program can decide what is auto or search.
void add_fit_options(CLI::App& program, FitArguments& arguments, bool searchable);
// The parts of a fit, one by one, for studies of what each is worth. To be added last: help shows
// them behind all others.
void add_fit_study_options(CLI::App& program, FitArguments& arguments, bool searchable);
inline constexpr const char* kStudySection = "For studies";
void add_quantizer_options(CLI::App& program, CacheFormat& settings);
// `settings` with those of `parsed` that the command line gives.
CacheFormat with_given(const CLI::App& program, const CacheFormat& parsed, CacheFormat settings);
void add_compute_options(CLI::App& program, ComputeArguments& arguments);
void add_memory_options(CLI::App& program, MemoryArguments& arguments);

// "8G", "512M", "1.5T", or bytes, a MiB of them at least. Empty = 0. Throws UsageError for anything
// else.
int64_t parse_bytes(const std::string& text, const char* option);

// A JSON object given on the command line (--rope-scaling). Empty = nullopt. Throws UsageError for
// anything else.
std::optional<Json> parse_json_option(const std::string& text, const char* option);

// --for BACKEND: choices limited to what one backend runs.

// `backend` stays empty when the option is not given.
void add_backend_option(CLI::App& program, std::string& backend);

// What the options of `program` (add_fit_options, add_quantizer_options) say, limited to `backend`.
// Throws CLI::ValidationError (a usage error), naming the option, for a backend that is not served
// yet, for an option that asks for what the backend does not serve, and for a search of which
// nothing is left.
BackendChoice choose_for_backend(const CLI::App& program, const std::string& backend,
                                 const FitArguments& fit, const CacheFormat& quantizer);

}  // namespace oscar::app
