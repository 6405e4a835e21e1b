"""What vLLM is told of the blocks of a layer's cache. Each version takes their bytes in its own way.

vLLM gives all groups of layers blocks of equal bytes. Where some layers hold no 2-bit rows, a block is so
many INT2 pages that theirs fit into it (unified). INT2 pages lie one behind another and are never padded.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from typing_extensions import override
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from .._library import PAGE_TOKENS, ops
from ..errors import UnsupportedError
from ..recipe import CacheFormat
from . import settings
from .steps import to_device

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

# A block of a window has a multiple of so many tokens: kernels of every backend take it.
WINDOW_TOKENS = 32
# Rows that are kept before a window. Attention kernels read keys in tiles of up to so many tokens, and so rows
# before the window too, at a weight of 0. In a block that another request has by then, these may read as NaN.
TILE_TOKENS = 256


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
    """The same where a spec's class says how many bytes a page has (vLLM 0.26 to 0.28)."""

    page_bytes: int = 0

    @property
    @override
    def real_page_size_bytes(self):
        return self.num_kv_heads * self.page_bytes * (self.block_size // PAGE_TOKENS)

    @property
    def unpadded_page_size_bytes(self):
        """What 0.28 asks."""
        return self.real_page_size_bytes

    @classmethod
    @override
    def merge(cls, specs):
        return replace(super().merge(specs), page_bytes=specs[0].page_bytes)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Blocks of a layer with a window, which prefixes.WindowManager keeps for a tile longer. `sliding_window` stays
    the layer's own: backends attend by it."""

    def kept(self):
        """Of a window of all rows that are kept."""
        return SlidingWindowSpec(**{**vars(self), "sliding_window": self.sliding_window + TILE_TOKENS})

    @override
    def max_admission_blocks_per_request(self, max_in_flight_tokens, max_model_len):
        return self.kept().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)


def equal_blocks(original):
    """vLLM's get_kv_cache_groups, which takes unified() specs of a model over INT2."""

    def get_kv_cache_groups(vllm_config, kv_cache_spec):
        if settings.serves_int2(vllm_config):
            kv_cache_spec = unified(kv_cache_spec)
        return original(vllm_config, kv_cache_spec)

    return get_kv_cache_groups


def unified(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The specs of all layers of a model, by name, with blocks of equal bytes. Layers with a window and those of
    linear attention are padded. Raises UnsupportedError for other kinds beside them.

    Stages of pipeline parallelism have layers of their own, perhaps of one kind alone, and share one pool: what
    needs the most bytes may be elsewhere."""
    int2 = {name: spec for name, spec in specs.items() if isinstance(spec, Int2Spec)}
    others = {name: spec for name, spec in specs.items() if name not in int2}
    if not int2 or all(isinstance(spec, FullAttentionSpec) for spec in others.values()):
        return specs  # full attention besides, as a draft model's: one table of blocks, and pages of their own
    pages_of = {name: replace(spec, block_size=PAGE_TOKENS).page_size_bytes for name, spec in int2.items()}
    page = next(iter(pages_of.values()))  # vLLM 0.33 comes with larger blocks beside states
    unlike = [name for name, size in pages_of.items() if size != page]
    unlike += [name for name, spec in others.items() if not isinstance(spec, (SlidingWindowSpec, MambaSpec))]
    if unlike:
        raise UnsupportedError(f"the INT2 cache does not serve {unlike[0]} beside layers with windows or linear "
                               f"attention: its cache is a {type(specs[unlike[0]]).__name__} of other pages")
    pages = -(-max(map(_least_bytes, others.values())) // page)
    tokens = PAGE_TOKENS * pages
    return {name: replace(spec, block_size=tokens) if name in int2 else _padded(spec, page * pages, tokens)
            for name, spec in specs.items()}


def _least_bytes(spec):
    """Of a state, or of the smallest block of a window."""
    return replace(spec, page_size_padded=None,
                   **({} if isinstance(spec, MambaSpec) else {"block_size": WINDOW_TOKENS})).page_size_bytes


def _padded(spec, size, int2_tokens):
    """A spec whose blocks take `size` bytes, and hold as many rows of a window as fit. `int2_tokens`: of a block of
    INT2 pages. Where prefixes are cached (align), a state is kept at the end of such a block."""
    if isinstance(spec, MambaSpec):
        tokens = int2_tokens if spec.mamba_cache_mode == "align" else spec.block_size
        return replace(spec, block_size=tokens, page_size_padded=size)
    tokens = size // _least_bytes(spec) * WINDOW_TOKENS
    return WindowSpec(**{**vars(spec), "block_size": tokens, "page_size_padded": size})


def clean_windows(runner: FirstRunner | SecondRunner, output: SchedulerOutput):
    """Zeros new blocks of layers with a window, before a step. vLLM's backends read the rows behind a block's last
    one too, at a weight of 0. In vLLM's own pools these are numbers; here they may have been an INT2 page, whose
    bytes read as NaN."""
    config, cached = runner.kv_cache_config, output.scheduled_cached_reqs
    windows = {i: group for i, group in enumerate(config.kv_cache_groups)
               if isinstance(group.kv_cache_spec, SlidingWindowSpec)}
    if not windows:
        return
    # (blocks of each group, tokens that they hold already)
    given: list = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    given += [(blocks, tokens if request in cached.resumed_req_ids else 0) for request, blocks, tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens) if blocks]
    new = {block for blocks, tokens in given for i, group in windows.items()
           for block in blocks[i][-(-tokens // group.kv_cache_spec.block_size):]}
    layers = runner.vllm_config.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for group in windows.values() for name in group.layer_names]
    if not new or not caches:
        return
    size = next(iter(windows.values())).kv_cache_spec.page_size_bytes
    [blocks] = to_device([sorted(new)], caches[0].device)
    for cache in {cache.data_ptr(): cache for cache in caches}.values():  # layers share them
        blocks_of(cache, config.num_blocks, size).index_fill_(0, blocks.long(), 0)


def zero_blocks(runner: CPUModelRunner, block_ids):
    """Zeroes blocks in layers of full attention, as vLLM asks for where a model has states too. Its CPU engine takes
    each number for that of a page of 64 tokens, of which a block here has several."""
    config = runner.kv_cache_config
    layers = runner.vllm_config.compilation_config.static_forward_context
    for group in config.kv_cache_groups:
        for name in group.layer_names if isinstance(group.kv_cache_spec, FullAttentionSpec) else ():
            blocks_of(layers[name].kv_cache, config.num_blocks, group.kv_cache_spec.page_size_bytes)[block_ids] = 0


def blocks_of(cache, blocks, size):
    """The memory of a layer's cache, uint8 [blocks, size]. It begins where `cache` does."""
    begin = cache.storage_offset() * cache.element_size()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage(), begin, (blocks, size),
                                                                       (size, 1))
