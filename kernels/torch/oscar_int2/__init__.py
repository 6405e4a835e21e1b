"""The INT2 KV cache as torch operators: `import oscar_int2`, then torch.ops.oscar_int2.*.

Loads the library that lies beside this file, and registers what tracing (torch.compile, fake
tensors) needs. Shapes, units and an example are in kernels/README.md.

Key centres, of bundles that have them: quantize_append and decode_attention(_out) take the layer's
table key_centres, bf16 [segments, num_kv_heads, 2, head_dim], and first_position, int32 [batch], the
position of each request's first token (default: 0). Both calls need the same ones. dequantize gives
keys without their centres.
"""
import pathlib

import torch

LIBRARY = pathlib.Path(__file__).with_name("liboscar_int2_ops.so")
PAGE_TOKENS = 64

torch.ops.load_library(str(LIBRARY))
ops = torch.ops.oscar_int2


@torch.library.register_fake("oscar_int2::quantize_append")
def _(pool, *tensors, **options):
    return None


@torch.library.register_fake("oscar_int2::decode_attention")
def _(q, *tensors, **options):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("oscar_int2::decode_attention_out")
def _(q, *tensors, **options):
    return None


@torch.library.register_fake("oscar_int2::decode_attention_workspace_size")
def _(pool, head_dim):
    return torch.library.get_ctx().new_dynamic_size()  # depends on the device, not on shapes


@torch.library.register_fake("oscar_int2::dequantize")
def _(pool, *, head_dim, quant_group_size, metadata_dtype=None, quartered=False):
    shape = (pool.shape[0], pool.shape[1], 2, PAGE_TOKENS, head_dim)
    return pool.new_empty(shape, dtype=torch.float32)
