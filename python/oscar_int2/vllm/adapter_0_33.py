"""vLLM where a backend says how large the blocks of its cache are (customize_spec), as 0.29 to 0.33.

A block [Hkv, 64 tokens, bytes of a token] in the layout LBHNC is a page as the kernels have it, byte for
byte. Hooks that are left alone:
- AttentionBackendEnum.register: a name made at run time is not in the processes that vLLM spawns, which
  read the engine's configuration before they load plugins; CUSTOM is in all.
- register_kv_cache_dtype: its mode CUSTOM is the number of OCTAVE_K3V4 (0.33), and 0.32 has none; the
  bundle says how the cache is written.
- CircularBufferSpec, for the exact windows: vLLM gives all groups of layers blocks of equal bytes, so
  that a page would grow to a window's size, 2304 tokens for a window of 324 rows.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override
from vllm.v1.attention.backend import AttentionBackend

from .._library import PAGE_TOKENS

if TYPE_CHECKING:
    from ..bundle import Bundle


def follow():
    """Nothing is replaced."""


class CacheShape(AttentionBackend):
    """What the backend says of a layer's cache."""

    bundle: Bundle

    @classmethod
    @override
    def customize_spec(cls, spec):
        from .specs import Int2Spec, page_bytes

        return Int2Spec(block_size=spec.block_size, num_kv_heads=spec.num_kv_heads,
                        head_size=spec.head_size, dtype=torch.uint8,
                        format=cls.bundle.quantizer.served(),
                        state_content_bytes=page_bytes(cls.bundle, spec.head_size) // PAGE_TOKENS)

    @classmethod
    @override
    def supported_kv_cache_layouts(cls):
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


def pool(kv_cache):
    """A layer's cache [blocks, Hkv, 64, bytes of a token] as pages, uint8 [blocks, Hkv, page_bytes]:
    the same memory."""
    return kv_cache.view(*kv_cache.shape[:2], -1)
