"""Attention of prompts, which come whole or in prefill chunks.

A whole prompt or a first chunk attends over its own rows as the model made them. A later chunk attends
in the cache's basis, over what the cache holds of its request, read back into a scratch, and over its
own rows behind that: one causal call, whatever the length.
"""
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backends import fa_utils

from ..attention import attend_behind


@dataclass
class Packed:
    """Sequences of rows one behind another."""

    starts: list                        # the first row of each, and the end
    indptr: torch.Tensor | None = None  # the same, int32 on the device of the rows

    @property
    def longest(self):
        return max(end - first for first, end in zip(self.starts, self.starts[1:]))


@dataclass(frozen=True)
class Chunk:
    """A later chunk of a prompt in one step."""

    request: int     # index among the prompts of the step
    rows: slice      # of the rows of these prompts
    slot: int        # its window
    old_len: int     # tokens that the cache holds of it
    history: int     # of them INT2
    queries: Packed  # its rows, and
    keys: Packed     #   all rows: those of the cache and its own


@dataclass(frozen=True)
class Begun:
    """Prompts that begin, one behind another in the rows of a step."""

    rows: slice     # of the rows of these prompts
    packed: Packed  # they


@dataclass(frozen=True)
class Prompts:
    """What a step has of prompts, in any order."""

    chunks: list[Chunk]
    begun: list[Begun]
    grown: int  # most rows of one of them that get their page

    def packed(self):
        """All Packed that need their indptr."""
        return [p for chunk in self.chunks for p in (chunk.queries, chunk.keys)] + [b.packed for b in self.begun]


def sort_prompts(format, slots, starts, lengths, shared):
    """The Prompts of a step, yet without what lies on the device. Lists by prompt: its window, where its rows
    begin (and the end of all), its tokens with those of this step, and INT2 tokens that it began with."""
    chunks, begun, grown = [], [], 0
    for i, (slot, length) in enumerate(zip(slots, lengths)):
        rows = slice(starts[i], starts[i + 1])
        new = rows.stop - rows.start
        old_len = length - new
        history = max(format.history_tokens(old_len), shared[i])
        written, now = (max(format.page_tokens(tokens), format.history_tokens(tokens), shared[i])
                        for tokens in (old_len, length))
        grown = max(grown, now - written)
        if old_len > 0:
            chunks.append(Chunk(request=i, rows=rows, slot=slot, old_len=old_len, history=history,
                                queries=Packed([0, new]), keys=Packed([0, length])))
        elif begun and begun[-1].rows.stop == rows.start:
            first, packed = begun[-1].rows.start, begun[-1].packed
            begun[-1] = Begun(slice(first, rows.stop), Packed([*packed.starts, rows.stop - first]))
        else:
            begun.append(Begun(rows, Packed([0, new])))
    return Prompts(chunks, begun, grown)


def causal_attention(q, k, v, out, queries, keys, scale, fa_version, lse=None):
    """Of each sequence, its last query sees all its keys: q and out [queries, Hq, d], k and v
    [keys, Hkv, d]. `fa_version`: that of vLLM's FlashAttention; None: there is none. `lse`: float32 [queries, Hq], takes
    the logsumexp of each query's logits."""
    if fa_version is not None:
        if len(keys.starts) > 2:  # it reads values of the next sequence, at probability 0: NaN would stay NaN
            v = torch.nan_to_num(v)
        if TYPE_CHECKING:  # fa_utils has others for other devices
            from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
        else:
            flash_attn_varlen_func = fa_utils.flash_attn_varlen_func
        found = flash_attn_varlen_func(
            q=q, k=k, v=v, out=out, cu_seqlens_q=queries.indptr, cu_seqlens_k=keys.indptr,
            max_seqlen_q=queries.longest, max_seqlen_k=keys.longest, softmax_scale=scale,
            causal=True, fa_version=fa_version, return_softmax_lse=lse is not None)
        if lse is not None:
            lse.copy_(found[1].T)
        return
    pairs = zip(queries.starts, queries.starts[1:], keys.starts, keys.starts[1:])
    for first, end, first_key, end_key in pairs:
        attend_behind(q[first:end], k[first_key:end_key], v[first_key:end_key], out[first:end], scale,
                      None if lse is None else lse[first:end])
