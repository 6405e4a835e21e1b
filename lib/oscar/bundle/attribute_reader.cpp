// What is in an attribute, as text, JSON or a name.
#include "oscar/bundle/attribute_reader.h"

#include "oscar/base/error.h"

namespace oscar {

void refuse_object(const RawFile& raw, const std::string& object, const std::string& what,
                   const std::string& expected, const std::string& found, const std::string& hint) {
  throw Error({.what = what,
               .where = raw.name + ": " + object,
               .expected = expected,
               .found = found,
               .hint = hint});
}

Json AttributeReader::json(const char* name) const {
  const std::string& text = *find<std::string>(name, "text");
  return parse_json(text, raw.name + ": " + label(name));
}

void AttributeReader::operator()(const char* name, std::string& value) const {
  if (const std::string* text = find<std::string>(name, "text")) value = *text;
}

void AttributeReader::operator()(const char* name, AttentionKind& value) const {
  const std::string& text = *find<std::string>(name, "text");
  for (const auto kind : {AttentionKind::kFull, AttentionKind::kSliding, AttentionKind::kLocal}) {
    if (text == schema::attention_name(kind)) {
      value = kind;
      return;
    }
  }
  refuse_object(raw, label(name), "unknown kind of attention", "full, sliding or local", text);
}

void AttributeReader::operator()(const char* name, std::vector<CorpusSource>& sources) const {
  const Json list = json(name);
  try {
    for (const auto& entry : list) {
      CorpusSource s;
      entry.at("name").get_to(s.name);
      entry.at("sha256").get_to(s.sha256);
      s.kind = entry.value("kind", std::string());
      s.weight = entry.value("weight", 1.0);
      s.documents_read = entry.value("documents_read", int64_t{0});
      s.documents_used = entry.value("documents_used", int64_t{0});
      s.tokens_read = entry.value("tokens_read", int64_t{0});
      s.tokens_used = entry.value("tokens_used", int64_t{0});
      s.dropped = entry.value("dropped", std::vector<std::string>());
      sources.push_back(std::move(s));
    }
  } catch (const nlohmann::json::exception& error) {
    refuse_object(raw, label(name), "attribute does not describe corpus sources", "", error.what());
  }
}

std::vector<std::string> text_list(const RawFile& raw, const std::string& object,
                                   const char* name) {
  const auto group = raw.attributes.find(object);
  if (group == raw.attributes.end() || !group->second.contains(name)) return {};
  const Json list = AttributeReader{raw, object}.json(name);
  try {
    return list.get<std::vector<std::string>>();
  } catch (const nlohmann::json::exception& error) {
    refuse_object(raw, object + " attribute " + name, "attribute is not a JSON list of texts", "",
                  error.what());
  }
}

}  // namespace oscar
