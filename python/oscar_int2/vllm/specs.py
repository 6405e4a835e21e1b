"""What vLLM is told of the blocks of a layer's cache. Each version takes their bytes in its own way.

vLLM gives all groups of layers blocks of equal bytes. Where some layers hold no 2-bit rows, a block is so
many INT2 pages that theirs fit into it (unified). INT2 pages lie one behind another and are never padded.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from .._library import PAGE_TOKENS, ops
from ..errors import UnsupportedError
from ..recipe import CacheFormat

# A block of a window has a multiple of so many tokens: kernels of every backend take it.
WINDOW_TOKENS = 32


def page_bytes(bundle, head_dim):
    """Bytes of one (page, KV head) in a bundle's format."""
    return ops.page_bytes(head_dim, bundle.quantizer.numbers())


@dataclass(frozen=True, kw_only=True)
class Int2Spec(FullAttentionSpec):
    """Blocks of full attention that are INT2 pages; prefixes.PrefixManager is their manager."""

    format: CacheFormat | None = None  # that is served

    @classmethod
    @override
    def merge(cls, specs):
        return replace(super().merge(specs), format=specs[0].format)


@dataclass(frozen=True, kw_only=True)
class SizedSpec(Int2Spec):
    """The same where a spec's class says how many bytes a page has (vLLM 0.26)."""

    page_bytes: int = 0

    @property
    @override
    def real_page_size_bytes(self):
        return self.num_kv_heads * self.page_bytes * (self.block_size // PAGE_TOKENS)

    @classmethod
    @override
    def merge(cls, specs):
        return replace(super().merge(specs), page_bytes=specs[0].page_bytes)


def unified(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The specs of all layers, by name, with blocks of equal bytes. Layers with a window and those of linear
    attention are padded. Raises UnsupportedError for other kinds beside them."""
    int2 = {name: spec for name, spec in specs.items() if isinstance(spec, Int2Spec)}
    others = {name: spec for name, spec in specs.items() if name not in int2}
    if not int2 or all(isinstance(spec, FullAttentionSpec) for spec in others.values()):
        return specs  # full attention besides, as a draft model's: one table of blocks, and pages of their own
    page = next(iter(int2.values())).page_size_bytes
    unlike = [name for name, spec in int2.items() if spec.page_size_bytes != page]
    unlike += [name for name, spec in others.items() if not isinstance(spec, (SlidingWindowSpec, MambaSpec))]
    if unlike:
        raise UnsupportedError(f"the INT2 cache does not serve {unlike[0]} beside layers with windows or linear "
                               f"attention: its cache is a {type(specs[unlike[0]]).__name__} of other pages")
    pages = -(-max(map(_least_bytes, others.values())) // page)
    return {name: replace(spec, block_size=PAGE_TOKENS * pages) if name in int2 else _padded(spec, page * pages)
            for name, spec in specs.items()}


def _least_bytes(spec):
    """Of a state, or of the smallest block of a window."""
    return replace(spec, page_size_padded=None,
                   **({} if isinstance(spec, MambaSpec) else {"block_size": WINDOW_TOKENS})).page_size_bytes


def _padded(spec, size):
    """A spec whose blocks take `size` bytes, and hold as many rows of a window as fit."""
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=size)
    tokens = size // _least_bytes(spec) * WINDOW_TOKENS
    return replace(spec, block_size=tokens, page_size_padded=size)
