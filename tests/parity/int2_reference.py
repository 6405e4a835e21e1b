"""INT2 attention written again from its definition, as an attention function of transformers.

Nothing is shared with the C++ code: full N x N scores, one boolean matrix that says which key is
INT2 for which query, and a codec that walks through a row's columns one by one.
"""
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface

from bundle.verify_bundle import datasets_of

NAME = "int2_reference"


def hadamard(d):
    matrix = np.array([[1.0]])
    while matrix.shape[0] < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return torch.tensor(matrix / np.sqrt(d), dtype=torch.float32)


@dataclass
class Side:
    """Keys or values of one layer, all heads: stacks over KV heads."""

    forward: torch.Tensor
    partner: torch.Tensor  # q_rotation for keys, o_rotation for values
    mean: torch.Tensor
    clip: list
    correction: list  # 0 none, 1 unbiased, 2 metric
    feedback: torch.Tensor | None = None
    metric: torch.Tensor | None = None
    centers: torch.Tensor | None = None  # of keys, [heads, 2, d] before RoPE


@dataclass
class Rule:
    """Windows and mode; `layers` holds (key side, value side) per layer, None = exact."""

    sink: int
    recent: int
    block: int = 1
    mode: str = "decode"
    prompt: int = 0
    group: int = 0  # 0 = head_dim
    layers: list = field(default_factory=list)
    seen: list = field(default_factory=list)
    offset: int = 0  # position of the first token
    inv_freq: torch.Tensor | None = None  # for keys with centers
    last_segment: int = 0


def is_int2(rule, tokens):
    """[query, key] booleans."""
    out = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i in range(tokens):
        held = i + 1
        if i < rule.prompt and rule.mode == "prefill":
            continue
        if i < rule.prompt and rule.mode.startswith("chunked:"):
            size = int(rule.mode.split(":")[1])
            held = i // size * size  # what the cache held when this chunk began
        old = held - rule.recent - rule.sink
        if old > 0:
            out[i, rule.sink:rule.sink + rule.block * (old // rule.block)] = True
    return out


def round_trip(x, clip, group, correction, feedback, metric):
    """Rows [n, d] float32 through the codec with fp16 metadata."""
    x = x.to(torch.bfloat16).to(torch.float32)
    d = x.shape[1]
    clipped = x
    if clip > 0:
        index = min(int(np.floor(np.float32(clip) * np.float32(d))), d - 1)
        threshold = x.abs().sort(dim=1).values[:, index:index + 1]
        clipped = torch.maximum(torch.minimum(x, threshold), -threshold)
    scale, zero = torch.empty_like(x), torch.empty_like(x)
    for begin in range(0, d, group):
        part = clipped[:, begin:begin + group]
        low, high = part.min(1, keepdim=True).values, part.max(1, keepdim=True).values
        s = torch.clamp((high - low) / 3, min=1e-8 / 3)
        s = torch.clamp(torch.maximum(s, low.abs() / 1024), min=2.0**-14)
        s = s.half().float()
        scale[:, begin:begin + group] = s
        zero[:, begin:begin + group] = (-low / s).half().float()
    error, code = torch.zeros_like(x), torch.empty_like(x)
    for i in range(d):
        target = x[:, i]
        if feedback is not None and i > 0:
            target = target - error[:, :i] @ feedback[:i, i]
        code[:, i] = torch.clamp(torch.floor(target / scale[:, i] + zero[:, i] + 0.5), 0, 3)
        error[:, i] = (code[:, i] - zero[:, i]) * scale[:, i] - x[:, i]
    if correction:
        y = (code - zero) * scale
        weighted = x @ metric if correction == 2 else x
        num, den = (weighted * x).sum(1), (weighted * y).sum(1)
        usable = (num > 0) & (den > 0) & (den > 1e-6 * num)
        factor = torch.where(usable, torch.clamp(num / den, 0.5, 2.0), torch.ones_like(num))
        scale = (scale * factor[:, None]).half().float()
    return (code - zero) * scale


def turned(x, angle):
    """Rows x [.., d] turned by `angle` [n / 2] a pair (i, i + n / 2) of the first n dimensions."""
    half = len(angle)
    x, y, still = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin(), still), -1)


def centers_of_rows(side, rows, rule):
    """For rows [H, N, d] in the cache's basis, the nearer center of the segment that their page lies in."""
    chosen, places = torch.zeros_like(rows), {}
    for token in range(rows.shape[1]):
        page = max(0, token - rule.sink) // 64
        segment = min((rule.offset + rule.sink + 64 * page + 32) // 1024, rule.last_segment)
        if segment not in places:
            angle = (1024 * segment + 511.5) * rule.inv_freq
            here = turned(side.centers.double(), angle) - side.mean[:, None].double()
            here = torch.einsum("hjd,hde->hje", here, side.forward.double()).to(torch.bfloat16).double()
            here[(side.centers == 0).all(-1).all(-1)] = 0
            places[segment] = here
        here = places[segment]
        row = rows[:, token].to(torch.bfloat16).double()
        distance = ((row[:, None] - here) ** 2).sum(-1)
        second = distance[:, 1] < distance[:, 0]
        chosen[:, token] = torch.where(second[:, None], here[:, 1], here[:, 0]).float()
    return chosen


def quantized(side, x, rule):
    """Exact rows in the side's basis, and what INT2 makes of them; x [B, H, N, d]."""
    exact = torch.einsum("bhnd,hde->bhne", x - side.mean[None, :, None], side.forward)
    rounded = torch.empty_like(exact)
    for b in range(x.shape[0]):
        about = torch.zeros_like(exact[b])
        if side.centers is not None:
            about = centers_of_rows(side, exact[b], rule)
        for h in range(x.shape[1]):
            rounded[b, h] = about[h] + round_trip(
                exact[b, h].to(torch.bfloat16).float() - about[h], side.clip[h], rule.group or x.shape[3],
                side.correction[h], None if side.feedback is None else side.feedback[h],
                None if side.metric is None else side.metric[h])
    return exact, rounded


def attention(module, query, key, value, attention_mask, scaling, s_aux=None, **unused):
    rule = module.config.int2_rule
    layer = rule.layers[module.layer_idx]
    groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
    window = getattr(module, "sliding_window", None)
    lags = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    visible = (lags >= 0) & (lags < (window or tokens))
    if layer is None:
        sides = (key, key), (value, value)
        q, old = query, torch.zeros(tokens, tokens, dtype=torch.bool)
    else:
        sides = [quantized(side, x, rule) for side, x in zip(layer, (key, value))]
        q = torch.einsum("bhnd,hde->bhne", query,
                         layer[0].partner.repeat_interleave(groups, 0))
        old = is_int2(rule, tokens)
    (k, k2), (v, v2) = [[t.repeat_interleave(groups, 1) for t in pair] for pair in sides]
    scores = torch.where(old, q @ k2.transpose(2, 3), q @ k.transpose(2, 3)) * scaling
    scores = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:  # of each head a score without a value
        sink = s_aux.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        if layer is not None:  # scores are of centered keys, all of them less by this
            mean = layer[0].mean.repeat_interleave(groups, 0)
            sink = sink - scaling * torch.einsum("bhnd,hd->bhn", query, mean)[..., None]
        scores = torch.cat((scores, sink), -1)
    p = scores.softmax(-1)[..., :tokens]
    out = (p * old) @ v2 + (p * ~old) @ v
    if layer is not None:
        back = layer[1].partner.repeat_interleave(groups, 0)
        out = torch.einsum("bhnd,hde->bhne", out, back)
        out = out + p.sum(-1, keepdim=True) * layer[1].mean.repeat_interleave(groups, 0)[None, :, None]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)


def plain_side(rotation, heads, clip):
    d = rotation.shape[0]
    stack = rotation.expand(heads, d, d).contiguous()
    return stack, torch.zeros(heads, d), [clip] * heads, [0] * heads


def data_free_layers(kind, config, clip_k, clip_v):
    """Layers of `identity` or `hadamard`."""
    rotation = torch.eye(config.head_dim) if kind == "identity" else hadamard(config.head_dim)
    heads = config.num_key_value_heads
    forward, mean, clip, correction = plain_side(rotation, heads, clip_k)
    key = Side(forward, forward, mean, clip, correction)
    forward, mean, clip, correction = plain_side(rotation, heads, clip_v)
    value = Side(forward, forward.transpose(1, 2), mean, clip, correction)
    return [(key, value)] * config.num_hidden_layers


def bundle_layers(file):
    """Layers of an open bundle (h5py.File)."""
    layers, datasets = [], datasets_of(file)
    for name in sorted(file["layers"], key=int):
        group = {path.rpartition("/")[2]: values for path, values in datasets.items()
                 if path.rpartition("/")[0] == f"/layers/{name}"}
        tensor = lambda n: torch.tensor(group[n]) if n in group else None
        sides = []
        for x, partner in (("k", "q_rotation"), ("v", "o_rotation")):
            forward = tensor(f"{x}_rotation")
            back = tensor(partner)
            if back is None:
                back = forward if x == "k" else forward.transpose(1, 2)
            sides.append(Side(forward, back, tensor(f"{x}_mean"),
                              group[f"{x}_clip_ratio"].tolist(),
                              group[f"{x}_scale_correction"].tolist(),
                              tensor(f"{x}_feedback"), tensor(f"{x}_metric"), tensor(f"{x}_centres")))
        layers.append(tuple(sides))
    return layers


@torch.no_grad()
def scores(model, rule, rows, first, offset=0):
    """Mean NLL, and log-probabilities of the counted predictions, of token rows [n, tokens]."""
    model.config.int2_rule = rule
    rule.offset = offset
    rule.inv_freq = model.model.rotary_emb.inv_freq.double()
    rule.last_segment = (model.config.max_position_embeddings + 1023) // 1024 - 1
    ids = torch.tensor(rows, dtype=torch.int64)
    positions = torch.arange(ids.shape[1])[None] + offset
    logits = model(ids, position_ids=positions, use_cache=False).logits[:, first - 1:-1].double()
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(-1, ids[:, first:, None])[..., 0]
    return nll.mean().item(), log_p


def divergence(reference, method):
    return (reference.exp() * (reference - method)).sum(-1).mean().item()
