// Sample answers beside a report.
#include "oscar/eval/report/answers.h"

#include <fmt/format.h>
#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/eval/report/page.h"

namespace oscar {

// Strict: an answer that is shown must be the one that was given.

namespace {

constexpr const char* kAnswersSchema = "oscar-answers-1";
constexpr size_t kMostTurns = 1000, kMostBytes = size_t{1} << 16;  // of a text
constexpr int64_t kMostAnswerTokens = int64_t{1} << 30;

// An object whose keys are read one by one and must all have been read.
class StrictObject {
 public:
  StrictObject(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) refuse("", "an object");
  }

  std::string text(const char* key) {
    const Json& value = take(key);
    if (!value.is_string() || value.get_ref<const std::string&>().size() > kMostBytes) {
      refuse(key, fmt::format("text of at most {} bytes", kMostBytes));
    }
    return value.get<std::string>();
  }
  int64_t count(const char* key) {
    const Json& value = take(key);
    const bool whole = value.is_number_integer() && value >= 0 && value <= kMostAnswerTokens;
    if (!whole) refuse(key, fmt::format("a whole number up to {}", kMostAnswerTokens));
    return value.get<int64_t>();
  }
  bool flag(const char* key) {
    const Json& value = take(key);
    if (!value.is_boolean()) refuse(key, "true or false");
    return value.get<bool>();
  }
  const Json& list(const char* key) {
    const Json& value = take(key);
    if (!value.is_array() || value.empty() || value.size() > kMostTurns) {
      refuse(key, fmt::format("a list of 1 to {} entries", kMostTurns));
    }
    return value;
  }
  void require_all_read() const {
    if (json_.size() == read_) return;
    refuse("", fmt::format("{} keys and no others", read_));
  }

 private:
  const Json& take(const char* key) {
    if (!json_.contains(key)) refuse(key, "a value");
    ++read_;
    return json_.at(key);
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    const bool there = json_.is_object() && json_.contains(key);
    const Json& found = there ? json_.at(key) : json_;
    throw Error({.what = "these are no answers that can be shown",
                 .where = where_ + (key.empty() ? "" : ": " + key),
                 .expected = expected,
                 .found = !key.empty() && !there
                              ? "nothing"
                              : fmt::format("{} ({})", found.type_name(), found.size()),
                 .hint = "python -m oscar_int2 answers writes them with --json"});
  }

  const Json& json_;
  std::string where_;
  size_t read_ = 0;
};

}  // namespace

Answers read_answers(const Json& json, const std::string& file) {
  StrictObject whole(json, file);
  const std::string schema = whole.text("schema");
  if (schema != kAnswersSchema) {
    throw Error({.what = "these are no answers that can be shown",
                 .where = file + ": schema",
                 .expected = kAnswersSchema,
                 .found = schema});
  }
  Answers answers{.file = file,
                  .serving_sha256 = whole.text("bundle_serving_sha256"),
                  .device = whole.text("device"),
                  .most_tokens = whole.count("most_tokens"),
                  .exact_tokens = whole.count("exact_tokens"),
                  .turns = {}};
  for (const Json& entry : whole.list("turns")) {
    StrictObject turn(entry, fmt::format("{}: turn {}", file, answers.turns.size() + 1));
    answers.turns.push_back({.question = turn.text("question"),
                             .bf16 = turn.text("bf16"),
                             .int2 = turn.text("int2"),
                             .tokens_before = turn.count("tokens_before"),
                             .same = turn.flag("same")});
    turn.require_all_read();
  }
  whole.require_all_read();
  return answers;
}

void require_answers_of(const Answers& answers, const std::string& serving_sha256) {
  if (answers.serving_sha256 == serving_sha256) return;
  throw Error({.what = "the answers are of another bundle",
               .where = answers.file,
               .expected = "serving_sha256 " + serving_sha256,
               .found = answers.serving_sha256,
               .hint = "python -m oscar_int2 answers makes them anew with this bundle"});
}

// Answers as they are shown to people.

namespace {

constexpr size_t kShownTurns = 3;  // the first ones; a reader opens the others

std::string lead_of(const Answers& answers) {
  const auto same = std::ranges::count_if(answers.turns, &AnsweredTurn::same);
  return fmt::format(
      "{} turns of one chat, all of them, unselected. Each is answered over BF16 and over the "
      "2-bit "
      "cache, greedily, with {} tokens at most; the chat goes on with BF16's answer. {} {} the "
      "same "
      "to the last token; two runs over BF16 that add in another order need not agree either. "
      "Tokens "
      "beyond {} are in 2 bits. Run on {}.",
      answers.turns.size(), answers.most_tokens, same, same == 1 ? "pair is" : "pairs are",
      answers.exact_tokens, answers.device);
}

std::string before(const AnsweredTurn& turn) {
  return fmt::format("{} tokens before the answer{}",
                     count(static_cast<double>(turn.tokens_before)),
                     turn.same ? "; both are the same" : "");
}

std::string quote(const std::string& text) {
  std::string out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = escape_markdown(std::string_view(text).substr(begin, end - begin));
    out += line.empty() ? ">\n" : "> " + line + "\n";
    begin = end + 1;
  }
  return out;
}

}  // namespace

std::string answers_html(const Answers& answers) {
  std::string html = fmt::format("<section>\n<h2>Sample answers</h2>\n<p class=\"lead\">{}</p>\n",
                                 escape_html(lead_of(answers)));
  for (size_t i = 0; i < answers.turns.size(); ++i) {
    const AnsweredTurn& turn = answers.turns[i];
    html += fmt::format(
        "<details class=\"turn\"{}><summary>{}. {} <small>{}</small></summary>\n"
        "<div class=\"pair\"><div><h3>BF16</h3><p>{}</p></div>"
        "<div><h3>2 bits</h3><p>{}</p></div></div></details>\n",
        i < kShownTurns ? " open=\"open\"" : "", i + 1, escape_html(turn.question), before(turn),
        escape_html(turn.bf16), escape_html(turn.int2));
  }
  return html + "</section>\n";
}

std::string answers_markdown(const Answers& answers) {
  std::string text = "\n## Sample answers\n" + escape_markdown(lead_of(answers)) + "\n";
  for (size_t i = 0; i < answers.turns.size(); ++i) {
    const AnsweredTurn& turn = answers.turns[i];
    text += fmt::format("\n### {}. {}\n{}.\n\nBF16:\n\n{}\n2 bits:\n\n{}", i + 1,
                        escape_markdown(turn.question), before(turn), quote(turn.bf16),
                        quote(turn.int2));
  }
  return text;
}

}  // namespace oscar
