// Each check is a finding; what cannot be read ends the list.
#include "oscar/bundle/verify_export.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/import.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/fit/fit.h"

namespace oscar {
namespace {

// Of an image by the bundle's f32 matrices: what is written holds the same digits.
constexpr double kImageLimit = 1e-6;
// Of scores and outputs: matrices that were stored in bf16 are that far from orthogonal.
constexpr double kScoreLimit = 5e-3;

bool add_finding(std::vector<Finding>& findings, const std::string& check,
                 const std::function<std::string()>& look) {
  try {
    findings.push_back({true, check, look()});
  } catch (const Error& error) {
    findings.push_back({false, check, error.what()});
  } catch (const nlohmann::json::exception& error) {
    findings.push_back({false, check, std::string(kManifestName) + ": " + error.what()});
  }
  return findings.back().ok;
}

[[noreturn]] void fail(const std::string& what, const std::string& where,
                       const std::string& expected = "", const std::string& found = "") {
  throw Error({.what = what, .where = where, .expected = expected, .found = found});
}

// A number of a manifest, which anyone may have written.
int whole_number(const Json& value, const std::string& name) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const int64_t number = value.is_number_integer() ? value.get<int64_t>() : -1;
  if (number < 0 || number > kMost) {
    fail("not a whole number", name, fmt::format("0 to {}", kMost), value.dump());
  }
  return static_cast<int>(number);
}

// Where the folder's own manifest says that it is an export to another backend; "" where it does
// not.
std::string hint_of_manifest(const ExchangeFormat& format, const std::filesystem::path& folder) {
  std::string recorded;
  try {
    const Json manifest = read_json_file(folder / kManifestName);
    if (!manifest.is_object() || !manifest.contains("format")) return "";
    recorded = manifest["format"].get<std::string>();
  } catch (const Error&) {
    return "";
  } catch (const nlohmann::json::exception&) {
    return "";
  }
  if (is_called(format, recorded)) return "";
  const auto& known = exchange_formats();
  const auto other = std::ranges::find_if(
      known, [&](const ExchangeFormat& named) { return is_called(named, recorded); });
  const std::string way_out =
      other == known.end() ? "" : std::string(": verify it with --for ") + other->name;
  return fmt::format("{} says that this is an export to {}{}", kManifestName, recorded, way_out);
}

ReadTransforms read_files(const ExchangeFormat& format, const std::filesystem::path& folder) {
  try {
    return read_export(format, folder, 1);
  } catch (const Error& error) {
    ErrorInfo info = error.info();
    const std::string hint = hint_of_manifest(format, folder);
    if (hint.empty()) throw;
    info.hint += (info.hint.empty() ? "" : "; ") + hint;
    throw Error(std::move(info));
  }
}

// What the backend's own loader keeps of the files: fields that it does not know are dropped, as it
// drops them without a word. The checks behind see what the server would run.
std::string play_loader(const ExchangeFormat& format, ReadTransforms& read) {
  if (format.backend == nullptr) return "arrays: all of them";
  const Backend& backend = find_backend(format.backend);
  for (auto& entry : read.set) {
    if (!backend.key_partner) entry.second.key.partner = {};
    if (!backend.value_partner) entry.second.value.partner = {};
    if (!backend.key_mean) entry.second.key.mean = {};
    if (!backend.value_mean) entry.second.value.mean = {};
  }
  std::set<std::string> known = {torch_layout(format.layout).matrix, "layer_id", "eigenvalues"};
  if (backend.key_partner) known.insert("q_rotation");
  if (backend.value_partner) known.insert("o_rotation");
  if (backend.key_mean) known.insert("k_mean");
  std::string dropped;
  for (const std::string& field : read.fields) {
    if (!known.contains(field)) dropped += (dropped.empty() ? "" : ", ") + field;
  }
  if (!dropped.empty()) {
    fail("the server drops fields without a word", format.name, "files without them", dropped);
  }
  return "nothing that the server drops";
}

std::string place(int layer, Side side, int head) {
  return fmt::format("layer {}, {}, head {}", layer, side == Side::kKey ? "keys" : "values", head);
}

using Visit = std::function<void(int layer, Side side, const SideTransform& transform, int head)>;

void each_head(const TransformSet& set, const Visit& visit) {
  for (const auto& [id, layer] : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const SideTransform& transform = side_of(layer, side);
      for (int head = 0; head < transform.forward.count; ++head) visit(id, side, transform, head);
    }
  }
}

std::string check_shapes(const ExchangeFormat& format, const TransformSet& set,
                         const std::optional<Json>& manifest) {
  const LayerTransforms& first = set.begin()->second;
  for (const auto& [id, layer] : set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const SideTransform& one = side_of(layer, side);
      const SideTransform& other = side_of(first, side);
      const std::string where = place(id, side, 0);
      if (format.layout == FileLayout::kTorchShared && one.forward.count != 1) {
        fail("a matrix for each head where the backend takes one a layer", where);
      }
      if (one.forward.rows != other.forward.rows || one.forward.count != other.forward.count) {
        fail("layers of different shapes", where);
      }
      const auto fits = [&](int count, int cols, bool empty) {
        return empty || (count == one.forward.count && cols == one.forward.cols);
      };
      if (!fits(one.partner.count, one.partner.cols, one.partner.empty()) ||
          !fits(one.mean.count, one.mean.cols, one.mean.empty())) {
        fail("a mean or an inverse of another shape than the rotation", where);
      }
    }
  }
  const int heads = first.key.forward.count, d = first.key.forward.rows;
  if (manifest) {
    std::vector<int> ids;
    for (const auto& entry : set) ids.push_back(entry.first);
    std::vector<int> expected;
    for (const Json& id : manifest->at("layers")) expected.push_back(whole_number(id, "layers"));
    if (ids != expected) {
      fail("other global layer ids", "the files", fmt::format("{} layers", expected.size()),
           fmt::format("{} layers, {} to {}", ids.size(), ids.front(), ids.back()));
    }
    const auto check = [&](const char* name, int found) {
      if (whole_number(manifest->at(name), name) != found) {
        fail("another shape", name, manifest->at(name).dump(), std::to_string(found));
      }
    };
    check("heads_k", heads);
    check("head_dim_k", d);
    check("heads_v", first.value.forward.count);
    check("head_dim_v", first.value.forward.rows);
  }
  return fmt::format("layers {} to {}, keys [{}, {}, {}], values [{}, {}, {}]", set.begin()->first,
                     set.rbegin()->first, heads, d, d, first.value.forward.count,
                     first.value.forward.rows, first.value.forward.rows);
}

std::string check_inverses(const TransformSet& set) {
  double largest = 0;
  each_head(set, [&](int id, Side side, const SideTransform& transform, int head) {
    const TransformKind kind =
        transform.partner.empty() ? TransformKind::kOscar : TransformKind::kBalanced;
    const TransformDeviation deviation = transform_deviation(
        transform.forward[head], partner_matrix(transform, side, head), side, kind);
    const double limit = transform.partner.empty() ? kInverseLimitBf16 : kInverseLimitBf16Balanced;
    if (!(deviation.inverse_bf16 <= limit)) {
      fail(transform.partner.empty() ? "a rotation is not orthogonal after rounding to bf16"
                                     : "a transform times its inverse is not the identity",
           place(id, side, head), fmt::format("at most {:g}", limit),
           fmt::format("{:.3g}", deviation.inverse_bf16));
    }
    largest = std::max(largest, deviation.inverse_bf16);
  });
  return fmt::format("at most {:.2g} from the identity", largest);
}

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

std::string check_scores(const TransformSet& set) {
  double largest = 0;
  each_head(set, [&](int id, Side side, const SideTransform& transform, int head) {
    const int d = transform.forward.rows;
    const std::vector<float> row = probe_row(d, 0), other = probe_row(d, 1);
    const std::vector<double> image = probe_image(transform, head, row);
    const MatrixD partner = partner_matrix(transform, side, head).cast<double>();
    const Eigen::Map<const VectorD> turned(image.data(), d);
    std::vector<double> wide(row.begin(), row.end()), query(other.begin(), other.end());
    for (int i = 0; i < d && !transform.mean.empty(); ++i) wide[i] -= transform.mean[head][i];
    const Eigen::Map<const VectorD> x(wide.data(), d), q(query.data(), d);
    double change = 0;
    if (side == Side::kKey) {  // q' k'^T = q (k - mean)^T
      change = std::abs((q * partner).dot(turned) - q.dot(x)) / (norm(query) * norm(wide));
    } else {  // o' o_rotation + mean
      change = (turned * partner - x).norm() / norm(wide);
    }
    if (!(change <= kScoreLimit)) {
      fail(side == Side::kKey ? "scores change" : "outputs change", place(id, side, head),
           fmt::format("by at most {:g}", kScoreLimit), fmt::format("{:.3g}", change));
    }
    largest = std::max(largest, change);
  });
  return fmt::format("change by {:.2g} at most, relative", largest);
}

std::string check_direction(const TransformSet& set, const Json& manifest) {
  double largest = 0;
  std::map<int, size_t> index;
  for (const auto& entry : set) index.emplace(entry.first, index.size());
  each_head(set, [&](int id, Side side, const SideTransform& transform, int head) {
    const auto expected = manifest.at("probe")
                              .at(side == Side::kKey ? "keys" : "values")
                              .at(index.at(id))
                              .at(static_cast<size_t>(head))
                              .get<std::vector<double>>();
    const std::vector<float> row = probe_row(transform.forward.rows, 0);
    const std::vector<double> image = probe_image(transform, head, row);
    if (expected.size() != std::min<size_t>(image.size(), kProbedNumbers)) {
      fail("malformed probe", kManifestName);
    }
    const double scale = norm(image);
    for (size_t i = 0; i < expected.size(); ++i) {
      const double change = std::abs(image[i] - expected[i]) / scale;
      if (!(change <= kImageLimit)) {
        fail("a row goes elsewhere than by the bundle", place(id, side, head),
             fmt::format("{:.6g}", expected[i]),
             fmt::format("{:.6g}: another layer's matrix, or a transpose", image[i]));
      }
      largest = std::max(largest, change);
    }
  });
  return fmt::format("within {:.2g} of the bundle's, relative", largest);
}

// The plan's part that codes rows, from what the manifest says of it.
BackendRun run_of(const ExchangeFormat& format, const Json& manifest) {
  const Backend& backend = find_backend(format.backend);
  CacheFormat quantizer = default_codec(backend);
  const auto number = [&](const char* name) { return whole_number(manifest.at(name), name); };
  quantizer.quant_group_size = number("quant_group_size");
  const auto dtype = manifest.at("metadata_dtype").get<std::string>();
  if (!parse_codec_word(dtype, quantizer.metadata_dtype)) {
    fail("unknown metadata dtype", kManifestName, "", dtype);
  }
  const int whole = quantizer.quant_group_size;
  if (whole == number("head_dim_k") && whole == number("head_dim_v")) {
    quantizer.quant_group_size = 0;
  }
  take_rules_of(backend, quantizer);
  quantizer.quant_group_size = whole;
  BackendRun run;
  run.format = quantizer.row_format();
  run.packing = backend.packing;
  const Json& clip = manifest.at("clip");
  run.clips.pair = ClipPair{clip.at(0).get<double>(), clip.at(1).get<double>()};
  return run;
}

std::string check_row(const ExchangeFormat& format, const TransformSet& set, const Json& manifest) {
  const BackendRun run = run_of(format, manifest);
  std::string text;
  for (const Side side : {Side::kKey, Side::kValue}) {
    const char* name = side == Side::kKey ? "keys" : "values";
    const ProbeCode code = probe_code(run, side_of(set.begin()->second, side), side);
    const Json& expected = manifest.at("row").at(name);
    const ProbeCode stored{expected.at("codes").get<std::string>(),
                           expected.at("metadata").get<std::string>()};
    if (code != stored) {
      fail("a row is coded to other bytes", name, stored.codes + " " + stored.metadata,
           code.codes + " " + code.metadata);
    }
    text += fmt::format("{}{} {}.. {}", text.empty() ? "" : ", ", name, code.codes.substr(0, 8),
                        code.metadata.substr(0, 16));
  }
  return text;
}

}  // namespace

std::vector<Finding> verify_export(const ExchangeFormat& format,
                                   const std::filesystem::path& folder) {
  std::vector<Finding> findings;
  ReadTransforms read;
  std::optional<Json> manifest;
  const std::filesystem::path said = folder / kManifestName;
  const bool readable = add_finding(findings, "files", [&] {
    read = read_files(format, folder);
    return fmt::format("{}, {} layers", read.kind, read.set.size());
  });
  if (!readable) return findings;
  add_finding(findings, "fields", [&] { return play_loader(format, read); });
  add_finding(findings, "checksums", [&]() -> std::string {
    if (!std::filesystem::exists(said)) {
      return fmt::format("no {}: what the matrices should be is not looked at", kManifestName);
    }
    manifest = read_json_file(said);
    if (!is_called(format, manifest->at("format").get<std::string>())) {
      fail("an export to another backend", said.string(), format.name,
           manifest->at("format").get<std::string>());
    }
    require_files_of(*manifest, read.files);
    return "as in " + std::string(kManifestName);
  });
  const bool whole = add_finding(findings, "layers and shapes",
                                 [&] { return check_shapes(format, read.set, manifest); });
  if (!whole) return findings;
  add_finding(findings, "inverses in bf16", [&] { return check_inverses(read.set); });
  add_finding(findings, "scores and outputs", [&] { return check_scores(read.set); });
  if (!manifest) return findings;
  add_finding(findings, "direction", [&] { return check_direction(read.set, *manifest); });
  if (format.backend != nullptr && manifest->contains("row") && !manifest->at("row").is_null()) {
    add_finding(findings, "row in bytes", [&] { return check_row(format, read.set, *manifest); });
  }
  return findings;
}

}  // namespace oscar
