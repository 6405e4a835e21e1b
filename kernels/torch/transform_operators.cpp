// torch.ops.oscar_int2: rows of q, k and v into the basis of the cache, and o out of it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "arguments.h"
#include "dispatch.h"

namespace oscar::torch_ops {
namespace {

// Sizes that all tensors of a call share; the recipe's come from its first matrices.
TransformParams transform_sizes(const Argument& rows, const Recipe& recipe) {
  TransformParams p;
  p.rows = checked_int(rows.op, "rows", checked_size(rows, 3, 0), 0);
  p.head_dim = checked_int(rows.op, "head_dim", rows.tensor.size(2), 8, kMaxHeadDim);
  if (p.head_dim % 8 != 0) {
    refuse(rows.op, "unsupported size", "head_dim", "a multiple of 8", std::to_string(p.head_dim));
  }
  if (recipe.empty()) refuse(rows.op, "no matrices", "recipe", recipe_names(), "an empty list");
  const Argument forward{rows.op, "key.forward", recipe.front()};
  p.num_kv_heads = checked_int(rows.op, "num_kv_heads", checked_size(forward, 3, 0), 1);
  return p;
}

// Rows x [rows, num_heads, head_dim] with any strides between rows and heads, times a matrix of
// their KV head, into `out`, which is contiguous.
struct RowTensors {
  const char *x_name, *out_name;
  const Tensor &x, &out;
};

TransformRows transform_rows_of(const char* op, const RowTensors& t, const float* matrix,
                                const TransformParams& p, const Tensor& neighbour) {
  const Extent rows{"rows", p.rows}, dims{"head_dim", p.head_dim};
  TransformRows out;
  out.num_heads = checked_int(op, t.x_name, checked_size({op, t.x_name, t.x}, 3, 1), 1);
  if (out.num_heads % p.num_kv_heads != 0) {
    refuse(op, "heads do not share the KV heads evenly", t.x_name,
           "num_heads a multiple of num_kv_heads " + std::to_string(p.num_kv_heads),
           std::to_string(out.num_heads));
  }
  if (!matrix)
    refuse(op, "a matrix is missing", "recipe", "one for " + std::string(t.x_name), "none");
  const Extent heads{"num_heads", out.num_heads};
  out.x = head_rows({op, t.x_name, t.x}, rows, heads, dims, neighbour);
  out.matrix = matrix;
  out.out = static_cast<uint16_t*>(checked_data({op, t.out_name, t.out}, ScalarType::BFloat16,
                                                {rows, heads, dims}, neighbour, kRowAlignment));
  if (p.rows > 0 && out.out == out.x.data) {
    refuse(op, "rows cannot be replaced where they lie", t.out_name, "memory of its own",
           std::string("that of ") + t.x_name);
  }
  return out;
}

void run(const char* op, const TransformParams& params, const Tensor& neighbour) {
  if (params.rows == 0) return;
  if (neighbour.is_cuda()) {
    transform_on_device(op, params, neighbour);
  } else {
    transform_on_host(params);
  }
}

void transform_into(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Recipe& recipe, const Tensor& q_out, const Tensor& k_out,
                    const Tensor& v_out) {
  TransformParams p = transform_sizes({op, "q", q}, recipe);
  const LayerRecipe layer =
      layer_recipe(op, recipe, RecipeUse::kBasis, p.num_kv_heads, p.head_dim, q);
  p.num_tensors = 3;
  p.tensors[0] = transform_rows_of(op, {"q", "q_out", q, q_out}, layer.key.partner, p, q);
  p.tensors[1] = transform_rows_of(op, {"k", "k_out", k, k_out}, layer.key.forward, p, q);
  p.tensors[2] = transform_rows_of(op, {"v", "v_out", v, v_out}, layer.value.forward, p, q);
  for (const auto& [name, heads] : {std::pair{"k", k.size(1)}, std::pair{"v", v.size(1)}}) {
    if (heads == p.num_kv_heads) continue;
    refuse(op, "one row a KV head is expected", name,
           "num_kv_heads " + std::to_string(p.num_kv_heads), std::to_string(heads));
  }
  p.tensors[1].subtracted = layer.key.mean;
  p.tensors[2].subtracted = layer.value.mean;
  run(op, p, q);
}

void transform_qkv_out(const Tensor& q, const Tensor& k, const Tensor& v, const Recipe& recipe,
                       const Tensor& q_out, const Tensor& k_out, const Tensor& v_out) {
  transform_into("transform_qkv_out", q, k, v, recipe, q_out, k_out, v_out);
}

// bf16 of the shape of rows [rows, num_heads, head_dim].
Tensor new_rows(const Argument& like) {
  const std::array<int64_t, 3> shape = {checked_size(like, 3, 0), like.tensor.size(1),
                                        like.tensor.size(2)};
  return torch::stable::new_empty(like.tensor, {shape.data(), 3}, ScalarType::BFloat16);
}

std::tuple<Tensor, Tensor, Tensor> transform_qkv(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Recipe& recipe) {
  constexpr const char* kOp = "transform_qkv";
  const Tensor q_out = new_rows({kOp, "q", q}), k_out = new_rows({kOp, "k", k}),
               v_out = new_rows({kOp, "v", v});
  transform_into(kOp, q, k, v, recipe, q_out, k_out, v_out);
  return {q_out, k_out, v_out};
}

void transform_output_into(const char* op, const Tensor& o, const Recipe& recipe,
                           const Tensor& out) {
  TransformParams p = transform_sizes({op, "o", o}, recipe);
  const LayerRecipe layer =
      layer_recipe(op, recipe, RecipeUse::kBasis, p.num_kv_heads, p.head_dim, o);
  p.num_tensors = 1;
  p.tensors[0] = transform_rows_of(op, {"o", "out", o, out}, layer.value.partner, p, o);
  p.tensors[0].added = layer.value.mean;
  run(op, p, o);
}

void transform_output_out(const Tensor& o, const Recipe& recipe, const Tensor& out) {
  transform_output_into("transform_output_out", o, recipe, out);
}

Tensor transform_output(const Tensor& o, const Recipe& recipe) {
  constexpr const char* kOp = "transform_output";
  Tensor out = new_rows({kOp, "o", o});
  transform_output_into(kOp, o, recipe, out);
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
      "transform_qkv(Tensor q, Tensor k, Tensor v, Tensor[] recipe) "
      "-> (Tensor q_out, Tensor k_out, Tensor v_out)");
  m.def(
      "transform_qkv_out(Tensor q, Tensor k, Tensor v, Tensor[] recipe, Tensor(a!) q_out, "
      "Tensor(b!) k_out, Tensor(c!) v_out) -> ()");
  m.def("transform_output(Tensor o, Tensor[] recipe) -> Tensor");
  m.def("transform_output_out(Tensor o, Tensor[] recipe, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CPU, m) { register_transforms(m); }
STABLE_TORCH_LIBRARY_IMPL(oscar_int2, CUDA, m) { register_transforms(m); }

}  // namespace oscar::torch_ops
