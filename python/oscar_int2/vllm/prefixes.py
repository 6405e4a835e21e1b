"""Prefix caching: which blocks other requests may read, and what is kept of their sinks.

vLLM offers a block to others as soon as its tokens are scheduled. Its page is written in that step, once its
last token is certain, so a block is offered one step later. Rows of the sink never get a page. They are kept
in host memory, under the hash of the block that ends them, for requests that begin with the same tokens.

A request that begins with shared blocks reads all their rows behind the sink as INT2. It computes at least its
last recent_tokens tokens itself: what it generates reads a whole exact window.

Other layers keep their blocks as vLLM has it: windows in BF16 (WindowManager), and states of linear attention at the
ends of blocks. A hit ends where blocks of all layers end.

The scheduler decides, perhaps in a process of its own: one Prefixes for all groups of layers, and a
PrefixManager for each group over INT2. It tells the worker with each step what to keep and what to take
(SinkMoves).
"""
from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from .._library import PAGE_TOKENS
from ..errors import UnsupportedError
from . import chunks, settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.request import Request

    from .specs import Int2Spec, WindowSpec


def seed_keys(config: VllmConfig):
    """Makes the bundle part of the keys of all blocks. vLLM's keys hold tokens, which say nothing of a page's
    bytes: two bundles write other ones. Called once vLLM has made its own seed, before the first request."""
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    seed = hash_function((kv_cache_utils.NONE_HASH, settings.bundle(config).serving_sha256))
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(seed)


@dataclass
class SinkMoves:
    """What happens to sinks before a step: first all that is kept, then all that is taken."""

    kept: list = field(default_factory=list)   # (request id, place)
    taken: list = field(default_factory=list)  # (request id, place, tokens in shared and loaded blocks)


class Prefixes:
    """What the requests of one scheduler share, and where their sinks are kept."""

    def __init__(self, coordinator: KVCacheCoordinator, managers: list[PrefixManager], places, drafts,
                 chunk=0):
        """`managers`: those of the coordinator over INT2. `places`: sinks that are kept at most
        (settings.kept_sinks). `drafts`: most of a step (settings.drafts). `chunk`: tokens of a canonical one
        (settings.chunk_tokens)."""
        self.format, self.drafts, self.chunk = managers[0].format, drafts, chunk
        self.hash_tokens = coordinator.block_pool.hash_block_size
        self.block_tokens = coordinator.scheduler_block_size  # of all groups: a hit ends where each has a block's end
        if chunk % self.block_tokens:
            raise UnsupportedError(f"the INT2 cache does not serve {settings.CHUNKS}={chunk} with this model, whose "
                                   f"blocks are {self.block_tokens} tokens, in vLLM; a multiple of these")
        self.places = OrderedDict()  # of kept sinks, by hash; first the one unused for longest
        self.free_places = list(range(places))
        self.moves = SinkMoves()
        self.hits = self.misses = 0  # since take_counts()
        self.missed = None           # the sink that the last lookup did not find, of blocks that are there
        self._find_blocks = coordinator.find_longest_cache_hit
        coordinator.find_longest_cache_hit = self.find_longest_cache_hit
        for manager in managers:
            manager.prefixes = self

    def take_moves(self, scheduled):
        """Those of the step that was just scheduled, with the requests of these ids. One that waits for its pages from
        host memory (offloading.py) takes its sink in a later step; its place is not given away meanwhile."""
        moves, self.moves = self.moves, SinkMoves()
        self.moves.taken = [move for move in moves.taken if move[0] not in scheduled]
        moves.taken = [move for move in moves.taken if move[0] in scheduled]
        return moves

    def leave(self, request_id):
        """A request is gone, perhaps before it took its sink."""
        self.moves.taken = [move for move in self.moves.taken if move[0] != request_id]

    def take_counts(self):
        """Requests that began with shared blocks, and those that did not for want of their sink."""
        counts, self.hits, self.misses = (self.hits, self.misses), 0, 0
        return counts

    def find_longest_cache_hit(self, block_hashes, max_cache_hit_length):
        """The coordinator's, for tokens before the exact window and behind a sink that is kept. The third number says
        how far behind them vLLM keeps a state of linear attention: so that these tokens can be shared at all."""
        self.missed = None
        most = max(max_cache_hit_length - self.format.recent_tokens, 0)
        blocks, tokens, uncached = self._find_blocks(block_hashes, most)
        while self.chunk and tokens % self.chunk:  # windows may be kept up to an earlier end
            blocks, tokens, uncached = self._find_blocks(block_hashes, tokens // self.chunk * self.chunk)
        if tokens:
            sink = self.sink(block_hashes) if tokens >= self.format.sink_tokens else None
            if sink not in self.places:
                self.missed = sink
                blocks, tokens, uncached = tuple([] for _ in blocks), 0, 0
        return blocks, tokens, uncached or most // self.block_tokens * self.block_tokens - tokens

    def begin(self, request: Request, tokens):
        """A request begins with so many tokens in shared blocks, perhaps none."""
        sink = self.sink(request.block_hashes)
        if tokens:
            move = request.request_id, self.places[sink], tokens
            if move not in self.moves.taken:  # several managers tell of it
                self.places.move_to_end(sink)
                self.moves.taken.append(move)
                self.hits += 1
        elif self.missed is not None and self.missed == sink:
            self.misses += 1
            self.missed = None

    def certain(self, request: Request, computed=None):
        """Tokens of a request that were certain in the last step, a draft not among them. `computed`: its tokens by
        the end of that step, where it is another than the last."""
        computed = min(request.num_computed_tokens if computed is None else computed, request.num_tokens)
        if self.drafts:  # the last token never was, and of those before it not the last step's drafts
            computed = max(min(computed, request.num_tokens - 1) - self.drafts, 0)
        return computed

    def keep(self, request: Request):
        """Keeps the sink of a request that offers its first blocks, in the place that was unused for longest."""
        if any(request.request_id == taker for taker, *_ in self.moves.taken):
            return  # its blocks came from host memory, and its sink is kept
        sink = self.sink(request.block_hashes)
        place = self.places.pop(sink, None)
        if place is None and self.free_places:
            place = self.free_places.pop()
        if place is None:
            taken = {place for _, place, _ in self.moves.taken}
            unused = next((key for key, place in self.places.items() if place not in taken), None)
            if unused is None:
                return
            place = self.places.pop(unused)
        self.places[sink] = place
        if (request.request_id, place) not in self.moves.kept:
            self.moves.kept.append((request.request_id, place))

    def sink(self, block_hashes):
        """The hash of all tokens of the sink; None: they are not all there."""
        last = -(-self.format.sink_tokens // self.hash_tokens) - 1
        return block_hashes[last] if last < len(block_hashes) else None


class PrefixManager(FullAttentionManager):
    """vLLM's manager of the blocks of full attention, for blocks that are INT2 pages (Int2Spec)."""

    prefixes: Prefixes  # where prefix caching is on; nothing here is called without it

    def __init__(self, kv_cache_spec: Int2Spec, **options):
        super().__init__(kv_cache_spec, **options)
        self.format = kv_cache_spec.format
        self.running = {}  # by id: a request, and what vLLM says of the sharing of its blocks
        self.begun = {}    # by id: tokens in shared blocks, of a request that is being scheduled or loaded

    @override
    def add_local_computed_blocks(self, request_id, new_computed_blocks, num_local_computed_tokens,
                                  num_external_computed_tokens):
        super().add_local_computed_blocks(request_id, new_computed_blocks, num_local_computed_tokens,
                                          num_external_computed_tokens)
        self.begun[request_id] = num_local_computed_tokens + num_external_computed_tokens

    @override
    def cache_blocks(self, request, num_tokens, retention_interval=None, **options):
        options["retention_interval"] = retention_interval
        if request.request_id not in self.running:
            self.prefixes.begin(request, self.begun.pop(request.request_id, 0))
        self.running[request.request_id] = request, options
        self._share(request, options, num_tokens)

    @override
    def pop_blocks_for_free(self, request_id):
        if request_id in self.running:
            self._share(*self.running.pop(request_id))
            self.prefixes.leave(request_id)
        elif self.begun.pop(request_id, None) is not None:  # it ends while its pages come
            self.prefixes.leave(request_id)
        return super().pop_blocks_for_free(request_id)

    def forget(self, request_id):
        """Offers nothing more of a request, of which a row was refused."""
        self.running.pop(request_id, None)

    def _share(self, request: Request, options, most=sys.maxsize):
        """Offers the blocks whose pages are written by the steps before this one. `most`: the tokens that vLLM
        offers. Behind an answer the last one is not among them: where the input goes on, vLLM drops it."""
        full = min(self.prefixes.certain(request), most) // PAGE_TOKENS * PAGE_TOKENS
        if self.prefixes.chunk:
            full = min(full, chunks.canonical_tokens(request.num_prompt_tokens, self.prefixes.chunk,
                                                     self.format.recent_tokens))
        if full < self.format.sink_tokens + PAGE_TOKENS:
            return
        before = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, full, **options)
        if not before and self.num_cached_block.get(request.request_id, 0):
            self.prefixes.keep(request)


class WindowManager(SlidingWindowManager):
    """vLLM's, by specs.WindowSpec.kept(): for the worker, whose tables of blocks still name those that were left."""

    def __init__(self, kv_cache_spec: WindowSpec, **options):
        super().__init__(kv_cache_spec, **options)
        self.sliding_window = kv_cache_spec.kept().sliding_window

    @classmethod
    @override
    def find_longest_cache_hit(cls, *args, kv_cache_spec: WindowSpec, **options):
        return super().find_longest_cache_hit(*args, kv_cache_spec=kv_cache_spec.kept(), **options)

    @classmethod
    @override
    def reachable_block_mask(cls, *args, kv_cache_spec: WindowSpec, **options):
        return super().reachable_block_mask(*args, kv_cache_spec=kv_cache_spec.kept(), **options)
