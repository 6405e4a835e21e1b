// Answers as they are shown to people.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/base/numbers.h"
#include "oscar/report/answers.h"
#include "oscar/report/html.h"
#include "oscar/report/markdown.h"

namespace oscar {
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
