// A report as the page and the card read it, and what to beware of in it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/base/strings.h"

namespace oscar {

// What standard errors and intervals treat as independent (math 11.5): sequences, or with fewer
// than kFewestUnits of them stretches of kUnitTokens counted tokens. Fewer units than kFewestUnits
// have no 95% interval: from two or three units it would be several times too narrow.
inline constexpr int64_t kFewestUnits = 8;
inline constexpr int64_t kUnitTokens = 512;

// What keeps figures from being taken at their word: lines of the verdict on the page, in the
// terminal and on the model card. `python -m oscar_int2 publish` refuses them by name.

struct Caution {
  // "shared-text": calibration and evaluation share text. "little-text": the calibration text is
  // not enough, or could not be judged. "few-tokens": the evaluation has too few for intervals.
  // "repeated-text": the evaluation counts copies, and intervals are too narrow.
  // "predicts-nothing": BF16's perplexity is that of guessing, or equal on every piece of text.
  // "other-cache": the figures are not those of the cache that is served. "portable": the portable
  // variant loses kTooManyTimes as much or more.
  std::string kind;
  std::string method;    // whose figures: "bundle", the name of a further bundle, or "" for all
  std::string measured;  // "37% of its 13-grams"
  std::string sentence;  // all of it, without a full stop
};

// Whether a report, or its part with separators, has no intervals: too few units, copies left out.
bool has_few_units(const Json& report);

// What its intervals treat as independent: "23 sequences", or "16 pieces of at most 512 tokens (2
// sequences)" where there are fewer than kFewestUnits or --stride joins them. "" without figures.
std::string resampling_words(const Json& report);

// Of a report of oscar-eval (eval/SCHEMA.md) of any shape: what cannot be read is left out.
std::vector<Caution> cautions_of(const Json& report);

// Of the convergence record of a bundle (bundle/SCHEMA.md) that people know as `file`. Without one,
// or with one that says neither yes nor no, the text could not be judged.
std::optional<Caution> little_text(const Json& record, const std::string& method,
                                   const std::string& file);

// The JSON report of oscar-eval (lib/oscar/eval/SCHEMA.md) as plain structs that can be drawn.

struct Span95 {  // a figure with its 95% interval; ends absent where there is no interval
  Figure mean, low, high;
};

struct NeedleRate {
  double passed = 0, prompts = 0;
  Figure rate, low, high;
};

struct NeedleCell {
  double length = 0, depth = 0, passed = 0, prompts = 0;
};

struct NeedleFigures {
  NeedleRate all;
  Figure margin;
  std::vector<std::pair<std::string, NeedleRate>> kinds;
  std::vector<NeedleCell> cells;
  Figure only_bf16, only_method, mcnemar_p;  // absent for bf16
  std::optional<NeedleRate> generated;
};

struct MethodFigures {
  std::string name, summary;
  bool variant = false;                         // NAME@...: a sweep or one layer
  bool reference = false;                       // bf16
  bool exact = false;                           // the INT2 path with the codec off
  bool rival = false;                           // another project's codec
  bool has_text = false;                        // perplexity and divergence were measured
  std::vector<std::pair<double, double>> bits;  // context length, bits per element
  Span95 nll_increase, perplexity, kl, top1;
  std::optional<bool> above_floor;
  std::vector<std::pair<double, double>> kl_percentiles;  // percentile (0..100), KL
  std::vector<double> kl_by_position;                     // between each two of `positions`
  std::vector<double> output_nmse;                        // [num_layers], NaN where not finite
  std::vector<std::vector<double>> output_nmse_heads;     // [num_layers][num_kv_heads], the same
  std::vector<double> key_row, key_row_read;              // [head_dim] ReportData::key_row here
  Span95 kl_difference;                                   // this minus `against`
  std::string against;
  std::optional<NeedleFigures> needles;

  // As reported, or through two reported lengths: windows of 16 bits and rows of fewer make
  // bits = a + b / length. Absent when nothing of the kind was reported.
  Figure bits_at(double length) const;
};

struct SpectrumLayer {
  double layer = 0;
  std::vector<double> key, value;  // shares at the places `ranks`; empty when not stored
  Figure key_rank, value_rank;     // effective rank
};

struct ChannelLayer {
  double layer = 0;
  std::vector<double> key_before, key_after, value_before, value_after;  // per KV head
};

struct ChannelProfile {
  double layer = 0, head = 0;
  std::vector<double> before, after;  // per channel
};

struct KeyRowFigures {
  double layer = 0, head = 0, position = 0;
  Figure peak;                  // largest channel over the median one
  std::vector<double> written;  // [head_dim] as the model has them
};

// Shares of separators, of other rows that draw much attention, and of all others, in that order.
using RowClassFigures = std::array<Figure, 3>;
struct RowClassErrors {
  std::string method;
  RowClassFigures key, value;
};

struct ReportData {
  std::string model, architecture, bundle, mode, device;
  std::string serving_sha256;                              // of the bundle
  std::vector<std::pair<std::string, std::string>> facts;  // label, value: how it was run
  std::string command;
  std::string partial;  // what a stopped run has counted, in words; "" for a whole one
  bool has_bundle = false, has_text = false, has_needles = false;
  Figure tokens, sequences, first_position, longest, kl_floor, resampling_units, position_offset;
  std::string pieces;  // resampling_words
  Figure elements_per_token, max_positions, num_layers;
  Figure quantized_layers;  // absent in earlier reports
  // Of the local layers' windows, which stay in BF16: tokens, and numbers of each; of all layers.
  Figure local_window, local_elements;
  // Bytes of those windows, in BF16, of one request of so many tokens; 0 without local layers.
  double local_bytes(double context) const;
  Figure needle_prompts;
  std::vector<double> needle_lengths;
  std::vector<MethodFigures> methods;  // in the order of the comparison
  std::vector<std::string> named_bundles;
  // The same text with a separator as every `separator_gap`-th token; empty when not measured.
  std::vector<MethodFigures> separated;
  Figure separator_gap;
  RowClassFigures row_share, attention_share;  // of 2-bit rows of that text
  std::vector<RowClassErrors> row_errors;      // empty when not measured
  std::vector<double> positions;               // edges of stretches, ascending
  std::optional<KeyRowFigures> key_row;
  std::vector<double> ranks;
  std::vector<SpectrumLayer> spectra;
  Figure channel_tokens;
  std::vector<ChannelLayer> channels;
  std::optional<ChannelProfile> profile;

  std::vector<Caution> cautions;

  const MethodFigures* find(const std::string& name) const;  // null when it was not compared
};

// Keys that are missing or of another type are taken as absent, so that a page can be made of an
// older or partial report. Throws Error when `report` is no object with the schema "oscar-eval-1"
// and at least one method.
ReportData read_report(const Json& report);

}  // namespace oscar
