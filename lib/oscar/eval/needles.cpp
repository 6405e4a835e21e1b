// Needle tasks.
#include "oscar/eval/needles.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/eval/session.h"
#include "oscar/model/layer_major.h"

namespace oscar {

// Task kinds from tasks.json, filled in with words and numbers from a seed.

namespace {

constexpr const char* kFormat = "oscar-needle-tasks-1";

// In [0, n). The bias of a remainder of 64 random bits is far below what a sample could show.
size_t below(std::mt19937_64& random, size_t n) { return random() % n; }

std::vector<std::string> draw_words(const NeedleBook& book, size_t count, std::mt19937_64& random) {
  std::vector<std::string> words = book.words;
  for (size_t i = 0; i < count; ++i)
    std::swap(words[i], words[i + below(random, words.size() - i)]);
  words.resize(count);
  return words;
}

template <typename T>
void shuffle(std::vector<T>& values, std::mt19937_64& random) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(random, i)]);
}

std::string fill(std::string text, const std::string& field, const std::string& value) {
  for (size_t at = text.find(field); at != std::string::npos;
       at = text.find(field, at + value.size())) {
    text.replace(at, field.size(), value);
  }
  return text;
}

std::string draw_value(const NeedleBook& book, const Json& spec, std::mt19937_64& random) {
  if (spec.at("type") == "words") {
    return fmt::format("{}",
                       fmt::join(draw_words(book, spec.at("count").get<size_t>(), random), " "));
  }
  uint64_t low = 1;
  for (int digit = 1; digit < spec.at("digits").get<int>(); ++digit) low *= 10;
  return std::to_string(low + below(random, 9 * low));
}

struct Fact {
  std::string key, value;
};

std::vector<Fact> draw_group(const NeedleBook& book, const Json& kind,
                             const std::vector<std::string>& names, std::mt19937_64& random) {
  std::vector<Fact> facts;
  if (names.size() > 1) {
    std::string value = draw_value(book, kind.at("value"), random);
    for (const std::string& name : names) {
      facts.push_back({name, value});
      value = name;
    }
    return facts;
  }
  for (int i = 0; i < kind.at("values_per_key").get<int>(); ++i) {
    facts.push_back({names[0], draw_value(book, kind.at("value"), random)});
  }
  return facts;
}

// Tokens around the text of a prompt.
struct Frame {
  std::vector<int32_t> before, behind;  // `behind` begins with the question
};

// Without a template the question follows the text. With one, text and question are the user's and
// what follows the question mark begins the assistant's answer, as RULER does (arXiv 2404.06654).
Frame make_frame(const NeedleText& text, const std::string& question) {
  const auto encode = [&](std::string_view part) { return text.tokenizer->encode(part, false); };
  if (!text.chat) return {{}, encode(question)};
  constexpr std::string_view kMark = "? ";
  const size_t mark = question.rfind(kMark);
  const size_t asked = mark == std::string::npos ? question.size() : mark + 1;
  std::string behind = question.substr(0, asked) + text.chat->behind;
  if (mark != std::string::npos) behind += question.substr(mark + kMark.size());
  return {encode(text.chat->before), encode(behind)};
}

}  // namespace

std::vector<std::string> NeedleBook::kind_names() const {
  std::vector<std::string> names;
  for (const auto& [name, settings] : kinds.items()) names.push_back(name);
  return names;
}

NeedleBook read_needle_book(const std::filesystem::path& folder) {
  const auto path = folder / "tasks.json";
  const Json json = read_json_file(path);
  if (json.value("format", "") != kFormat || !json.contains("kinds") || !json.contains("words")) {
    throw Error({.what = "not a description of needle tasks",
                 .where = path.string(),
                 .expected = kFormat,
                 .found = json.value("format", "no format")});
  }
  NeedleBook book;
  book.kinds = json.at("kinds");
  std::istringstream words(read_text_file(folder / json.at("words").get<std::string>()));
  for (std::string word; words >> word;) book.words.push_back(word);
  return book;
}

void require_kinds(const NeedleBook& book, const std::vector<std::string>& kinds) {
  for (const std::string& kind : kinds) {
    if (book.kinds.contains(kind)) continue;
    throw UsageError({.what = "unknown kind of needle task",
                      .where = "--needle-kinds",
                      .expected = fmt::format("{}", fmt::join(book.kind_names(), ", ")),
                      .found = kind});
  }
}

NeedleTask sample_task(const NeedleBook& book, const std::string& kind_name,
                       std::mt19937_64& random) {
  require_kinds(book, {kind_name});
  const Json& kind = book.kinds.at(kind_name);
  const auto groups = kind.at("keys").get<size_t>(), chain = kind.at("chain").get<size_t>();
  const auto names = draw_words(book, groups * chain, random);
  std::vector<std::vector<Fact>> facts;
  std::vector<size_t> order;
  for (size_t g = 0; g < groups; ++g) {
    const auto first = names.begin() + static_cast<std::ptrdiff_t>(g * chain);
    facts.push_back(
        draw_group(book, kind, {first, first + static_cast<std::ptrdiff_t>(chain)}, random));
    order.insert(order.end(), facts.back().size(), g);
  }
  shuffle(order, random);
  std::vector<size_t> asked(groups);
  for (size_t g = 0; g < groups; ++g) asked[g] = g;
  shuffle(asked, random);
  asked.resize(std::min(groups, kind.at("asked").get<size_t>()));

  NeedleTask task;
  std::vector<size_t> next(groups, 0);
  for (const size_t g : order) {
    const Fact& fact = facts[g][next[g]++];
    task.facts.push_back(fill(fill(kind.at("fact"), "{key}", fact.key), "{value}", fact.value));
    task.asked.push_back(std::find(asked.begin(), asked.end(), g) != asked.end());
  }
  std::vector<std::string> keys, answers;
  for (const size_t g : asked) {
    keys.push_back(facts[g].back().key);
    if (chain > 1) std::reverse(facts[g].begin(), facts[g].end());
    for (const Fact& fact : facts[g]) {
      answers.push_back(
          fill(fill(kind.at("answer_item"), "{key}", fact.key), "{value}", fact.value));
    }
  }
  const auto join = kind.at("key_join").get<std::string>();
  task.question = fill(kind.at("question"), "{keys}", fmt::format("{}", fmt::join(keys, join)));
  task.answer = fmt::format("{}", fmt::join(answers, kind.at("answer_join").get<std::string>()));
  return task;
}

NeedlePrompt make_needle_prompt(const NeedleBook& book, const std::string& kind, int64_t length,
                                double depth, const NeedleText& text, std::mt19937_64& random) {
  const Tokenizer& tokenizer = *text.tokenizer;
  const std::vector<int32_t>& haystack = *text.haystack;
  const NeedleTask task = sample_task(book, kind, random);
  const Frame frame = make_frame(text, task.question);
  std::vector<std::vector<int32_t>> facts;
  auto room = length - static_cast<int64_t>(frame.before.size() + frame.behind.size());
  for (const std::string& fact : task.facts) {
    facts.push_back(tokenizer.encode(fact, false));
    room -= static_cast<int64_t>(facts.back().size());
  }
  const auto available = static_cast<int64_t>(haystack.size());
  if (room < 1 || room > available) {
    throw Error({.what = "a needle prompt of this length can't be made",
                 .where = fmt::format("--needle-lengths {}, kind {}", length, kind),
                 .expected = room < 1 ? fmt::format("over {} tokens", length - room)
                                      : fmt::format("a corpus of {} tokens or more", room),
                 .found = room < 1 ? std::to_string(length) : std::to_string(available)});
  }
  const auto places_from = [&](int64_t first) {
    return first + static_cast<int64_t>(below(random, static_cast<size_t>(room - first + 1)));
  };
  // One place per asked fact (the first at `depth`) and per other fact, each list ascending.
  const auto at_depth = static_cast<int64_t>(depth * static_cast<double>(room) + 0.5);
  std::vector<int64_t> asked, other;
  for (const bool is_asked : task.asked) {
    if (!is_asked) {
      other.push_back(places_from(0));
    } else {
      asked.push_back(asked.empty() ? at_depth : places_from(at_depth));
    }
  }
  std::sort(asked.begin(), asked.end());
  std::sort(other.begin(), other.end());
  struct Placed {
    int64_t place;
    size_t fact;
  };
  std::vector<Placed> placed;
  for (size_t i = 0, a = 0, o = 0; i < facts.size(); ++i) {
    placed.push_back({task.asked[i] ? asked[a++] : other[o++], i});
  }
  std::stable_sort(placed.begin(), placed.end(),
                   [](const Placed& x, const Placed& y) { return x.place < y.place; });
  const auto begin = static_cast<int64_t>(below(random, static_cast<size_t>(available - room + 1)));
  NeedlePrompt out{kind, length, depth, frame.before, tokenizer.encode(task.answer, false)};
  int64_t done = 0;
  const auto text_until = [&](int64_t place) {
    out.prompt.insert(out.prompt.end(), haystack.begin() + begin + done,
                      haystack.begin() + begin + place);
    done = place;
  };
  for (const Placed& p : placed) {
    text_until(p.place);
    out.prompt.insert(out.prompt.end(), facts[p.fact].begin(), facts[p.fact].end());
  }
  text_until(room);
  out.prompt.insert(out.prompt.end(), frame.behind.begin(), frame.behind.end());
  return out;
}

std::vector<NeedlePrompt> make_needle_prompts(const NeedleBook& book, const NeedlePlan& plan,
                                              const NeedleText& text) {
  const auto kinds = plan.kinds.empty() ? book.kind_names() : plan.kinds;
  std::mt19937_64 random(plan.seed);
  std::vector<NeedlePrompt> prompts;
  for (int64_t i = 0; i < plan.prompts; ++i) {
    const auto n = static_cast<size_t>(i);
    const size_t combination = n / kinds.size();
    prompts.push_back(make_needle_prompt(
        book, kinds[n % kinds.size()], plan.lengths[combination % plan.lengths.size()],
        plan.depths[combination / plan.lengths.size() % plan.depths.size()], text, random));
  }
  std::stable_sort(
      prompts.begin(), prompts.end(),
      [](const NeedlePrompt& a, const NeedlePrompt& b) { return a.length < b.length; });
  return prompts;
}

// Batches of needle prompts of one length.

namespace {

constexpr int64_t kHostPromptTokens = 8192;
constexpr int64_t kDevicePromptTokens = 131072;

struct PromptBatch {
  size_t first = 0, count = 0;
  int64_t length = 0, answer = 0;  // tokens of each prompt, of the longest answer

  int64_t tokens() const { return static_cast<int64_t>(count) * (length + answer); }
};

std::vector<PromptBatch> batch_prompts(const Transformer& model,
                                       const std::vector<NeedlePrompt>& prompts) {
  const int64_t limit = model.compute().device.is_cuda() ? kDevicePromptTokens : kHostPromptTokens;
  std::vector<PromptBatch> batches;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t length = prompts[i].length;
    if (batches.empty() || batches.back().length != length ||
        static_cast<int64_t>(batches.back().count + 1) * length > limit) {
      batches.push_back({i, 0, length, 0});
    }
    ++batches.back().count;
    batches.back().answer =
        std::max(batches.back().answer, static_cast<int64_t>(prompts[i].answer.size()));
  }
  return batches;
}

// [count, length + answer] int64: prompts with their answers, zeros behind shorter ones.
torch::Tensor batch_ids(const std::vector<NeedlePrompt>& prompts, const PromptBatch& batch) {
  auto ids =
      torch::zeros({static_cast<int64_t>(batch.count), batch.length + batch.answer}, torch::kInt64);
  for (size_t row = 0; row < batch.count; ++row) {
    const NeedlePrompt& prompt = prompts[batch.first + row];
    auto* out = ids.data_ptr<int64_t>() + static_cast<int64_t>(row) * ids.size(1);
    out = std::copy(prompt.prompt.begin(), prompt.prompt.end(), out);
    std::copy(prompt.answer.begin(), prompt.answer.end(), out);
  }
  return ids;
}

// Of what a process says of a batch.
void require_size(const std::vector<uint8_t>& bytes, size_t size) {
  if (bytes.size() == size) return;
  throw Error({.what = "outcomes of another number of prompts than the batch's",
               .expected = fmt::format("{} bytes", size),
               .found = std::to_string(bytes.size())});
}

// The reference too needs an engine that keeps a cache.
std::unique_ptr<CacheEngine> generating_engine(const Method& method, const ModelConfig& config,
                                               const EngineChoice& choice) {
  std::unique_ptr<CacheEngine> engine = make_engine(method, config, choice);
  if (engine) return engine;
  Method exact = method;
  exact.reference = false;
  return make_engine(exact, config, {});
}

// Margins of each answer token, [count, answer] float64 on the CPU.
torch::Tensor answer_margins(Transformer& model, const torch::Tensor& hidden,
                             const torch::Tensor& ids, const PromptBatch& batch) {
  const auto device = model.compute().device;
  const auto logits =
      model.logits(hidden.slice(1, batch.length - 1, batch.length + batch.answer - 1).to(device));
  const auto wanted = ids.slice(1, batch.length).to(device).unsqueeze(-1);
  const auto right = logits.gather(-1, wanted).squeeze(-1);
  const auto others = logits.scatter(-1, wanted, -INFINITY).amax(-1);
  return right.sub(others).to(torch::kCPU, torch::kFloat64).contiguous();
}

}  // namespace

size_t num_needle_batches(const Transformer& model, const std::vector<NeedlePrompt>& prompts) {
  return batch_prompts(model, prompts).size();
}

int64_t most_needles_together(const Transformer& model, const std::vector<NeedlePrompt>& prompts) {
  int64_t most = 0;
  for (const PromptBatch& batch : batch_prompts(model, prompts)) {
    most = std::max(most, static_cast<int64_t>(batch.count));
  }
  return most;
}

int64_t largest_needle_batch(const Transformer& model, const std::vector<NeedlePrompt>& prompts) {
  int64_t tokens = 0;
  for (const PromptBatch& batch : batch_prompts(model, prompts)) {
    tokens = std::max(tokens, batch.tokens());
  }
  return tokens;
}

int64_t needle_tokens(const Transformer& model, const std::vector<NeedlePrompt>& prompts,
                      size_t done) {
  int64_t tokens = 0;
  for (const PromptBatch& batch : batch_prompts(model, prompts)) {
    if (batch.first >= done) tokens += batch.tokens();
  }
  return tokens;
}

torch::Tensor generate_greedily(Transformer& model,
                                const std::vector<std::shared_ptr<const LayerWeights>>& weights,
                                CacheEngine& engine, const torch::Tensor& ids, int64_t tokens,
                                int64_t position_offset) {
  const c10::InferenceMode guard;
  engine.set_prompt(ids.size(1));
  engine.keep_cache(ids.size(1) + tokens);
  engine.set_first_position(position_offset);
  auto answers = torch::empty({ids.size(0), tokens}, torch::kInt64);
  auto next = ids;
  int64_t position = position_offset;
  std::vector<DeltaState> states(weights.size());
  for (int64_t step = 0; step < tokens; ++step) {
    auto hidden = model.embed(next);
    for (size_t layer = 0; layer < weights.size(); ++layer) {
      hidden = model.forward_layer(static_cast<int>(layer), *weights[layer], hidden, nullptr,
                                   &engine, position, &states[layer]);
    }
    position += next.size(1);
    next = model.logits(hidden.slice(1, hidden.size(1) - 1)).argmax(-1).to(torch::kCPU);
    answers.slice(1, step, step + 1).copy_(next);
  }
  return answers;
}

namespace {

// The smallest margin of each prompt's answer, [count].
std::vector<double> smallest_margins(Transformer& model, const torch::Tensor& hidden,
                                     const torch::Tensor& ids, const PromptBatch& batch,
                                     const std::vector<NeedlePrompt>& prompts,
                                     const std::string& method) {
  const auto margins = answer_margins(model, hidden, ids, batch);
  if (!margins.isfinite().all().item<bool>()) {
    throw Error({.what = "a prediction is not finite",
                 .where = fmt::format("needle prompts {} to {}, method {}", batch.first,
                                      batch.first + batch.count - 1, method),
                 .hint = "run with --dtype fp32"});
  }
  std::vector<double> smallest;
  for (size_t row = 0; row < batch.count; ++row) {
    const auto* values = margins.data_ptr<double>() + static_cast<int64_t>(row) * batch.answer;
    smallest.push_back(
        *std::min_element(values, values + prompts[batch.first + row].answer.size()));
  }
  return smallest;
}

}  // namespace

void run_needles_forced(Transformer& model, const std::vector<Method>& methods,
                        const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                        int64_t position_offset, Ranks& ranks, size_t done,
                        std::vector<std::vector<NeedleOutcome>>& outcomes,
                        const std::function<void()>& counted, Progress& progress) {
  const c10::InferenceMode guard;
  std::vector<std::unique_ptr<CacheEngine>> engines;
  for (const Method& method : methods) {
    engines.push_back(make_engine(method, model.config(), choice));
    if (engines.back()) engines.back()->set_first_position(position_offset);
  }
  const std::vector<PromptBatch> batches = batch_prompts(model, prompts);
  // The margins of a batch, one method after another.
  const auto pass = [&](const std::vector<size_t>& own, const PieceDone& passed) {
    for (const size_t index : own) {
      const PromptBatch& batch = batches[index];
      MultiForward forward{
          .engines = {}, .position_offset = position_offset, .first_query = batch.length};
      for (const auto& engine : engines) {
        if (engine) engine->set_prompt(batch.length);
        forward.engines.push_back(engine.get());
      }
      const auto ids = batch_ids(prompts, batch);
      std::vector<double> margins;
      const auto score = [&](size_t, const std::vector<torch::Tensor>& hidden,
                             const std::vector<OutputError>&) {
        for (size_t m = 0; m < methods.size(); ++m) {
          const auto more =
              smallest_margins(model, hidden[m], ids, batch, prompts, methods[m].name);
          margins.insert(margins.end(), more.begin(), more.end());
        }
      };
      run_multi_forward(model, forward, {ids}, score, progress);
      const auto* bytes = reinterpret_cast<const uint8_t*>(margins.data());
      passed(index, {bytes, bytes + margins.size() * sizeof(double)});
    }
  };
  const auto take = [&](size_t index, const std::vector<uint8_t>& bytes, bool own) {
    const PromptBatch& batch = batches[index];
    std::vector<double> margins(methods.size() * batch.count);
    require_size(bytes, margins.size() * sizeof(double));
    std::memcpy(margins.data(), bytes.data(), bytes.size());
    outcomes.resize(methods.size());
    for (size_t i = 0; i < margins.size(); ++i) {
      outcomes[i / batch.count].push_back(needle_outcome(margins[i]));
    }
    counted();
    if (own) return;
    progress.advance(batch.tokens() * model.config().num_layers);
  };
  const auto first = std::ranges::lower_bound(batches, done, {}, &PromptBatch::first);
  work_in_turn(ranks, static_cast<size_t>(first - batches.begin()), batches.size(), pass, take);
}

void run_needles_generated(Transformer& model, const std::vector<Method>& methods,
                           const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                           int64_t position_offset, Ranks& ranks, size_t done,
                           std::vector<bool>& passes, const std::function<void()>& counted,
                           Progress& progress) {
  const c10::InferenceMode guard;
  const std::vector<PromptBatch> batches = batch_prompts(model, prompts);
  const auto batch_of = [&](size_t piece) { return batches[piece % batches.size()]; };
  // Of each answer of a batch, whether it is right.
  const auto generate = [&](const std::vector<size_t>& own, const PieceDone& passed) {
    if (own.empty()) return;
    std::vector<std::shared_ptr<const LayerWeights>> weights;
    for (int layer = 0; layer < model.config().num_layers; ++layer) {
      stop_if_requested(kStoppedEvaluation);
      weights.push_back(model.load_layer(layer));
    }
    std::unique_ptr<CacheEngine> engine;
    size_t method = methods.size();  // of the engine
    for (const size_t piece : own) {
      stop_if_requested(kStoppedEvaluation);
      if (const size_t wanted = piece / batches.size(); wanted != method) {
        method = wanted;
        engine = generating_engine(methods[method], model.config(), choice);
      }
      const TakesItsTime until_a_batch_ends;
      const PromptBatch batch = batch_of(piece);
      const auto ids = batch_ids(prompts, batch).slice(1, 0, batch.length);
      const auto answers =
          generate_greedily(model, weights, *engine, ids, batch.answer, position_offset);
      std::vector<uint8_t> right;
      for (size_t row = 0; row < batch.count; ++row) {
        const auto& wanted = prompts[batch.first + row].answer;
        const auto* got = answers.data_ptr<int64_t>() + static_cast<int64_t>(row) * answers.size(1);
        right.push_back(std::equal(wanted.begin(), wanted.end(), got) ? 1 : 0);
      }
      passed(piece, std::move(right));
    }
  };
  const auto take = [&](size_t piece, const std::vector<uint8_t>& right, bool) {
    const PromptBatch batch = batch_of(piece);
    require_size(right, batch.count);
    for (const uint8_t pass : right) passes.push_back(pass != 0);
    counted();
    progress.advance(static_cast<int64_t>(batch.count) * batch.length);
  };
  const size_t pieces = methods.size() * batches.size();
  size_t begin = 0;
  while (begin < pieces && begin / batches.size() * prompts.size() + batch_of(begin).first < done) {
    ++begin;
  }
  work_in_turn(ranks, begin, pieces, generate, take);
}

}  // namespace oscar
