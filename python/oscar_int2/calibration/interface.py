"""The attention function that transformers calls for us, and exact attention as every family defines it.

AttentionInterface hands on queries, keys and values of each layer behind norms and RoPE, whatever the family.
AttentionMaskInterface has to have the same name: without it masks are None, and windows are lost silently.
"""
import contextlib
import contextvars
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import UnsupportedError

NAME = "oscar_observed"  # transformers looks for "sdpa", "flash", "flex", "/" and "|" in names
QUERY_BLOCK = 256        # queries whose scores are in memory at a time
# Arguments of attention that choose keys or add to scores, where they are set.
REFUSED = ("position_bias", "indices", "block_indices", "cu_seq_lens_q", "cu_seqlens_q", "head_mask")
_LARGE = -1e4            # of additive masks: what is below hides a key


@dataclass(frozen=True)
class Call:
    """What one layer's attention was called with, behind norms and RoPE. Rows of a batch are sequences
    without padding, at positions 0, 1, ..."""

    module: torch.nn.Module
    q: torch.Tensor               # [batch, Hq, T, dk], not scaled
    k: torch.Tensor               # [batch, Hkv, T, dk]
    v: torch.Tensor               # [batch, Hkv, T, dv]
    seen: torch.Tensor | None     # bool [1, 1, T, T]: keys that a query sees; None: all before it
    scaling: float                # sm_scale
    sinks: torch.Tensor | None    # [Hq]: of each head a score without a value; None: there is none
    softcap: float | None         # scores are softcap * tanh(score / softcap)
    window: int                   # keys that a query sees by the arguments; 0: they do not say

    def visible(self, queries):
        """bool [n, T]: the keys of queries at these positions [n]."""
        if self.seen is not None:
            return self.seen[0, 0, queries]
        return torch.arange(self.k.shape[2], device=self.k.device) <= queries[:, None]


_observer = contextvars.ContextVar("oscar_int2_observer")


@contextlib.contextmanager
def observing(observer):
    """Within it, `observer(call)` gets the Call of every attention of a decoder. It returns the attention
    output [batch, Hq, T, dv], or None for exact attention."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None,
              sliding_window=None, is_causal=None, **kwargs):
    """The function that is registered. Raises UnsupportedError for what would be computed wrongly."""
    observer = _observer.get(None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if observer is None or not causal:  # towers of images and sound
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling,
                                      dropout=dropout, is_causal=is_causal, **kwargs)
    set_ones = [name for name in REFUSED if kwargs.get(name) is not None]
    if set_ones:
        raise UnsupportedError(f"{type(module).__name__} calls attention with {', '.join(set_ones)}: sparse, packed or "
                               "biased attention is not calibrated")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"{type(module).__name__} has {query.shape[2]} queries for {key.shape[2]} keys; rows "
                               "besides those of the sequence are not calibrated")
    call = Call(module, query, key, value, _seen(module, attention_mask),
                query.shape[-1]**-0.5 if scaling is None else float(scaling), s_aux, softcap, sliding_window or 0)
    out = observer(call)
    if out is None:
        out = exact_attention(call)
    return out.transpose(1, 2).contiguous(), None


def _seen(module, mask):
    """A mask of transformers as bool [1, 1, T, T], or None for plain causal attention."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        if not ((mask == 0) | (mask <= _LARGE)).all():
            raise UnsupportedError(f"{type(module).__name__} adds numbers to scores (ALiBi or the like), which is not "
                                   "calibrated")
        mask = mask == 0
    if not (mask == mask[:1, :1]).all():
        raise UnsupportedError(f"{type(module).__name__} masks sequences or heads of a batch differently")
    mask = mask[:1, :1]
    rows = torch.arange(mask.shape[2], device=mask.device)
    return None if torch.equal(mask[0, 0], rows[None] <= rows[:, None]) else mask


def exact_attention(call):
    """[batch, Hq, T, dv] of the rows as they are."""
    if call.sinks is None and call.softcap is None:
        group = call.q.shape[1] // call.k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
        return F.scaled_dot_product_attention(call.q, k, v, call.seen, is_causal=call.seen is None,
                                              scale=call.scaling)
    return block_attention(call, call.k, call.v, call.visible)


def block_attention(call, k, v, visible):
    """[batch, Hq, T, dv] by blocks of queries, in float32 or the wider dtype of the rows. k, v [batch, Hkv, S, d];
    visible(queries) is bool [n, S] of positions [n]."""
    out = torch.empty(*call.q.shape[:3], v.shape[-1], dtype=call.q.dtype, device=call.q.device)
    for first in range(0, call.q.shape[2], QUERY_BLOCK):
        end = min(first + QUERY_BLOCK, call.q.shape[2])
        queries = torch.arange(first, end, device=call.q.device)
        p = weights(call, call.q[:, :, first:end], k, visible(queries))
        rows = torch.einsum("bhgts,bhsd->bhgtd", p, v.to(p.dtype))
        out[:, :, first:end] = rows.flatten(1, 2).to(out.dtype)
    return out


def weights(call, q, k, visible):
    """Attention weights [batch, Hkv, group, n, S] of queries q [batch, Hq, n, d] over k [batch, Hkv, S, d]; bool
    visible [n, S]. With sinks they sum to less than 1."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads = q.shape[0], k.shape[1]
    q = q.to(dtype).reshape(batch, heads, -1, q.shape[2], q.shape[3])
    scores = torch.einsum("bhgtd,bhsd->bhgts", q, k.to(dtype)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores.masked_fill_(~visible, -torch.inf)
    if call.sinks is None:
        return scores.softmax(-1)
    sink = call.sinks.to(scores).view(1, heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
