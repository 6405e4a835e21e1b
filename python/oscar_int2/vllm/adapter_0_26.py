"""vLLM without layouts of a cache, as 0.26 to 0.28: it has no hook for a KV cache of a third party.

Attention.get_kv_cache_spec is replaced, whose original knows no packed cache but TurboQuant's, and the
backend names the shape of a layer's cache.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override
from vllm.v1.attention.backend import AttentionBackend

from .._library import PAGE_TOKENS
from . import hooks, settings

if TYPE_CHECKING:
    from ..bundle import Bundle


def follow():
    """What a worker needs: it says what blocks its layers have."""
    from vllm.model_executor.layers.attention.attention import Attention

    def make_spec(original):
        def get_kv_cache_spec(self: Attention, vllm_config):
            if settings.serves_int2(vllm_config):
                from .backend import OscarBackend
                from .specs import SizedSpec, page_bytes

                if issubclass(self.attn_backend, OscarBackend):
                    return SizedSpec(block_size=PAGE_TOKENS, num_kv_heads=self.num_kv_heads,
                                     head_size=self.head_size, dtype=torch.uint8,
                                     format=settings.cache_format(vllm_config),
                                     page_bytes=page_bytes(self.attn_backend.bundle, self.head_size))
            return original(self, vllm_config)

        return get_kv_cache_spec

    hooks.replace(Attention, Attention.get_kv_cache_spec, make_spec)


class CacheShape(AttentionBackend):
    """What the backend says of a layer's cache."""

    bundle: Bundle

    @classmethod
    @override
    def get_kv_cache_shape(  # pyright: ignore[reportIncompatibleMethodOverride]: of a class
            cls, num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        from .specs import page_bytes

        return num_blocks, num_kv_heads, page_bytes(cls.bundle, head_size)


def pool(kv_cache):
    """A layer's cache as pages, uint8 [blocks, Hkv, page_bytes]: the shape that CacheShape names."""
    return kv_cache
