// The words of each choice, once.
#include "oscar/cache/codec_rules.h"

#include <array>
#include <utility>

namespace oscar {
namespace {

template <typename Choice, size_t kCount>
using Words = std::array<std::pair<Choice, const char*>, kCount>;

constexpr Words<ClipSpan, 2> kSpans = {
    {{ClipSpan::kHeadRow, "head_row"}, {ClipSpan::kQuantGroup, "quant_group"}}};
constexpr Words<ZeroForm, 2> kZeros = {
    {{ZeroForm::kCodeUnits, "code_units"}, {ZeroForm::kMinimum, "minimum"}}};
constexpr Words<CodeTies, 2> kTies = {{{CodeTies::kUp, "up"}, {CodeTies::kEven, "even"}}};
constexpr Words<MetadataRounding, 2> kRoundings = {
    {{MetadataRounding::kBeforeCoding, "before_coding"},
     {MetadataRounding::kAfterCoding, "after_coding"}}};
constexpr Words<MetadataDtype, 3> kDtypes = {{{MetadataDtype::kFp16, "fp16"},
                                              {MetadataDtype::kBf16, "bf16"},
                                              {MetadataDtype::kFp32, "fp32"}}};

template <typename Choice, size_t kCount>
const char* word_in(const Words<Choice, kCount>& words, Choice choice) {
  for (const auto& [known, word] : words) {
    if (known == choice) return word;
  }
  return words[0].second;
}

template <typename Choice, size_t kCount>
bool find_in(const Words<Choice, kCount>& words, const std::string& word, Choice& choice) {
  for (const auto& [known, name] : words) {
    if (word != name) continue;
    choice = known;
    return true;
  }
  return false;
}

}  // namespace

const char* codec_word(ClipSpan span) { return word_in(kSpans, span); }
const char* codec_word(ZeroForm zero) { return word_in(kZeros, zero); }
const char* codec_word(CodeTies ties) { return word_in(kTies, ties); }
const char* codec_word(MetadataRounding rounding) { return word_in(kRoundings, rounding); }
const char* codec_word(MetadataDtype dtype) { return word_in(kDtypes, dtype); }
bool parse_codec_word(const std::string& word, ClipSpan& span) {
  return find_in(kSpans, word, span);
}
bool parse_codec_word(const std::string& word, ZeroForm& zero) {
  return find_in(kZeros, word, zero);
}
bool parse_codec_word(const std::string& word, CodeTies& ties) {
  return find_in(kTies, word, ties);
}
bool parse_codec_word(const std::string& word, MetadataRounding& rounding) {
  return find_in(kRoundings, word, rounding);
}
bool parse_codec_word(const std::string& word, MetadataDtype& dtype) {
  return find_in(kDtypes, word, dtype);
}

}  // namespace oscar
