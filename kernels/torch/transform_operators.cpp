// torch.ops.oscar_int2: rows of q, k and v into the basis of the cache, and o out of it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <limits>

#include "arguments.h"
#include "backends.h"

namespace oscar::torch_ops {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

// One tensor of a call, with the names that errors use.
struct TransformTensors {
  const char *x_name, *matrix_name, *out_name;
  const Tensor& x;       // bf16 [rows, num_heads, head_dim], any strides between rows and heads
  const Tensor& matrix;  // float32 [num_kv_heads, head_dim, head_dim]
  const Tensor& out;     // bf16 [rows, num_heads, head_dim]
};

// Sizes that all tensors of a call share.
TransformParams transform_sizes(const Argument& rows, const Argument& matrix) {
  TransformParams p;
  p.rows = checked_int(rows.op, "rows", checked_size(rows, 3, 0), 0, kMaxInt);
  p.head_dim = checked_int(rows.op, "head_dim", rows.tensor.size(2), 8, kMaxHeadDim);
  if (p.head_dim % 8 != 0) {
    refuse(rows.op, "unsupported size", "head_dim", "a multiple of 8", std::to_string(p.head_dim));
  }
  p.num_kv_heads = checked_int(rows.op, "num_kv_heads", checked_size(matrix, 3, 0), 1, kMaxInt);
  return p;
}

const float* head_means(const char* op, const char* name, const OptionalTensor& means,
                        const TransformParams& p, const Tensor& neighbour) {
  if (!means) return nullptr;
  return static_cast<const float*>(checked_data(
      {op, name, *means}, ScalarType::Float,
      {{"num_kv_heads", p.num_kv_heads}, {"head_dim", p.head_dim}}, neighbour, kRowAlignment));
}

void add_rows(const char* op, const TransformTensors& t, TransformParams& p,
              const Tensor& neighbour) {
  const Extent rows{"rows", p.rows}, dims{"head_dim", p.head_dim};
  TransformRows out;
  out.num_heads = checked_int(op, t.x_name, checked_size({op, t.x_name, t.x}, 3, 1), 1, kMaxInt);
  if (out.num_heads % p.num_kv_heads != 0) {
    refuse(op, "heads do not share the KV heads evenly", t.x_name,
           "num_heads a multiple of num_kv_heads " + std::to_string(p.num_kv_heads),
           std::to_string(out.num_heads));
  }
  const Extent heads{"num_heads", out.num_heads};
  out.x = head_rows({op, t.x_name, t.x}, rows, heads, dims, neighbour);
  out.matrix = static_cast<const float*>(
      checked_data({op, t.matrix_name, t.matrix}, ScalarType::Float,
                   {{"num_kv_heads", p.num_kv_heads}, dims, dims}, neighbour, kRowAlignment));
  out.out = static_cast<uint16_t*>(checked_data({op, t.out_name, t.out}, ScalarType::BFloat16,
                                                {rows, heads, dims}, neighbour, kRowAlignment));
  if (p.rows > 0 && out.out == out.x.data) {
    refuse(op, "rows cannot be replaced where they lie", t.out_name, "memory of its own",
           std::string("that of ") + t.x_name);
  }
  p.tensors[p.num_tensors++] = out;
}

void run(const char* op, const TransformParams& params, const Tensor& neighbour) {
  if (params.rows == 0) return;
  if (neighbour.is_cuda()) {
    transform_on_device(op, params, neighbour);
  } else {
    transform_on_host(params);
  }
}

// Where the tensors of a call to transform_qkv come from.
struct QkvTensors {
  const Tensor &q, &k, &v, &q_rotation, &k_rotation, &v_rotation;
  const OptionalTensor &k_mean, &v_mean;
};

void transform_into(const char* op, const QkvTensors& t, const Tensor& q_out, const Tensor& k_out,
                    const Tensor& v_out) {
  TransformParams p = transform_sizes({op, "q", t.q}, {op, "k_rotation", t.k_rotation});
  add_rows(op, {"q", "q_rotation", "q_out", t.q, t.q_rotation, q_out}, p, t.q);
  add_rows(op, {"k", "k_rotation", "k_out", t.k, t.k_rotation, k_out}, p, t.q);
  add_rows(op, {"v", "v_rotation", "v_out", t.v, t.v_rotation, v_out}, p, t.q);
  for (const auto& [name, heads] : {std::pair{"k", t.k.size(1)}, std::pair{"v", t.v.size(1)}}) {
    if (heads == p.num_kv_heads) continue;
    refuse(op, "one row a KV head is expected", name,
           "num_kv_heads " + std::to_string(p.num_kv_heads), std::to_string(heads));
  }
  p.tensors[1].subtracted = head_means(op, "k_mean", t.k_mean, p, t.q);
  p.tensors[2].subtracted = head_means(op, "v_mean", t.v_mean, p, t.q);
  run(op, p, t.q);
}

void transform_qkv_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_rotation,
                       const Tensor& k_rotation, const Tensor& v_rotation,
                       const OptionalTensor& k_mean, const OptionalTensor& v_mean,
                       const Tensor& q_out, const Tensor& k_out, const Tensor& v_out) {
  transform_into("transform_qkv_out", {q, k, v, q_rotation, k_rotation, v_rotation, k_mean, v_mean},
                 q_out, k_out, v_out);
}

// bf16 of the shape of rows [rows, num_heads, head_dim].
Tensor new_rows(const Argument& like) {
  const std::array<int64_t, 3> shape = {checked_size(like, 3, 0), like.tensor.size(1),
                                        like.tensor.size(2)};
  return torch::stable::new_empty(like.tensor, {shape.data(), 3}, ScalarType::BFloat16);
}

std::tuple<Tensor, Tensor, Tensor> transform_qkv(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& q_rotation, const Tensor& k_rotation,
                                                 const Tensor& v_rotation,
                                                 const OptionalTensor& k_mean,
                                                 const OptionalTensor& v_mean) {
  constexpr const char* kOp = "transform_qkv";
  const Tensor q_out = new_rows({kOp, "q", q}), k_out = new_rows({kOp, "k", k}),
               v_out = new_rows({kOp, "v", v});
  transform_into(kOp, {q, k, v, q_rotation, k_rotation, v_rotation, k_mean, v_mean}, q_out, k_out,
                 v_out);
  return {q_out, k_out, v_out};
}

void transform_output_into(const char* op, const Tensor& o, const Tensor& o_rotation,
                           const OptionalTensor& v_mean, const Tensor& out) {
  TransformParams p = transform_sizes({op, "o", o}, {op, "o_rotation", o_rotation});
  add_rows(op, {"o", "o_rotation", "out", o, o_rotation, out}, p, o);
  p.tensors[0].added = head_means(op, "v_mean", v_mean, p, o);
  run(op, p, o);
}

void transform_output_out(const Tensor& o, const Tensor& o_rotation, const OptionalTensor& v_mean,
                          const Tensor& out) {
  transform_output_into("transform_output_out", o, o_rotation, v_mean, out);
}

Tensor transform_output(const Tensor& o, const Tensor& o_rotation, const OptionalTensor& v_mean) {
  constexpr const char* kOp = "transform_output";
  Tensor out = new_rows({kOp, "o", o});
  transform_output_into(kOp, o, o_rotation, v_mean, out);
  return out;
}

void register_transforms(torch::stable::detail::StableLibrary& m) {
  m.impl("transform_qkv", TORCH_BOX(&transform_qkv));
  m.impl("transform_qkv_out", TORCH_BOX(&transform_qkv_out));
  m.impl("transform_output", TORCH_BOX(&transform_output));
  m.impl("transform_output_out", TORCH_BOX(&transform_output_out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oscar_int2, m) {
  m.def(
      "transform_qkv(Tensor q, Tensor k, Tensor v, Tensor q_rotation, Tensor k_rotation, "
      "Tensor v_rotation, Tensor? k_mean, Tensor? v_mean) "
      "-> (Tensor q_out, Tensor k_out, Tensor v_out)");
  m.def(
      "transform_qkv_out(Tensor q, Tensor k, Tensor v, Tensor q_rotation, Tensor k_rotation, "
      "Tensor v_rotation, Tensor? k_mean, Tensor? v_mean, Tensor(a!) q_out, Tensor(b!) k_out, "
      "Tensor(c!) v_out) -> ()");
  m.def("transform_output(Tensor o, Tensor o_rotation, Tensor? v_mean) -> Tensor");
  m.def("transform_output_out(Tensor o, Tensor o_rotation, Tensor? v_mean, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CPU, m) { register_transforms(m); }
STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CUDA, m) { register_transforms(m); }

}  // namespace oscar::torch_ops
