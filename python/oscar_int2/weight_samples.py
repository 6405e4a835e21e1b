"""Entries of a model's attention weights: those of each layer's W_Q, W_K, W_V and W_O, of the biases of the first three
and of the norms of queries and keys, which a bundle holds as bf16 numbers (lib/oscar/bundle/weight_samples.h), beside those
in memory or in files. To compare them takes some milliseconds."""
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .weight_files import tensors_of

MATRICES = ("W_Q", "W_K", "W_V", "W_O")
VECTORS = ("b_Q", "b_K", "b_V", "q_norm", "k_norm")
SAMPLES = 16               # entries of a matrix or vector and KV head
# Distance of entries, as a share of their size, below which weights count as a fine-tune's: those of
# models that were trained apart are 1.4 apart.
FINE_TUNE = 0.5
FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_OF_ATTENTION = re.compile(r"(.*)layers\.(\d+)\.self_attn\.([qkvo]_proj\.(?:weight|bias)|[qk]_norm\.weight)$")


class Projections(NamedTuple):
    """Attention weights of one layer, as torch.nn.Linear has them, or one rank's part of them: whole KV
    heads from `first_head` on, with their query heads. None: not at hand. Of `vectors`, those of VECTORS,
    a bias that a layer does not have is zeros, and a norm that it does not have is None."""

    q: torch.Tensor | None  # [query heads d, hidden]
    k: torch.Tensor | None  # [KV heads d, hidden]
    v: torch.Tensor | None  # [KV heads d, hidden]
    o: torch.Tensor | None  # [hidden, query heads d]
    first_head: int = 0
    num_kv_heads: int | None = None  # None: all of the layer
    vectors: tuple = (None,) * len(VECTORS)


@dataclass(frozen=True)
class Difference:
    """Between samples of a bundle and weights in memory."""

    entries: int      # that were compared
    differ: int       # of them
    tensors: list     # (layer id, name) of the tensors with entries that differ
    compared: int     # tensors
    relative: float   # root mean square of the differences over that of the bundle's entries, in these
                      # tensors: in matrices, if any of them differs

    @property
    def is_fine_tune(self):
        return self.relative < FINE_TUNE

    def __str__(self):
        layer, name = self.tensors[0]
        what = ("a fine-tune of the calibrated model" if self.is_fine_tune else
                "another model of the same shape, or weights that were never loaded")
        return (f"{name} of layer {layer} differs, and {len(self.tensors) - 1} more of {self.compared} "
                f"tensors: {self.differ / self.entries:.1%} of {self.entries} sampled entries, by "
                f"{self.relative:.2g} of their size. These weights are {what}")


def projections(attention, layer, first_head=0, num_kv_heads=None):
    """Projections of an attention module that has q_proj, k_proj, v_proj and o_proj, or qkv_proj with
    their rows one after another. `layer`: the bundle's."""
    heads = layer.num_kv_heads if num_kv_heads is None else num_kv_heads
    rows = [n * layer.head_dim for n in (heads * (layer.num_qo_heads // layer.num_kv_heads), heads, heads)]
    linear = getattr(attention, "qkv_proj", None)
    fused = weight_of(linear)
    if fused is None:
        linears = [getattr(attention, f"{name}_proj", None) for name in "qkv"]
        parts = [weight_of(linear) for linear in linears]
        biases = [_bias_of(linear, n) for linear, n in zip(linears, rows)]
    elif is_plain(fused, (sum(rows), *fused.shape[-1:])):
        parts = fused.split(rows)
        bias = _bias_of(linear, sum(rows))
        biases = [None] * 3 if bias is None else bias.split(rows)
    else:
        parts, biases = [None] * 3, [None] * 3
    norms = [getattr(getattr(attention, name, None), "weight", None) for name in VECTORS[3:]]
    norms = [norm if norm is not None and norm.dim() == 1 else None for norm in norms]
    return Projections(*parts, weight_of(getattr(attention, "o_proj", None)), first_head, num_kv_heads,
                       (*biases, *norms))


def _bias_of(linear, rows):
    """[rows] that a linear layer adds, zeros where it adds none; None: not at hand."""
    if linear is None:
        return None
    while not hasattr(linear, "bias") and hasattr(linear, "base_layer"):
        linear = linear.base_layer
    bias = getattr(linear, "bias", None)
    if bias is None:
        weight = getattr(linear, "weight", None)
        return None if weight is None else torch.zeros(rows, device=weight.device)
    return bias if is_plain(bias, (rows,)) else None


def weight_of(linear):
    """The weight of a linear layer, with what peft's adapters add to it in every product."""
    weight = getattr(linear, "weight", None)
    if weight is None or not hasattr(linear, "get_delta_weight") or linear.merged or linear.disable_adapters:
        return weight
    for name in linear.active_adapters:
        if any(name in getattr(linear, kept, ()) for kept in ("lora_A", "lora_embedding_A")):
            weight = weight.data + linear.get_delta_weight(name).to(weight.dtype)
    return weight


def of_files(bundle, folder):
    """{layer id: Projections} of a bundle's layers as they lie in a folder's safetensors files; {} by other names."""
    tensors = _attention_tensors(folder)
    if not bundle.layers.keys() <= tensors.keys():
        return {}
    found = {}
    for layer_id in bundle.layers:
        held = tensors[layer_id]
        matrices = [held.get(f"{name}_proj.weight") for name in "qkvo"]
        biases = [held.get(f"{name}_proj.bias", None if matrix is None else torch.zeros(len(matrix)))
                  for name, matrix in zip("qkv", matrices)]
        found[layer_id] = Projections(*matrices, vectors=(*biases, held.get("q_norm.weight"), held.get("k_norm.weight")))
    return found


def _attention_tensors(folder):
    """{layer: {"q_proj.weight": tensor, ...}} of the attention layers in a folder's safetensors files, by the names that
    transformers gives them. They are mapped, so that entries alone are read; only plain numbers are among them.

    Raises what tensors_of() does. Of several stacks of layers (a tower for images, layers for drafts) it is the highest."""
    stacks = {}
    for name, (path, base, entry) in tensors_of(folder).items():
        found = _OF_ATTENTION.match(name)
        if found and entry["dtype"] in FILE_DTYPES and not any(tower in name for tower in ("vision", "visual", "audio")):
            stack, layer, tensor = found.groups()
            stacks.setdefault(stack, {}).setdefault(int(layer), {})[tensor] = _mapped(path, base, entry)
    return max(stacks.values(), key=len, default={})


def _mapped(path, base, entry):
    dtype, shape = FILE_DTYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    numbers = np.memmap(path, np.float32 if dtype.itemsize == 4 else np.int16, "c", base + begin, (end - begin) // dtype.itemsize)
    return torch.from_numpy(numbers).view(dtype).reshape(shape)


def sample_positions(rows, columns, device="cpu"):
    """Rows and columns [16] of the entries of a KV head's part [rows, columns], by sample_position of
    lib/oscar/bundle/weight_samples.h."""
    i, j = torch.arange(SAMPLES, device=device) // 4, torch.arange(SAMPLES, device=device) % 4
    return (2 * i + 1) * rows // 8, (2 * (4 * j + i) + 1) * columns // 32


def sample(matrix, kv_heads, by_columns):
    """[kv_heads, 16] entries of a matrix whose rows, or columns, belong to so many KV heads."""
    rows, columns = matrix.shape
    part = (columns if by_columns else rows) // kv_heads
    row, column = sample_positions(rows if by_columns else part, part if by_columns else columns,
                                   matrix.device)
    heads = part * torch.arange(kv_heads, device=matrix.device)[:, None]
    return matrix[row.expand(kv_heads, -1), column + heads] if by_columns else (
        matrix[row + heads, column.expand(kv_heads, -1)])


def sample_vector(vector, kv_heads, head_dim):
    """[kv_heads, 16] entries of a vector whose parts belong to so many KV heads, or that all share if it has
    head_dim entries (sample_position of lib/oscar/bundle/weight_samples.h)."""
    parts = vector.expand(kv_heads, -1) if len(vector) == head_dim else vector.view(kv_heads, -1)
    return parts[:, (2 * torch.arange(SAMPLES, device=vector.device) + 1) * parts.shape[1] // (2 * SAMPLES)]


def is_plain(matrix, shape):
    """Whether a tensor lies in memory as the numbers of a matrix of this shape."""
    return (isinstance(matrix, torch.Tensor) and type(matrix.data) is torch.Tensor and not matrix.is_meta
            and matrix.dtype in FILE_DTYPES.values() and tuple(matrix.shape) == tuple(shape))


def compare(bundle, layers):
    """The Difference between a bundle's samples and {layer id: Projections}; None: nothing could be
    compared. Entries are the same if they are once rounded to bf16."""
    taken = []
    for layer_id, weights in layers.items():
        layer = bundle.layers[layer_id]
        if layer.weight_samples is None:
            continue
        heads = layer.num_kv_heads if weights.num_kv_heads is None else weights.num_kv_heads
        kept = layer.weight_samples[weights.first_head:weights.first_head + heads]
        group, hidden = layer.num_qo_heads // layer.num_kv_heads, bundle.model.hidden_size
        before = len(taken)
        for index, matrix in enumerate(weights[:4]):
            rows = heads * layer.head_dim * (1 if MATRICES[index] in ("W_K", "W_V") else group)
            by_columns = MATRICES[index] == "W_O"
            if is_plain(matrix, (hidden, rows) if by_columns else (rows, hidden)):
                taken.append(((layer_id, MATRICES[index]), kept[:, index],
                              sample(matrix.data, heads, by_columns)))
        if layer.vector_samples is None or len(taken) == before:  # vectors alone say too little
            continue
        kept = layer.vector_samples[weights.first_head:weights.first_head + heads]
        for index, vector in enumerate(weights.vectors):
            rows = heads * layer.head_dim * (group if VECTORS[index] in ("b_Q", "q_norm") else 1)
            if is_plain(vector, (rows,)) or VECTORS[index].endswith("norm") and is_plain(vector, (layer.head_dim,)):
                taken.append(((layer_id, VECTORS[index]), kept[:, index],
                              sample_vector(vector.data, heads, layer.head_dim)))
    if not taken:
        return None
    names, kept, found = zip(*taken)
    kept = torch.stack(kept)  # [tensors, heads, 16]
    half = torch.tensor([entries.dtype == torch.float16 for entries in found])[:, None, None]
    found = torch.stack([entries.float().cpu() for entries in found])  # of layers on several devices
    away = ~rounds_to(found, kept, half)
    tensors = [name for name, any_away in zip(names, away.flatten(1).any(1).tolist()) if any_away]
    there = away.flatten(1).any(1)
    matrices = there & torch.tensor([name in MATRICES for _, name in names])
    there = matrices if matrices.any() else there
    distance = (found - kept)[there].double().square().sum().sqrt()
    size = kept[there].double().square().sum().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return Difference(away.numel(), int(away.sum()), tensors, len(names), float(distance / size))


def rounds_to(found, kept, half):
    """Whether entries are the kept bf16 numbers once rounded. One that is fp16 in memory stands for all
    numbers that fp16 rounds to it: a checkpoint in float32 was rounded to either."""
    exponent = torch.where(found == 0, -24, torch.frexp(found).exponent)
    ulp = torch.where(half, torch.ldexp(torch.ones_like(found), (exponent - 11).clamp_min(-24)), 0.0)
    ends = [(found + sign * ulp / 2).bfloat16().float() for sign in (-1, 1)]
    return (ends[0] <= kept) & (kept <= ends[1])
