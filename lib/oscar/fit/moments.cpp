// The moments that follow from the sums of a calibration, averaged over served positions (math
// 3).
#include "oscar/fit/moments.h"

#include <fmt/format.h>
#include <cmath>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/linalg.h"

namespace oscar {

// Checks on a layer's sums, and the step from sums to moments per token.

namespace {

std::string place(const LayerGeometry& geometry, const char* name, int head = -1) {
  const std::string layer = fmt::format("layer {}", geometry.layer_id);
  return head < 0 ? fmt::format("{}, {}", layer, name)
                  : fmt::format("{}, {}, head {}", layer, name, head);
}

[[noreturn]] void wrong_shape(const LayerGeometry& geometry, const char* name, int heads, int d) {
  throw Error({.what = "statistics of the wrong shape",
               .where = place(geometry, name),
               .expected = fmt::format("{} heads of dimension {}", heads, d)});
}

void check_moment(const LayerGeometry& geometry, const char* name,
                  const MatrixStack<double>& moment, int d) {
  if (moment.count != geometry.num_kv_heads || moment.rows != d || moment.cols != d) {
    wrong_shape(geometry, name, geometry.num_kv_heads, d);
  }
  for (int head = 0; head < moment.count; ++head) {
    if (!moment[head].allFinite()) {
      throw Error({.what = "a sum is not finite",
                   .where = place(geometry, name, head),
                   .hint = "look for NaN or overflow in the model's weights or activations"});
    }
    if (moment[head].diagonal().minCoeff() < 0) {
      throw Error({.what = "a sum of squares is negative",
                   .where = place(geometry, name, head),
                   .found = fmt::format("{}", moment[head].diagonal().minCoeff())});
    }
  }
}

void check_sum(const LayerGeometry& geometry, const char* name, const VectorStack<double>& sum,
               int d) {
  if (sum.count != geometry.num_kv_heads || sum.cols != d) {
    wrong_shape(geometry, name, geometry.num_kv_heads, d);
  }
  for (int head = 0; head < sum.count; ++head) {
    if (!sum[head].allFinite()) {
      throw Error({.what = "a sum is not finite", .where = place(geometry, name, head)});
    }
  }
}

void check_statistics(const LayerStatistics& s, const FitOptions& options) {
  const LayerGeometry& g = s.geometry;
  const auto require_positive = [&](const char* name, int64_t count) {
    if (count > 0) return;
    throw Error({.what = "there are no tokens to fit from",
                 .where = place(g, name),
                 .expected = "a positive count",
                 .found = std::to_string(count),
                 .hint = "calibrate on a corpus that is not empty"});
  };
  require_positive("count_q", s.count_q);
  require_positive("count_kv", s.count_kv);
  check_moment(g, "q_moment", s.q_moment, g.head_dim_k);
  check_moment(g, "k_moment", s.k_moment, g.head_dim_k);
  check_moment(g, "v_moment", s.v_moment, g.head_dim_v);
  check_moment(g, "attn_out_moment", s.attn_out_moment, g.head_dim_v);
  check_moment(g, "o_proj_metric", s.o_proj_metric, g.head_dim_v);
  check_sum(g, "q_sum", s.q_sum, g.head_dim_k);
  check_sum(g, "k_sum", s.k_sum, g.head_dim_k);
  check_sum(g, "attn_out_sum", s.attn_out_sum, g.head_dim_v);
  check_sum(g, "v_sum", s.v_sum, g.head_dim_v);
  if (options.objective_v == ValueObjective::kEnergy) {
    if (s.v_energy_moment.empty()) {
      throw Error({.what = "the energy objective needs a moment that these statistics lack",
                   .where = place(g, "v_energy_moment"),
                   .hint = "collect with --objective-v energy (a merge drops this moment)"});
    }
    check_moment(g, "v_energy_moment", s.v_energy_moment, g.head_dim_v);
  }
  if (options.position_span < 0) {
    throw Error({.what = "a negative position span",
                 .where = fmt::format("layer {}", g.layer_id),
                 .found = std::to_string(options.position_span)});
  }
}

MatrixStack<double> divided(const MatrixStack<double>& stack, int64_t count) {
  MatrixStack<double> result = stack;
  for (double& entry : result.data) entry /= static_cast<double>(count);
  return result;
}

VectorStack<double> divided(const VectorStack<double>& stack, int64_t count) {
  VectorStack<double> result = stack;
  for (double& entry : result.data) entry /= static_cast<double>(count);
  return result;
}

// Why rows of the layer can't count by attention; "" when they can.
std::string weights_problem(const LayerStatistics& s, const FitOptions& options) {
  if (s.attended.empty()) return "these statistics were collected without --row-weights attention";
  if (options.position_span == 0) {
    return "keys are weighted by attention at served positions only, not at those collected";
  }
  return "";
}

void check_attended(const LayerStatistics& s) {
  const LayerGeometry& g = s.geometry;
  check_moment(g, "q_attended_moment", s.attended.q_moment, g.head_dim_k);
  check_moment(g, "k_attended_moment", s.attended.k_moment, g.head_dim_k);
  check_moment(g, "v_attended_moment", s.attended.v_moment, g.head_dim_v);
  check_sum(g, "k_attended_sum", s.attended.k_sum, g.head_dim_k);
  check_sum(g, "k_sink_sum", s.attended.k_sink_sum, g.head_dim_k);
  check_sum(g, "v_attended_sum", s.attended.v_sum, g.head_dim_v);
}

// Whether a query has read a row of the head as INT2.
bool has_weight(const AttendedSums& attended, int head) {
  const auto h = static_cast<size_t>(head);
  return attended.q_weight[h] > 0 && attended.k_weight[h] > 0 && attended.v_weight[h] > 0;
}

// Puts the weighted moments per weight in the place of those per row. Keys are then at position 0.
void weigh_by_attention(const AttendedSums& attended, LayerMoments& m,
                        VectorStack<double>& key_mean, VectorStack<double>& value_mean) {
  for (int head = 0; head < m.key.count; ++head) {
    const auto h = static_cast<size_t>(head);
    const double q = attended.q_weight[h], k = attended.k_weight[h], v = attended.v_weight[h];
    if (!has_weight(attended, head)) continue;
    m.query[head] = attended.q_moment[head] / q;
    m.key[head] = attended.k_moment[head] / k;
    m.value[head] = attended.v_moment[head] / v;
    key_mean[head] = attended.k_sum[head] / k;
    value_mean[head] = attended.v_sum[head] / v;
  }
}

// Centers of the keys of one head, and the moment of what keys differ by from them (math 4.9), both
// over the weight of all keys. Rows of segment s turn with their positions, their center with the
// middle of s. False: no key has weight.
bool center_in_segments(const AttendedSums& attended, int head, const Rope& rope,
                        const FitOptions& options, LayerMoments& m) {
  const auto h = static_cast<size_t>(head);
  const double all = attended.k_weight[h], sinks = attended.k_sink_weight[h];
  if (!has_weight(attended, head)) return false;
  const MeanPhase segments = mean_phase_of_segments(options.position_span);
  const MeanPhase positions = [&](double omega) { return segments(omega) * segment_phase(omega); };
  MatrixD moment = average_moment(m.key[head], rope, positions);
  const VectorD sink_sum = attended.k_sink_sum[head], rest = attended.k_sum[head] - sink_sum;
  const double weights[kCenters] = {all - sinks, sinks};
  const VectorD* const sums[kCenters] = {&rest, &sink_sum};
  MatrixD between = MatrixD::Zero(moment.rows(), moment.cols());
  for (int j = 0; j < kCenters; ++j) {
    // A text without sinks has one center, twice.
    const bool some = weights[j] > 0;
    const VectorD mean =
        some ? VectorD(*sums[j] / weights[j]) : VectorD(attended.k_sum[head] / all);
    const VectorD center =
        average_sum(mean, rope, [](double omega) { return segment_phase(omega); });
    m.key_centers[head].row(j) = center;
    if (some) between += weights[j] / all * center.transpose() * center;
  }
  m.key[head] = moment - average_moment(between, rope, segments);
  m.key_mean[head] = average_sum(attended.k_sum[head] / all, rope, positions);
  return true;
}

// Moments about the mean, C - mean^T mean. What is left of rows that do not vary is the rounding
// error of the difference; it is set to zero, so that nobody takes it for a direction.
void center(MatrixStack<double>& moment, const VectorStack<double>& mean, int head) {
  constexpr double kRounding = 1e-12;
  const double before = moment[head].trace();
  moment[head] -= mean[head].transpose() * mean[head];
  if (moment[head].trace() <= kRounding * before) moment[head].setZero();
}

}  // namespace

bool weighs_by_attention(const LayerStatistics& statistics, const FitOptions& options) {
  if (options.row_weights == RowWeights::kEven || !statistics.geometry.quantized ||
      !weights_problem(statistics, options).empty()) {
    return false;
  }
  for (int head = 0; head < statistics.geometry.num_kv_heads; ++head) {
    if (has_weight(statistics.attended, head)) return true;
  }
  return false;
}

std::string used_row_weights(const std::vector<LayerStatistics>& statistics,
                             const FitOptions& options) {
  int even = 0, by_attention = 0;
  for (const LayerStatistics& layer : statistics) {
    if (!layer.geometry.quantized || !layer.geometry.fitted()) continue;
    ++(weighs_by_attention(layer, options) ? by_attention : even);
  }
  if (even == 0 && by_attention == 0) return row_weights_name(options.row_weights);
  if (even > 0 && by_attention > 0) return kMixedRowWeights;
  return row_weights_name(even > 0 ? RowWeights::kEven : RowWeights::kAttention);
}

LayerMoments layer_moments(const LayerStatistics& statistics, const FitOptions& options,
                           const Rope& model_rope) {
  check_statistics(statistics, options);
  const Rope rope = statistics.geometry.turned ? model_rope : Rope{};
  const int heads = statistics.geometry.num_kv_heads;
  LayerMoments m;
  m.count_q = statistics.count_q;
  m.count_kv = statistics.count_kv;
  m.query = divided(statistics.q_moment, m.count_q);
  m.key = divided(statistics.k_moment, m.count_kv);
  m.value = divided(statistics.v_moment, m.count_kv);
  m.value_target = options.objective_v == ValueObjective::kEnergy
                       ? divided(statistics.v_energy_moment, m.count_kv)
                       : divided(statistics.attn_out_moment, m.count_q);
  m.output_metric = statistics.o_proj_metric;
  m.key_mean = VectorStack<double>(heads, statistics.geometry.head_dim_k);
  m.value_mean = VectorStack<double>(heads, statistics.geometry.head_dim_v);
  VectorStack<double> key_mean = divided(statistics.k_sum, m.count_kv);
  VectorStack<double> value_mean = divided(statistics.v_sum, m.count_kv);
  const bool quantized = statistics.geometry.quantized;
  bool weighted = false;
  if (options.row_weights == RowWeights::kAttention && quantized) {
    const std::string problem = weights_problem(statistics, options);
    weighted = problem.empty();
    if (weighted) {
      check_attended(statistics);
      weigh_by_attention(statistics.attended, m, key_mean, value_mean);
    } else {
      m.warning = fmt::format("layer {}: all rows count alike, because {}",
                              statistics.geometry.layer_id, problem);
    }
  }
  std::vector<char> has_centers(static_cast<size_t>(heads), 0);
  if (options.key_centers && quantized) {
    const std::string problem = key_centers_problem(options);
    if (problem.empty() && weighted) {
      m.key_centers = MatrixStack<double>(heads, kCenters, statistics.geometry.head_dim_k);
      parallel_for(heads, [&](int64_t head) {
        has_centers[static_cast<size_t>(head)] =
            center_in_segments(statistics.attended, static_cast<int>(head), rope, options, m);
      });
    } else if (!problem.empty()) {
      m.warning = fmt::format("layer {}: keys have one mean, not two centers, because {}",
                              statistics.geometry.layer_id, problem);
    }
  }

  if (options.position_span > 0) {
    const MeanPhase phase = mean_phase_of_served(options.position_span);
    parallel_for(heads, [&](int64_t index) {
      const int head = static_cast<int>(index);
      m.query[head] = average_moment(m.query[head], rope, phase);
      if (has_centers[static_cast<size_t>(head)]) return;
      m.key[head] = average_moment(m.key[head], rope, phase);
      key_mean[head] = average_sum(key_mean[head], rope, phase);
    });
  }
  if (options.center) {
    // One k_mean serves all positions, so the covariance is about the averaged mean.
    for (int head = 0; head < heads; ++head) {
      if (has_centers[static_cast<size_t>(head)]) continue;
      m.key_mean[head] = key_mean[head];
      center(m.key, m.key_mean, head);
    }
    m.value_mean = value_mean;
    for (int head = 0; head < heads; ++head) center(m.value, m.value_mean, head);
  }
  return m;
}

MatrixStack<double> shared_over_heads(const MatrixStack<double>& stack) {
  MatrixD mean = MatrixD::Zero(stack.rows, stack.cols);
  for (int head = 0; head < stack.count; ++head) mean += stack[head];
  mean /= stack.count;
  MatrixStack<double> result(stack.count, stack.rows, stack.cols);
  for (int head = 0; head < stack.count; ++head) result[head] = mean;
  return result;
}

RegularisedMoment regularised(const MatrixD& moment, const VectorD& eigenvalues, int64_t rows,
                              const std::string& where) {
  const int d = static_cast<int>(moment.rows());
  RegularisedMoment result;
  result.moment = moment;
  result.rank = numerical_rank(eigenvalues);
  if (result.rank == d && rows >= d) return result;
  result.shrinkage = static_cast<double>(d) / static_cast<double>(d + rows);
  // Centering leaves noise of either sign where a channel does not vary.
  const VectorD diagonal = moment.diagonal().cwiseMax(0.0);
  result.moment *= 1 - result.shrinkage;
  result.moment.diagonal() += result.shrinkage * diagonal.transpose();
  result.description =
      fmt::format("{}: rank {} of {} from {} rows, shrunk towards its diagonal by {:.3g}", where,
                  result.rank, d, rows, result.shrinkage);
  return result;
}

// Closed forms of the position average (math 8.2), one pair of RoPE dimensions against another.
//
// The pair (i, i + rotary_dim / 2) of a row x is the complex number z_i = x_i + i x_{i + half};
// row x D(p) has z_i e^{i theta_i p}. So z_i conj(z_j) turns by theta_i - theta_j and z_i z_j by
// theta_i + theta_j, and the four real products of two pairs follow from these two.

namespace {

using Complex = std::complex<double>;
constexpr int kFewestOffsets = 64;

void require_fitting_rope(const Rope& rope, int d) {
  const int frequencies = static_cast<int>(rope.inv_freq.size());
  if (rope.rotary_dim < 0 || rope.rotary_dim > d || rope.rotary_dim != 2 * frequencies) {
    throw Error({.what = "the rotary embedding does not fit the head",
                 .expected = "rotary_dim of at most head_dim " + std::to_string(d) +
                             ", with rotary_dim / 2 frequencies",
                 .found = "rotary_dim " + std::to_string(rope.rotary_dim) + " with " +
                          std::to_string(frequencies) + " frequencies"});
  }
}

// Mean of exp(i omega n step) over n = 0 .. count - 1.
Complex geometric_mean_phase(double omega, int64_t count, double step) {
  const double half = 0.5 * omega * step;
  const double denominator = std::sin(half);
  if (denominator == 0.0) return {1.0, 0.0};
  const double n = static_cast<double>(count);
  const double magnitude = std::sin(n * half) / (n * denominator);
  return std::polar(1.0, (n - 1) * half) * magnitude;
}

}  // namespace

MeanPhase mean_phase_of_span(int64_t span) {
  assert(span >= 0);
  const int64_t count = span + 1 >= kFewestOffsets ? span + 1 : kFewestOffsets;
  const double step = static_cast<double>(span) / static_cast<double>(count - 1);
  return [count, step](double omega) { return geometric_mean_phase(omega, count, step); };
}

MeanPhase mean_phase_of_served(int64_t span) {
  const MeanPhase all = mean_phase_of_span(span);
  const MeanPhase early =
      mean_phase_of_span(static_cast<int64_t>(kEarlyPart * static_cast<double>(span)));
  return [all, early](double omega) {
    return kEarlyShare * early(omega) + (1 - kEarlyShare) * all(omega);
  };
}

MeanPhase mean_phase_of_segments(int64_t span) {
  assert(span >= 0);
  const int64_t count = span / kSegmentTokens + 1;
  const auto early_count =
      std::max<int64_t>(1, std::llround(kEarlyPart * static_cast<double>(count)));
  const auto mean = [](int64_t segments) {
    return [segments](double omega) {
      return geometric_mean_phase(omega, segments, kSegmentTokens) *
             std::polar(1.0, omega * segment_middle(0));
    };
  };
  return [all = mean(count), early = mean(early_count)](double omega) {
    return kEarlyShare * early(omega) + (1 - kEarlyShare) * all(omega);
  };
}

double segment_phase(double omega) {
  const Complex mean = geometric_mean_phase(omega, kSegmentTokens, 1.0);
  return (mean * std::polar(1.0, -omega * segment_middle(0))).real();
}

double segment_middle(int64_t segment) {
  return static_cast<double>(segment * kSegmentTokens) + 0.5 * (kSegmentTokens - 1);
}

MeanPhase phase_at(double position) {
  return [position](double omega) { return std::polar(1.0, omega * position); };
}

double served_position(double share, int64_t span) {
  constexpr double kUpToEarly = kEarlyShare + (1 - kEarlyShare) * kEarlyPart;
  const double part = share < kUpToEarly
                          ? share / kUpToEarly * kEarlyPart
                          : kEarlyPart + (share - kUpToEarly) / (1 - kUpToEarly) * (1 - kEarlyPart);
  return part * static_cast<double>(span);
}

MatrixD average_moment(const MatrixD& moment, const Rope& rope, const MeanPhase& mean_phase) {
  const int d = static_cast<int>(moment.rows());
  require_fitting_rope(rope, d);
  const int half = rope.rotary_dim / 2;
  MatrixD averaged = moment;
  for (int i = 0; i < half; ++i) {
    const int x = rope.first_of_pair(i), y = rope.second_of_pair(i);
    for (int j = 0; j <= i; ++j) {
      const int u = rope.first_of_pair(j), w = rope.second_of_pair(j);
      const double xu = moment(x, u), xw = moment(x, w), yu = moment(y, u), yw = moment(y, w);
      const double theta = rope.inv_freq[i], other = rope.inv_freq[j];
      const Complex against = Complex(xu + yw, yu - xw) * mean_phase(theta - other);
      const Complex along = Complex(xu - yw, xw + yu) * mean_phase(theta + other);
      averaged(x, u) = averaged(u, x) = 0.5 * (against + along).real();
      averaged(y, w) = averaged(w, y) = 0.5 * (against - along).real();
      averaged(y, u) = averaged(u, y) = 0.5 * (along + against).imag();
      averaged(x, w) = averaged(w, x) = 0.5 * (along - against).imag();
    }
    const Complex turn = mean_phase(rope.inv_freq[i]);
    for (int r = rope.rotary_dim; r < d; ++r) {
      const Complex z = Complex(moment(x, r), moment(y, r)) * turn;
      averaged(x, r) = averaged(r, x) = z.real();
      averaged(y, r) = averaged(r, y) = z.imag();
    }
  }
  return averaged;
}

VectorD average_sum(const VectorD& sum, const Rope& rope, const MeanPhase& mean_phase) {
  require_fitting_rope(rope, static_cast<int>(sum.size()));
  const int half = rope.rotary_dim / 2;
  VectorD averaged = sum;
  for (int i = 0; i < half; ++i) {
    const int x = rope.first_of_pair(i), y = rope.second_of_pair(i);
    const Complex z = Complex(sum[x], sum[y]) * mean_phase(rope.inv_freq[i]);
    averaged[x] = z.real();
    averaged[y] = z.imag();
  }
  return averaged;
}

}  // namespace oscar
