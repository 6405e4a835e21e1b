// Comparison of two files as flat lists, so that names this build does not know count too.
#include "oscar/bundle/diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "oscar/base/error.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"

namespace oscar {
namespace {

constexpr size_t kLongestText = 60;

std::string text_of(const hdf5::AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    return text->size() > kLongestText ? text->substr(0, kLongestText) + "..." : *text;
  }
  if (const auto* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  return fmt::format("{}", std::get<double>(value));
}

bool is_compared(const std::string& object, const std::string& name) {
  return object != "/" || (name != schema::kContentHash && name != schema::kCreated &&
                           !name.starts_with(schema::kToolPrefix));
}

std::string dataset_difference(const hdf5::Dataset& a, const hdf5::Dataset& b) {
  if (a.dtype() != b.dtype() || a.shape != b.shape) {
    return fmt::format("{} {} against {} {}", hdf5::dtype_name(a.dtype()),
                       hdf5::shape_text(a.shape), hdf5::dtype_name(b.dtype()),
                       hdf5::shape_text(b.shape));
  }
  if (a.data == b.data) return "";
  return std::visit(
      [&b](const auto& left) {
        const auto& right = std::get<std::decay_t<decltype(left)>>(b.data);
        double largest = 0, scale = 0;
        size_t count = 0;
        for (size_t i = 0; i < left.size(); ++i) {
          const auto x = static_cast<double>(left[i]), y = static_cast<double>(right[i]);
          if (left[i] != right[i]) ++count;
          largest = std::max(largest, std::abs(x - y));
          scale = std::max({scale, std::abs(x), std::abs(y)});
        }
        return fmt::format("{} of {} elements differ, by {:.3g} at most (largest entry {:.3g})",
                           count, left.size(), largest, scale);
      },
      a.data);
}

void only_in(std::vector<std::string>& lines, const std::string& path, const char* which) {
  lines.push_back(fmt::format("{}: only in {}", path, which));
}

}  // namespace

std::vector<std::string> diff_bundles(const std::filesystem::path& a,
                                      const std::filesystem::path& b) {
  const RawFile first = load_raw(a), second = load_raw(b);
  for (const RawFile* raw : {&first, &second}) {
    check_format(*raw);
    check_content_hash(*raw);
  }
  std::vector<std::string> lines;
  std::set<std::string> objects;
  for (const RawFile* raw : {&first, &second}) {
    for (const auto& object : raw->objects) objects.insert(object.path);
  }
  const auto find = [](const auto& map, const std::string& key) {
    const auto place = map.find(key);
    return place == map.end() ? nullptr : &place->second;
  };
  const auto has = [](const RawFile& raw, const std::string& path) {
    return std::binary_search(raw.objects.begin(), raw.objects.end(),
                              hdf5::ObjectInfo{path, false, "", {}},
                              [](const auto& x, const auto& y) { return x.path < y.path; });
  };
  static const std::map<std::string, hdf5::AttributeValue> kNone;
  for (const auto& path : objects) {
    if (!has(first, path) || !has(second, path)) {
      // Of a group that one file lacks, the group's own line says enough.
      const std::string parent = path.substr(0, path.rfind('/'));
      if (parent.empty() || (has(first, parent) && has(second, parent))) {
        only_in(lines, path, has(first, path) ? "A" : "B");
      }
      continue;
    }
    const auto* left = find(first.attributes, path);
    const auto* right = find(second.attributes, path);
    const auto& mine = left != nullptr ? *left : kNone;
    const auto& other = right != nullptr ? *right : kNone;
    for (const auto& [name, value] : mine) {
      if (!is_compared(path, name)) continue;
      const auto* theirs = find(other, name);
      const std::string label = path + " attribute " + name;
      if (theirs == nullptr) {
        only_in(lines, label, "A");
      } else if (value != *theirs) {
        lines.push_back(fmt::format("{}: {} against {}", label, text_of(value), text_of(*theirs)));
      }
    }
    for (const auto& entry : other) {
      if (is_compared(path, entry.first) && !mine.contains(entry.first)) {
        only_in(lines, path + " attribute " + entry.first, "B");
      }
    }
    const auto* data = find(first.datasets, path);
    const auto* other_data = find(second.datasets, path);
    if ((data == nullptr) != (other_data == nullptr)) {
      lines.push_back(path + ": a group against a dataset");
    } else if (data != nullptr) {
      const std::string text = dataset_difference(*data, *other_data);
      if (!text.empty()) lines.push_back(path + ": " + text);
    }
  }
  return lines;
}

}  // namespace oscar
