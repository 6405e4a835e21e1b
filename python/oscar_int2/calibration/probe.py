"""What a layer computes, found by calling it once more with other arguments: RoPE, output gate, windows, sharing.

No family is known here. What none of the answers below explains is refused by name.
"""
import inspect
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from ..errors import UnsupportedError
from ..transformers_version import CACHE
from .interface import exact_attention, observing

CLOSE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest entry


@dataclass(frozen=True)
class Rope:
    """How keys of a layer turn: pair i by position * inv_freq[i]."""

    inv_freq: torch.Tensor     # float64 [n / 2], radians a position; empty: keys do not turn (NoPE)
    interleaved: bool = False  # pairs are (2i, 2i + 1), else (i, i + n / 2)

    def same(self, other):
        return (self.interleaved == other.interleaved and self.inv_freq.shape == other.inv_freq.shape
                and torch.allclose(self.inv_freq, other.inv_freq, rtol=1e-4, atol=0))

    def back(self, keys):
        """Keys [..., T, d] at positions 0, 1, ... as float32 rows at position 0."""
        half = len(self.inv_freq)
        keys = keys.float()
        if not half:
            return keys
        positions = torch.arange(keys.shape[-2], device=keys.device, dtype=torch.float64)
        angles = -torch.outer(positions, self.inv_freq.to(keys.device))
        cos, sin = angles.cos().float(), angles.sin().float()
        pairs = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        x, y = ((keys[..., pair] for pair in pairs) if self.interleaved
                else (keys[..., :half], keys[..., half:2 * half]))
        turned = (x * cos - y * sin, y * cos + x * sin)
        turned = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat((turned, keys[..., 2 * half:]), -1)


@dataclass(frozen=True)
class LayerFacts:
    """Of one layer whose attention went through the interface."""

    shape: tuple           # num_kv_heads, head_dim_k, head_dim_v
    num_qo_heads: int
    scaling: float         # sm_scale
    window: int            # keys that a query sees; 0: all before it
    chunked: bool          # they are those of a chunk of so many tokens, not the last ones
    rope: Rope | None      # None: rows are another layer's
    gated: bool            # outputs are multiplied by a gate before the output projection
    attention: torch.nn.Module
    output: torch.nn.Module  # the output projection
    shared: bool             # keys and values are another layer's


def probe(layer, index, arguments, keywords):
    """LayerFacts of a decoder layer called with these arguments, or None for one without softmax attention.
    Raises UnsupportedError, naming the layer."""
    recorder = _Recorder(layer)
    with recorder, observing(recorder):
        layer(*arguments, **keywords)
    cached = _cached_rows(layer, arguments, keywords)
    if not recorder.calls:
        if cached is not None:
            _refuse(layer, index, "has attention code of its own, which does not call transformers' attention interface")
        return None
    if len(recorder.calls) > 1:
        _refuse(layer, index, f"calls attention {len(recorder.calls)} times")
    call, out = recorder.calls[0]
    where = type(call.module).__name__
    if call.q.shape[1] % call.k.shape[1]:
        _refuse(call.module, index, f"{call.q.shape[1]} query heads are no multiple of {call.k.shape[1]} KV heads")
    for name, rows in (("queries", call.q), ("keys", call.k), ("values", call.v), ("attention outputs", out)):
        if not rows.isfinite().all():
            _refuse(call.module, index, f"its {name} are not finite: weights or activations overflow")
    shared = is_handed_on(keywords, call.k)
    if cached is not None and not shared and not _is_cached(cached, call):
        _refuse(call.module, index, "what its cache holds are not the keys and values of its heads (MLA or the like)")
    attention, given = recorder.arguments_of(call.module)
    if attention is None:
        _refuse(layer, index, f"{where} was not called as a module")
    output, into = recorder.output_of(attention, call, out)
    if output is None:
        _refuse(attention, index, "no output projection was found behind its attention")
    flat = out.transpose(1, 2).flatten(2)
    gated = not _close(into, flat)
    if gated and not _is_linear(attention, given, output, into):
        _refuse(attention, index, "what lies between attention and its output projection is no gate")
    window, chunked = seen_window(call, index)
    return LayerFacts(shape=(call.k.shape[1], call.k.shape[3], call.v.shape[3]), num_qo_heads=call.q.shape[1],
                      scaling=call.scaling, window=window, chunked=chunked,
                      rope=None if shared else _rope(attention, index, given, call), gated=gated, attention=attention,
                      output=output, shared=shared)


def _refuse(module, index, what):
    raise UnsupportedError(f"layer {index} ({type(module).__name__}): {what}; it is not calibrated")


def _close(a, b):
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE[a.dtype] * b.abs().max())


class _Recorder:
    """Observes a call of a layer: attention, what its modules were called with and what they gave back."""

    def __init__(self, layer):
        self.layer, self.calls, self.given, self.results, self.hooks = layer, [], {}, [], []

    def __enter__(self):
        for module in self.layer.modules():
            self.hooks += [module.register_forward_pre_hook(self._before, with_kwargs=True),
                           module.register_forward_hook(self._behind)]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def __call__(self, call):
        out = exact_attention(call)
        self.calls.append((call, out))
        return out

    def _before(self, module, args, kwargs):
        self.given[module] = args, dict(kwargs)

    def _behind(self, module, args, result):
        rows = result[0] if isinstance(result, tuple) and result else result
        if args and isinstance(args[0], torch.Tensor) and isinstance(rows, torch.Tensor):
            self.results.append((module, args[0], rows, len(self.calls)))
        elif isinstance(rows, torch.Tensor):
            self.results.append((module, None, rows, len(self.calls)))

    def arguments_of(self, module):
        return (module, self.given[module]) if module in self.given else (None, None)

    def output_of(self, attention, call, out):
        """The projection within the attention module that its result comes from, and what went into it."""
        width, inside = out.shape[1] * out.shape[3], set(attention.modules()) - {attention}
        result = next((rows for module, _, rows, _ in self.results if module is attention), None)
        behind = [(module, into) for module, into, rows, calls in self.results
                  if module in inside and calls and into is not None and into.shape[-1] == width
                  and getattr(module, "weight", None) is not None and module.weight.dim() == 2]
        same = [pair for pair in behind if result is not None
                and any(rows is result or rows.data_ptr() == result.data_ptr()
                        for module, _, rows, _ in self.results if module is pair[0])]
        module, into = (same or behind or [(None, None)])[-1]
        return module, None if into is None else into.reshape(out.shape[0], -1, width)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def is_handed_on(keywords, key):
    """Whether a layer was handed these keys, which then are another layer's."""
    return any(tensor.data_ptr() == key.data_ptr() and tensor.shape == key.shape for tensor in _tensors(keywords))


def _cached_rows(layer, arguments, keywords):
    """(keys, values) that the layer puts into a cache, or None where it puts none."""
    name = next((n for n in (CACHE, "past_key_values", "past_key_value") if n in keywords), None)
    if name is None:
        return None
    cache = DynamicCache()
    try:
        with observing(exact_attention):
            layer(*arguments, **_copied({**keywords, name: cache}))
    except (AttributeError, IndexError, TypeError, NotImplementedError):  # state of another kind: linear attention
        return None
    filled = [one for one in cache.layers if getattr(one, "keys", None) is not None and one.keys.numel()]
    return (filled[-1].keys, filled[-1].values) if filled else None


def _copied(keywords):
    """Dictionaries that layers hand rows on in are not written to by a call that only looks."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in keywords.items()}


def _is_cached(cached, call):
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(cached, (call.k, call.v)))


def seen_window(call, index):
    """Keys that a query sees, 0 for all before it, and whether they are a chunk's: read off the mask. The argument says
    the window where the text is no longer."""
    tokens = call.q.shape[2]
    if call.seen is None:
        return (call.window if call.window >= tokens else 0), False
    seen = call.seen[0, 0]
    width, row = int(seen.sum(-1).max()), torch.arange(tokens, device=seen.device)
    causal = row <= row[:, None]
    if torch.equal(seen, causal & (row > row[:, None] - width)):
        return width, False
    if torch.equal(seen, causal & (row // width == row[:, None] // width)):
        return width, True
    _refuse(call.module, index, "its queries see neither all keys before them nor a window of them")


def _is_linear(attention, given, output, into):
    """Whether twice the attention output goes into the output projection as twice as much."""
    seen = []
    hook = output.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        with observing(lambda call: 2 * exact_attention(call)):
            attention(*given[0], **_copied(given[1]))
    finally:
        hook.remove()
    return _close(seen[-1].reshape(into.shape), 2 * into)


# Angles: of RoPE, what attention modules of transformers get as position_embeddings.

def _rope(attention, index, given, call):
    args, kwargs = given
    try:
        bound = inspect.signature(attention.forward).bind(*args, **kwargs).arguments
    except TypeError:
        bound = dict(kwargs)
    angles = bound.get("position_embeddings", kwargs.get("position_embeddings"))
    if angles is None:
        if "position_embeddings" in inspect.signature(attention.forward).parameters or not _moves(attention, given, call):
            return Rope(torch.zeros(0, dtype=torch.float64))
        _refuse(attention, index, "its keys turn with positions in a way that is not known")
    zero = (tuple(torch.ones_like(a) if i == 0 else torch.zeros_like(a) for i, a in enumerate(angles))
            if isinstance(angles, tuple) else torch.ones_like(angles))

    def replaced(value):
        return zero if value is angles else value

    plain = _keys_of(attention, tuple(map(replaced, args)), {n: replaced(v) for n, v in kwargs.items()}).float()
    turned = call.k.float()
    limit = CLOSE[call.k.dtype] * turned.abs().max()
    if (plain - turned).abs().max() <= limit:
        return Rope(torch.zeros(0, dtype=torch.float64))
    for rope, rows in _candidates(plain, angles):
        if (rows - turned).abs().max() <= limit:
            return rope
    _refuse(attention, index, "its keys turn with positions in a way that is not known")


def _keys_of(attention, args, kwargs):
    """Keys of a call of the attention module."""
    keys = []

    def keep(call):
        keys.append(call.k)
        return exact_attention(call)

    with observing(keep):
        attention(*args, **_copied(kwargs))
    return keys[0]


def _moves(attention, given, call):
    """Whether keys of a module without position_embeddings are others at other positions."""
    args, kwargs = given
    positions = kwargs.get("position_ids")
    if positions is None:
        return hasattr(attention, "rotary_emb")
    return not torch.equal(_keys_of(attention, args, {**kwargs, "position_ids": positions + 1}), call.k)


def _candidates(plain, angles):
    """(Rope, turned rows) of each way in which keys [batch, heads, T, d] without angles may turn."""
    d = plain.shape[-1]
    if isinstance(angles, tuple):
        cos, sin = (part.float() for part in angles[:2])
    else:  # complex numbers
        cos, sin = angles.real.float(), angles.imag.float()
    cos, sin = (part.reshape(-1, *part.shape[-2:])[0] for part in (cos, sin))  # [T, n or n / 2]
    for c, s in ((cos, sin), (cos[:, :cos.shape[1] // 2], sin[:, :sin.shape[1] // 2]), (cos[:, ::2], sin[:, ::2])):
        n = 2 * c.shape[1]  # a number for each pair
        if not 0 < n <= d:
            continue
        for interleaved in (False, True):
            x, y = (plain[..., 0:n:2], plain[..., 1:n:2]) if interleaved else (plain[..., :n // 2], plain[..., n // 2:n])
            turned = (x * c - y * s, y * c + x * s)
            turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
            yield Rope(_frequencies(c.double(), s.double()), interleaved), torch.cat((turned, plain[..., n:]), -1)


def _frequencies(cos, sin):
    """Angles a position [pairs] of cos and sin [T, pairs], by positions 1, 2, 4, ...: the last one tells them best."""
    angles = torch.atan2(sin, cos)
    found, position = angles[1], 2
    while position < len(angles):
        ahead = (angles[position] - position * found + torch.pi) % (2 * torch.pi) - torch.pi
        found = found + ahead / position
        position *= 2
    return found.cpu()
