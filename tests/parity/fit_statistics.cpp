// Fits statistics that another program made: a JSON line and raw doubles in, raw numbers out.
//
// stdin: one JSON line {heads, d, rotary_dim, theta, count_q, count_kv, kind, center, shared,
// span}, then little-endian doubles: q_moment, k_moment, v_moment, attn_out_moment, o_proj_metric
// [heads, d, d] each, then q_sum, k_sum, v_sum, attn_out_sum [heads, d].
// stdout: one JSON line {kinds, fallbacks, conditions, warnings}, then doubles: the averaged and
// centered query and key moments [heads, d, d], key_mean [heads, d], and for keys, then values:
// forward, partner [heads, d, d] widened from f32, eigenvalues [heads, d], metric, feedback
// [heads, d, d]; last, the rotation of the first head's C_Q in float64 [d, d].
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/moments.h"

namespace {

using oscar::Json;

void read_doubles(std::vector<double>& data) {
  std::cin.read(reinterpret_cast<char*>(data.data()),
                static_cast<std::streamsize>(data.size() * sizeof(double)));
  if (!std::cin) throw oscar::Error({.what = "the input ends early"});
}

template <typename T>
void write_doubles(const T* data, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const double value = static_cast<double>(data[i]);
    std::cout.write(reinterpret_cast<const char*>(&value), sizeof(value));
  }
}

void write_side(const oscar::SideTransform& t, oscar::Side side) {
  write_doubles(t.forward.data.data(), t.forward.data.size());
  for (int head = 0; head < t.forward.count; ++head) {
    const oscar::MatrixF partner = oscar::partner_matrix(t, side, head);
    write_doubles(partner.data(), static_cast<size_t>(partner.size()));
  }
  write_doubles(t.eigenvalues.data.data(), t.eigenvalues.data.size());
  write_doubles(t.metric.data.data(), t.metric.data.size());
  write_doubles(t.feedback.data.data(), t.feedback.data.size());
}

Json kinds_of(const oscar::SideTransform& t) {
  Json kinds = Json::array();
  for (const oscar::TransformKind kind : t.kind) kinds.push_back(static_cast<int>(kind));
  return kinds;
}

void run() {
  std::string line;
  std::getline(std::cin, line);
  const Json header = oscar::parse_json(line, "stdin");
  const int heads = header.at("heads"), d = header.at("d");
  oscar::LayerGeometry geometry;
  geometry.num_qo_heads = geometry.num_kv_heads = heads;
  geometry.head_dim_k = geometry.head_dim_v = d;
  oscar::LayerStatistics s = oscar::make_statistics(geometry);
  s.count_q = header.at("count_q");
  s.count_kv = header.at("count_kv");
  for (auto* stack :
       {&s.q_moment, &s.k_moment, &s.v_moment, &s.attn_out_moment, &s.o_proj_metric}) {
    read_doubles(stack->data);
  }
  for (auto* stack : {&s.q_sum, &s.k_sum, &s.v_sum, &s.attn_out_sum}) read_doubles(stack->data);

  oscar::Rope rope;
  rope.rotary_dim = header.at("rotary_dim");
  rope.theta = header.at("theta");
  for (int i = 0; i < rope.rotary_dim / 2; ++i) {
    rope.inv_freq.push_back(std::pow(rope.theta, -2.0 * i / rope.rotary_dim));
  }
  oscar::FitOptions options;
  options.kind = static_cast<oscar::TransformKind>(header.at("kind").get<int>());
  options.center = header.at("center");
  options.granularity =
      header.at("shared").get<bool>() ? oscar::Granularity::kShared : oscar::Granularity::kPerHead;
  options.position_span = header.at("span");
  options.rounding = oscar::Rounding::kShaped;
  options.scale_correction = oscar::ScaleCorrection::kMetric;

  const oscar::LayerMoments moments = oscar::layer_moments(s, options, rope);
  const oscar::LayerTransforms t = oscar::fit_layer(s, options, rope);
  Json report;
  report["kinds"] = Json::array({kinds_of(t.key), kinds_of(t.value)});
  report["fallbacks"] = Json::array({t.key.fallback, t.value.fallback});
  report["conditions"] = Json::array({t.key.condition_number, t.value.condition_number});
  report["warnings"] = t.warnings;
  std::cout << report.dump() << '\n';
  write_doubles(moments.query.data.data(), moments.query.data.size());
  write_doubles(moments.key.data.data(), moments.key.data.size());
  write_doubles(moments.key_mean.data.data(), moments.key_mean.data.size());
  write_side(t.key, oscar::Side::kKey);
  write_side(t.value, oscar::Side::kValue);
  const oscar::OscarRotation rotation =
      oscar::oscar_rotation(oscar::eigh(moments.query[0], "first head"));
  write_doubles(rotation.rotation.data(), static_cast<size_t>(rotation.rotation.size()));
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
