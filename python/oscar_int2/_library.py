"""Loads the operators' library, and registers what tracing (torch.compile, fake tensors) needs."""
import pathlib

import torch

LIBRARY = pathlib.Path(__file__).with_name("liboscar_int2_ops.so")
PAGE_TOKENS = 64  # tokens of a page

torch.ops.load_library(str(LIBRARY))
ops = torch.ops.oscar_int2


@torch.library.register_fake("oscar_int2::quantize_append")
def _(recipe, *arguments, **options):
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


@torch.library.register_fake("oscar_int2::transform_qkv")
def _(q, k, v, recipe):
    return tuple(rows.new_empty(rows.shape) for rows in (q, k, v))


@torch.library.register_fake("oscar_int2::transform_qkv_out")
def _(q, *tensors):
    return None


@torch.library.register_fake("oscar_int2::transform_output")
def _(o, recipe):
    return o.new_empty(o.shape)


@torch.library.register_fake("oscar_int2::transform_output_out")
def _(o, *tensors):
    return None


@torch.library.register_fake("oscar_int2::dequantize_history")
def _(recipe, *arguments, **options):
    return None


@torch.library.register_fake("oscar_int2::step_numbers")
def _(windows, *tensors):
    return None
