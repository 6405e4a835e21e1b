// Statistics of synthetic heads.
#include "fit/synthetic.h"

#include <cmath>

namespace oscar::synthetic {

MatrixD normal_rows(int rows, int cols, std::mt19937_64& generator) {
  std::normal_distribution<double> normal;
  MatrixD m(rows, cols);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) m(i, j) = normal(generator);
  return m;
}

MatrixD outlier_rows(int rows, int d, double mean, std::mt19937_64& generator) {
  const MatrixD mixing =
      normal_rows(d, d, generator) / std::sqrt(static_cast<double>(d)) + MatrixD::Identity(d, d);
  const MatrixD normal = normal_rows(rows, d, generator);
  const VectorD scale = (0.6 * normal_rows(1, d, generator)).array().exp().matrix();
  const VectorD center = mean * normal_rows(1, d, generator);
  return (normal * mixing * scale.asDiagonal()).rowwise() + center;
}

Rows make_rows(int heads, int d, int tokens, int group_size, unsigned seed) {
  std::mt19937_64 generator(seed);
  Rows rows;
  for (int h = 0; h < heads; ++h) {
    rows.q.push_back(outlier_rows(tokens * group_size, d, 0.5, generator));
    rows.k.push_back(outlier_rows(tokens, d, 2.0, generator));
    rows.v.push_back(outlier_rows(tokens, d, 0.3, generator));
    rows.out.push_back(0.3 * outlier_rows(tokens * group_size, d, 0.3, generator));
  }
  return rows;
}

LayerStatistics collect(const Rows& rows, unsigned seed) {
  std::mt19937_64 generator(seed);
  const int heads = static_cast<int>(rows.k.size());
  const int d = static_cast<int>(rows.k[0].cols()), dv = static_cast<int>(rows.v[0].cols());
  LayerGeometry g;
  g.layer_id = 3;
  g.num_kv_heads = heads;
  g.num_qo_heads = heads * static_cast<int>(rows.q[0].rows() / rows.k[0].rows());
  g.head_dim_k = d;
  g.head_dim_v = dv;
  LayerStatistics s = make_statistics(g);
  s.count_q = rows.q[0].rows();
  s.count_kv = rows.k[0].rows();
  for (int h = 0; h < heads; ++h) {
    s.q_moment[h] = rows.q[h].transpose() * rows.q[h];
    s.k_moment[h] = rows.k[h].transpose() * rows.k[h];
    s.v_moment[h] = rows.v[h].transpose() * rows.v[h];
    s.attn_out_moment[h] = rows.out[h].transpose() * rows.out[h];
    s.q_sum[h] = rows.q[h].colwise().sum();
    s.k_sum[h] = rows.k[h].colwise().sum();
    s.v_sum[h] = rows.v[h].colwise().sum();
    s.attn_out_sum[h] = rows.out[h].colwise().sum();
    const MatrixD w = normal_rows(dv, 3 * dv, generator);
    s.o_proj_metric[h] = w * w.transpose();
  }
  return s;
}

LayerStatistics statistics(int heads, int d, int tokens, unsigned seed) {
  return collect(make_rows(heads, d, tokens, 2, seed), seed + 1);
}

Rope rope(int rotary_dim, double theta) {
  Rope r;
  r.theta = theta;
  r.rotary_dim = rotary_dim;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    r.inv_freq.push_back(std::pow(theta, -2.0 * i / rotary_dim));
  }
  return r;
}

double largest(const MatrixD& m) { return m.cwiseAbs().maxCoeff(); }

double from_identity(const MatrixD& m) {
  return largest(m - MatrixD::Identity(m.rows(), m.cols()));
}

}  // namespace oscar::synthetic
