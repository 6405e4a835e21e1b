// Cache bytes from a model's layers, and the tables made of them.
#include "oscar/bundle/memory_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/cache/codec.h"
#include "oscar/cache/pages.h"
#include "oscar/cache/rival_formats.h"

namespace oscar {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr int kMostGpus = 64;                      // that --tp takes
constexpr int64_t kShortestRow = 4096;             // of the table by context
constexpr int64_t kMostTokens = int64_t{1} << 40;  // where the search for the longest ends
constexpr std::pair<const char*, CacheKind> kFormats[] = {
    {"int2", CacheKind::kInt2}, {"fp8", CacheKind::kFp8}, {"bf16", CacheKind::kBf16}};

int64_t quantized_layers(const CachedModel& model) {
  return std::ranges::count(model.layers, true, &LayerGeometry::quantized);
}

// Of an element of a quantized layer; of 16-bit rows where there is none.
double bits_of(const CachedModel& model, int64_t tokens) {
  if (quantized_layers(model) == 0) return 16;
  const CacheFormat& q = model.quantizer;
  return bits_per_element(q.row_format(), tokens, q.sink_tokens, q.recent_tokens);
}

// Rows that leave the window of a served request at once (Python's DEMOTE_BLOCK).
constexpr int kServedDemoteBlock = 16;

// Bits of an element of the 2-bit layers of a served request of `tokens`, over all its memory: each
// token has a place in a page, the sink's too, and windows are there in full, with room for rows
// that leave at once and for a new one.
double served_bits(const CacheFormat& q, int64_t tokens, double row_bits) {
  if (tokens == 0) return 0;
  const int64_t rows = (tokens + kPageTokens - 1) / kPageTokens * kPageTokens;
  const int window =
      q.sink_tokens + q.recent_tokens + std::max(kServedDemoteBlock, q.demote_block) + 1;
  return (static_cast<double>(rows) * row_bits + 16.0 * window) / static_cast<double>(tokens);
}

// Most tokens of one request within `bytes`, which grow with them.
int64_t longest_within(const CachedModel& model, CacheKind format, double bytes) {
  int64_t low = 0, high = kMostTokens;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (request_bytes(model, format, middle) <= bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Whether vLLM shares these heads among so many ranks: each has as many query heads, and as many KV
// heads or a copy of one. Heads of linear attention are not copied.
bool takes_ranks(const CachedModel& model, int gpus) {
  const auto shared = [&](const LayerGeometry& layer) {
    const int heads = layer.num_kv_heads;
    return layer.attention == AttentionKind::kNone ||
           (layer.num_qo_heads % gpus == 0 && (heads % gpus == 0 || gpus % heads == 0));
  };
  const auto& linear = model.linear_state;
  return std::ranges::all_of(model.layers, shared) &&
         (!linear ||
          (linear->heads.num_key_heads % gpus == 0 && linear->heads.num_value_heads % gpus == 0));
}

void require_ranks(const CachedModel& model, int gpus) {
  if (takes_ranks(model, gpus)) return;
  std::vector<int> taken;
  for (int other = 1; other <= kMostGpus; ++other) {
    if (takes_ranks(model, other)) taken.push_back(other);
  }
  const auto first = std::ranges::find_if(model.layers, [](const LayerGeometry& layer) {
    return layer.attention != AttentionKind::kNone;
  });
  throw Error({.what = "vLLM cannot share the attention heads among so many GPUs",
               .where = "--tp",
               .expected = fmt::format(
                   "a divisor of the {} query heads that divides the {} KV heads or is a multiple "
                   "of them{}: {}",
                   first->num_qo_heads, first->num_kv_heads,
                   model.linear_state ? ", and divides the heads of linear attention" : "",
                   fmt::join(taken, ", ")),
               .found = std::to_string(gpus)});
}

// What one of `gpus` holds of the model's cache: whole KV heads, at least one.
CachedModel rank_of(CachedModel model, int gpus) {
  for (LayerGeometry& layer : model.layers) {
    layer.num_kv_heads = std::max(1, layer.num_kv_heads / gpus);
  }
  if (model.linear_state) {
    model.linear_state->heads.num_key_heads /= gpus;
    model.linear_state->heads.num_value_heads /= gpus;
  }
  return model;
}

// What is left for caches in each of `gpus`. Negative: less than the weights need.
double room_beside(int64_t weight_bytes, const PlanOptions& options, int gpus) {
  return options.utilization * static_cast<double>(options.gpu_bytes) -
         static_cast<double>(weight_bytes) / gpus;
}

// Whether options.users requests of `context` tokens fit, and what would.
Json answer_of(const CachedModel& model, CacheKind format, int64_t context, int64_t weight_bytes,
               const PlanOptions& options) {
  const auto needed = [&](int gpus) {
    return static_cast<double>(options.users) *
           request_bytes(rank_of(model, gpus), format, context);
  };
  const CachedModel rank = rank_of(model, options.gpus);
  const double room = room_beside(weight_bytes, options, options.gpus);
  const double each = room / static_cast<double>(options.users);
  const int64_t longest = std::max(context, model.max_positions);
  Json answer{{"fits", needed(options.gpus) <= room},
              {"needed_bytes", needed(options.gpus)},
              {"requests", static_cast<int64_t>(room / request_bytes(rank, format, context))},
              {"tokens_each", std::min(longest, longest_within(rank, format, each))}};
  for (int gpus = options.gpus; gpus <= kMostGpus && !answer.contains("gpus"); gpus *= 2) {
    if (!takes_ranks(model, gpus)) continue;
    if (needed(gpus) <= room_beside(weight_bytes, options, gpus)) answer["gpus"] = gpus;
  }
  return answer;
}

// Powers of two up to the model's own length and the asked one, and these.
std::vector<int64_t> contexts_of(const CachedModel& model, int64_t context) {
  std::vector<int64_t> all = {context};
  const int64_t end = std::max(context, model.max_positions);
  if (model.max_positions > 0) all.push_back(model.max_positions);
  for (int64_t tokens = kShortestRow; tokens < end; tokens *= 2) all.push_back(tokens);
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  constexpr size_t kMostRows = 8;
  if (all.size() > kMostRows) all.erase(all.begin(), all.end() - kMostRows);
  if (std::ranges::find(all, context) == all.end()) all.insert(all.begin(), context);
  return all;
}

Json row_at(const CachedModel& model, int64_t context, std::optional<double> room) {
  Json row{{"context", context}, {"int2_bits_per_value", bits_of(model, context)}};
  for (const auto& [name, format] : kFormats) {
    const double bytes = request_bytes(model, format, context);
    row["request_bytes"][name] = bytes;
    row["bytes_per_token"][name] = bytes / static_cast<double>(context);
    if (room) row["requests"][name] = static_cast<int64_t>(*room / bytes);
  }
  return row;
}

// Other quantization groups, metadata and windows, at one context.
Json sweep_at(const CachedModel& model, int64_t context, std::optional<double> room) {
  Json rows = Json::array();
  const auto add = [&](const CacheFormat& quantizer) {
    CachedModel other = model;
    other.quantizer = quantizer;
    for (LayerGeometry& layer : other.layers) {
      layer.quantized = layer.quantized_beyond(quantizer.recent_tokens);
    }
    const double bytes = request_bytes(other, CacheKind::kInt2, context);
    Json row{{"quant_group_size", quantizer.quant_group_size},
             {"metadata_dtype", codec_word(quantizer.metadata_dtype)},
             {"sink_tokens", quantizer.sink_tokens},
             {"recent_tokens", quantizer.recent_tokens},
             {"int2_bits_per_value", bits_of(other, context)},
             {"request_bytes", bytes},
             {"is_planned", quantizer == model.quantizer}};
    if (room) row["requests"] = static_cast<int64_t>(*room / bytes);
    rows.push_back(std::move(row));
  };
  add(model.quantizer);
  int dim = 0;
  for (const auto& layer : model.layers) dim = std::max(dim, layer.head_dim_k);
  for (const MetadataDtype metadata : {MetadataDtype::kFp16, MetadataDtype::kFp32}) {
    for (const int group : std::set<int, std::greater<>>{dim, 64, 32}) {
      CacheFormat q = model.quantizer;
      q.quant_group_size = group;
      q.metadata_dtype = metadata;
      if (group <= dim && dim % group == 0 && !(q == model.quantizer)) add(q);
    }
  }
  constexpr std::pair<int, int> kWindows[] = {{0, 64}, {64, 128}, {64, 256}, {64, 512}, {64, 1024}};
  for (const auto& [sink, recent] : kWindows) {
    CacheFormat q = model.quantizer;
    q.sink_tokens = sink;
    q.recent_tokens = recent;
    if (!(q == model.quantizer)) add(q);
  }
  return rows;
}

// Bits of an element of both sides of a layer that holds `tokens`.
struct SideBits {
  double key = 16, value = 16;
};

int layers_without_rows(const CachedModel& model) {
  return static_cast<int>(std::ranges::count(model.layers, AttentionKind::kNone,
                                             [](const LayerGeometry& l) { return l.attention; }));
}

// Of linear attention, one state for each request: the same in every cache format.
double state_bytes(const CachedModel& model) {
  if (!model.linear_state) return 0;
  return static_cast<double>(layers_without_rows(model)) *
         static_cast<double>(model.linear_state->bytes());
}

// Bytes of one request of `tokens`; `bits(i, held)`: of layer i, which holds so many of them.
template <typename Bits>
double bytes_of_layers(const CachedModel& model, int64_t tokens, const Bits& bits) {
  double bytes = state_bytes(model);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerGeometry& layer = model.layers[i];
    if (layer.attention == AttentionKind::kNone) continue;
    const int64_t held =
        layer.sliding_window > 0 ? std::min<int64_t>(tokens, layer.sliding_window) : tokens;
    const SideBits of = bits(i, held);
    bytes += static_cast<double>(int64_t{layer.num_kv_heads} * held) *
             (layer.head_dim_k * of.key + layer.head_dim_v * of.value) / 8;
  }
  return bytes;
}

double rival_bytes(const CachedModel& model, const RivalFormat& rival, int64_t tokens) {
  const int recent = mean_recent_tokens(rival), layers = static_cast<int>(model.layers.size());
  return bytes_of_layers(model, tokens, [&](size_t i, int64_t held) {
    const LayerGeometry& layer = model.layers[i];
    if (is_exact_layer(rival, static_cast<int>(i), layers)) return SideBits{};
    const auto bits = [&](const RivalBits& of_row, int head_dim) {
      return bits_per_element(of_row.at(head_dim), held, rival.sink_tokens, recent);
    };
    return SideBits{bits(rival.key, layer.head_dim_k), bits(rival.value, layer.head_dim_v)};
  });
}

// The bundle's rows with other widths of codes: in a server, or (served is false) rows alone, as
// other projects' are counted.
double wide_bytes(const CachedModel& model, std::pair<int, int> widths, int64_t tokens,
                  bool served) {
  const CacheFormat& q = model.quantizer;
  return bytes_of_layers(model, tokens, [&](size_t i, int64_t held) {
    if (!model.layers[i].quantized) return SideBits{};
    const auto bits = [&](int width) {
      const double row = row_bits(q.row_format(), width);
      return served ? served_bits(q, held, row)
                    : bits_per_element(row, held, q.sink_tokens, q.recent_tokens);
    };
    return SideBits{bits(widths.first), bits(widths.second)};
  });
}

// By the names of oscar-eval, fewest bytes first: other widths, and other projects' codecs as they
// are shipped.
Json codecs_at(const CachedModel& model, int64_t context, std::optional<double> room) {
  constexpr std::pair<int, int> kWidths[] = {{2, 2}, {3, 2}, {3, 3}, {4, 2}, {4, 4}};
  const double state = state_bytes(model);
  const double bf16 = request_bytes(model, CacheKind::kBf16, context) - state;
  std::vector<Json> rows;
  const auto add = [&](const std::string& name, double of_rows, double bytes) {
    Json row{{"name", name},
             {"bits_per_value", 16 * (of_rows - state) / bf16},
             {"request_bytes", bytes}};
    if (room) row["requests"] = static_cast<int64_t>(*room / bytes);
    rows.push_back(std::move(row));
  };
  for (const auto& [key, value] : kWidths) {
    const bool own = key == 2 && value == 2;
    add(own ? "bundle" : fmt::format("bundle@bits:{}/{}", key, value),
        wide_bytes(model, {key, value}, context, false),
        wide_bytes(model, {key, value}, context, true));
  }
  for (const RivalFormat& rival : rival_formats()) {
    const double bytes = rival_bytes(model, rival, context);
    add(rival.name, bytes, bytes);
  }
  std::ranges::stable_sort(rows, {},
                           [](const Json& row) { return row["request_bytes"].get<double>(); });
  return rows;
}

std::string shown(const Json& value) {
  return printable(value.is_string() ? value.get<std::string>() : json_text(value));
}

std::string gib(double bytes) {
  const double value = bytes / kGiB;
  return fmt::format("{:.{}f}", value, value >= 100 ? 1 : value >= 10 ? 2 : 3);
}

// "tokens" of a context, and that more were asked for.
std::string asked_context(const Json& plan) {
  std::string tokens = count(plan["context"].get<double>()) + " tokens";
  if (!plan.contains("asked_context")) return tokens;
  return fmt::format("{} (it does not serve {})", tokens,
                     count(plan["asked_context"].get<double>()));
}

std::string requests_text(const Json& number) {
  return number == 1 ? "1 request" : count(number.get<double>()) + " requests";
}

// Fewer requests, shorter ones, more GPUs.
std::string others_text(const Json& answer) {
  std::vector<std::string> others;
  if (answer["requests"] > 0) others.push_back(requests_text(answer["requests"]));
  if (answer["tokens_each"] > 0) {
    others.push_back(count(answer["tokens_each"].get<double>()) + " tokens each");
  }
  if (!answer["fits"].get<bool>() && answer.contains("gpus")) {
    others.push_back(fmt::format("{} GPUs", answer["gpus"].get<int>()));
  }
  return others.empty() ? "nothing of these" : fmt::format("{}", fmt::join(others, ", or "));
}

std::string answer_text(const Json& plan) {
  const Json& users = plan["users"];
  std::string text =
      fmt::format("\n{} at a time, of {}\n", requests_text(users["requests"]), asked_context(plan));
  const int gpus = plan["gpus"].get<int>();
  for (const auto& [name, label] :
       {std::pair{"int2", "INT2"}, std::pair{"fp8", "FP8"}, std::pair{"bf16", "BF16"}}) {
    const Json& answer = users[name];
    const bool fits = answer["fits"].get<bool>();
    const std::string needed =
        fmt::format("{} of {} GiB", gib(answer["needed_bytes"].get<double>()),
                    gib(plan["cache_bytes"].get<double>()));
    add_line(text, label,
             fmt::format("{}: {}{}", fits ? "fits" : "does not fit", needed,
                         gpus > 1 ? fmt::format(" in each of {} GPUs", gpus) : ""));
    add_line(text, "", (fits ? "up to " : "what would: ") + others_text(answer));
  }
  return text;
}

// What a request takes beside rows, or that it is not known.
std::string state_text(const Json& plan) {
  const std::string where = "docs/vllm.md (Layers without 2-bit rows) says in what blocks.";
  const int layers = plan["layers_without_rows"].get<int>();
  if (!plan["state_bytes"].is_null()) {
    return fmt::format("{} GiB a request for linear attention in {} layers, whatever the cache; {}",
                       gib(plan["state_bytes"].get<double>()), layers, where);
  }
  return fmt::format(
      "NOT COUNTED: {} layers hold no rows. Where their attention is linear, each request has a "
      "state in them, and fewer requests fit than said here; {}",
      layers, where);
}

std::string request_table(const Json& plan) {
  std::string text = fmt::format(
      "\nOne request, GiB{}\n   context   INT2 bits/value      INT2       FP8      BF16\n",
      plan["gpus"].get<int>() > 1 ? " in each GPU" : "");
  for (const Json& row : plan["contexts"]) {
    const Json& bytes = row["request_bytes"];
    text += fmt::format("{:>10} {:>17.3f} {:>9} {:>9} {:>9}\n", count(row["context"].get<double>()),
                        row["int2_bits_per_value"].get<double>(), gib(bytes["int2"].get<double>()),
                        gib(bytes["fp8"].get<double>()), gib(bytes["bf16"].get<double>()));
  }
  return text;
}

std::string fit_table(const Json& plan) {
  std::string text =
      "\nRequests that fit\n   context                        INT2       FP8      BF16\n";
  for (const Json& row : plan["contexts"]) {
    const auto cell = [&](const char* format) {
      return count(row["requests"][format].get<double>());
    };
    text += fmt::format("{:>10} {:>27} {:>9} {:>9}\n", count(row["context"].get<double>()),
                        cell("int2"), cell("fp8"), cell("bf16"));
  }
  const auto longest = [&](const char* format) {
    return count(plan["longest_context"][format].get<double>());
  };
  text += fmt::format("{:<17} {:>20} {:>9} {:>9}\n", "longest context", longest("int2"),
                      longest("fp8"), longest("bf16"));
  return text;
}

std::string codec_table(const Json& plan) {
  const bool fits = plan.contains("gpu_bytes");
  std::string text =
      fmt::format("\nAll codecs at {} tokens\n{:<24} bits/value       GiB{}\n",
                  count(plan["context"].get<double>()), "", fits ? "  requests" : "");
  for (const Json& row : plan["codecs"]) {
    text +=
        fmt::format("  {:<22} {:>10.3f} {:>9}", row["name"].get<std::string>(),
                    row["bits_per_value"].get<double>(), gib(row["request_bytes"].get<double>()));
    if (fits) text += fmt::format(" {:>9}", count(row["requests"].get<double>()));
    text += '\n';
  }
  return text;
}

std::string sweep_table(const Json& plan) {
  const bool fits = plan.contains("gpu_bytes");
  std::string text = fmt::format(
      "\nINT2 at {} tokens with other settings\n"
      "     group  metadata   first    last  bits/value       GiB{}\n",
      count(plan["context"].get<double>()), fits ? "  requests" : "");
  for (const Json& row : plan["sweep"]) {
    text +=
        fmt::format("{:>10}  {:>8} {:>7} {:>7} {:>11.3f} {:>9}", row["quant_group_size"].get<int>(),
                    row["metadata_dtype"].get<std::string>(), row["sink_tokens"].get<int>(),
                    row["recent_tokens"].get<int>(), row["int2_bits_per_value"].get<double>(),
                    gib(row["request_bytes"].get<double>()));
    if (fits) text += fmt::format(" {:>9}", count(row["requests"].get<double>()));
    text += row["is_planned"].get<bool>() ? "  planned\n" : "\n";
  }
  return text;
}

}  // namespace

double request_bytes(const CachedModel& model, CacheKind format, int64_t tokens) {
  if (format == CacheKind::kInt2) return wide_bytes(model, {2, 2}, tokens, true);
  const double bits = format == CacheKind::kFp8 ? 8 : 16;
  return bytes_of_layers(model, tokens, [&](size_t, int64_t) { return SideBits{bits, bits}; });
}

Json memory_plan(const CachedModel& whole, const PlanOptions& options) {
  require_ranks(whole, options.gpus);
  const CachedModel model = rank_of(whole, options.gpus);
  const int64_t served = model.max_positions;  // 0: not known
  const bool too_long = served > 0 && options.context > served;
  const int64_t context = (options.context == 0 || too_long) ? served : options.context;
  if (context <= 0) {
    throw Error({.what = "it is not known how many tokens the model serves",
                 .where = model.name,
                 .hint = "say how many to plan for with --context"});
  }
  const auto weights = options.weight_bytes ? options.weight_bytes : model.weight_bytes;
  const CacheFormat& q = model.quantizer;
  const LayerGeometry& first = model.layers.front();
  Json plan{{"model", model.name},
            {"architecture", model.architecture},
            {"num_layers", model.layers.size()},
            {"num_kv_heads", whole.layers.front().num_kv_heads},
            {"gpus", options.gpus},
            {"head_dim", first.head_dim_k},
            {"max_positions", model.max_positions},
            {"context", context},
            {"quantizer",
             {{"quant_group_size", q.quant_group_size},
              {"metadata_dtype", codec_word(q.metadata_dtype)},
              {"sink_tokens", q.sink_tokens},
              {"recent_tokens", q.recent_tokens}}},
            {"quantized_layers", quantized_layers(model)}};
  if (too_long) plan["asked_context"] = options.context;
  if (const int layers = layers_without_rows(model); layers > 0) {
    plan["layers_without_rows"] = layers;
    plan["state_bytes"] = model.linear_state ? Json(state_bytes(model)) : Json();
  }
  plan["weight_bytes"] = weights ? Json(*weights) : Json();
  plan["weight_source"] = options.weight_bytes ? "as given" : model.weight_source;
  if (options.users > 0 && !weights) {
    throw Error({.what = "it is not known what the weights take",
                 .where = model.name,
                 .found = model.weight_source,
                 .hint = "give their size with --weights; the model's whole folder says it, too"});
  }
  std::optional<double> room;
  if (options.gpu_bytes > 0) {
    room = room_beside(weights.value_or(0), options, options.gpus);
    if (*room <= 0) {
      throw Error({.what = "the weights alone fill this memory",
                   .where = "--gpu-memory",
                   .expected = fmt::format(
                       "more than {} GiB in each of {} GPUs",
                       gib(static_cast<double>(*weights) / options.gpus / options.utilization),
                       options.gpus),
                   .found = gib(static_cast<double>(options.gpu_bytes)) + " GiB"});
    }
    plan["gpu_bytes"] = options.gpu_bytes;
    plan["utilization"] = options.utilization;
    plan["cache_bytes"] = *room;
    for (const auto& [name, format] : kFormats) {
      plan["longest_context"][name] =
          std::min(std::max(context, served), longest_within(model, format, *room));
      if (options.users == 0) continue;
      plan["users"]["requests"] = options.users;
      plan["users"][name] = answer_of(whole, format, context, *weights, options);
    }
  }
  Json& rows = plan["contexts"] = Json::array();
  for (const int64_t tokens : contexts_of(model, context)) {
    rows.push_back(row_at(model, tokens, room));
  }
  plan["codecs"] = codecs_at(model, context, room);
  plan["sweep"] = sweep_at(model, context, room);
  return plan;
}

std::string memory_plan_text(const Json& plan) {
  std::string text;
  const Json& q = plan["quantizer"];
  add_line(text, "model",
           fmt::format("{} ({}): {} layers, {} KV heads of {}", shown(plan["model"]),
                       shown(plan["architecture"]), shown(plan["num_layers"]),
                       shown(plan["num_kv_heads"]), shown(plan["head_dim"])));
  if (plan["max_positions"].get<int64_t>() > 0) {
    const std::string served = count(plan["max_positions"].get<double>());
    add_line(text, "serves", served + " tokens");
    if (plan.contains("asked_context")) {
      add_line(text, "",
               fmt::format("not the {} of --context: planned for {}. A longer RoPE scaling in "
                           "config.json raises it",
                           count(plan["asked_context"].get<double>()), served));
    }
  }
  add_line(text, "INT2",
           fmt::format("a scale and a zero in {} for each {} values", shown(q["metadata_dtype"]),
                       shown(q["quant_group_size"])));
  add_line(text, "",
           fmt::format("the first {} and last {} tokens in BF16", shown(q["sink_tokens"]),
                       shown(q["recent_tokens"])));
  if (plan["quantized_layers"] == 0) {
    add_line(text, "", "no layer is quantized: none holds more tokens than stay in BF16");
  }
  if (plan.contains("layers_without_rows")) add_line(text, "state", state_text(plan));
  if (plan["weight_bytes"].is_null()) {
    add_line(text, "weights",
             fmt::format("not counted: {} (--weights)", shown(plan["weight_source"])));
  } else {
    add_line(text, "weights",
             fmt::format("{} GiB, {}", gib(plan["weight_bytes"].get<double>()),
                         shown(plan["weight_source"])));
  }
  if (plan.contains("gpu_bytes")) {
    const int gpus = plan["gpus"].get<int>();
    add_line(text, "GPU",
             fmt::format(
                 "{}{} GiB, {:.0f}% of it for the server: {} GiB for caches and activations",
                 gpus > 1 ? fmt::format("{} of ", gpus) : "", gib(plan["gpu_bytes"].get<double>()),
                 100 * plan["utilization"].get<double>(), gib(plan["cache_bytes"].get<double>())));
  }
  if (plan.contains("users")) text += answer_text(plan);
  text += request_table(plan);
  if (plan.contains("gpu_bytes")) text += fit_table(plan);
  return text + codec_table(plan) + sweep_table(plan);
}

}  // namespace oscar
