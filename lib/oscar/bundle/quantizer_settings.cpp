// The names of codec rules in quantizer settings.
#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"

namespace oscar {
namespace {

template <typename Rule>
void read_rule(const char* attribute, const std::string& name, Rule& rule) {
  if (parse_rule(name, rule)) return;
  throw Error({.what = "unknown rule of the codec", .where = attribute, .found = name});
}

}  // namespace

CodecRules codec_rules(const QuantizerSettings& settings) {
  CodecRules rules;
  read_rule("clip_span", settings.clip_span, rules.clip_span);
  read_rule("zero", settings.zero, rules.zero);
  read_rule("ties", settings.ties, rules.ties);
  read_rule("metadata_rounding", settings.metadata_rounding, rules.metadata_rounding);
  return rules;
}

void set_codec_rules(QuantizerSettings& settings, const CodecRules& rules) {
  settings.clip_span = rule_name(rules.clip_span);
  settings.zero = rule_name(rules.zero);
  settings.ties = rule_name(rules.ties);
  settings.metadata_rounding = rule_name(rules.metadata_rounding);
}

}  // namespace oscar
