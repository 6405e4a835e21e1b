"""What vLLM is told of the blocks of a layer's cache. Each version takes their bytes in its own way."""
from dataclasses import dataclass, replace

from typing_extensions import override
from vllm.v1.kv_cache_interface import FullAttentionSpec

from .._library import ops
from ..recipe import CacheFormat


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
        return self.num_kv_heads * self.page_bytes

    @classmethod
    @override
    def merge(cls, specs):
        return replace(super().merge(specs), page_bytes=specs[0].page_bytes)
