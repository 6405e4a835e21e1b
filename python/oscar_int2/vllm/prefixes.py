"""Prefix caching: which blocks other requests may read, and what is kept of their sinks.

vLLM offers a block to others as soon as its tokens are computed. Here it holds their rows only once
these have left the exact window, so a block is offered then; and rows of the sink never get a page,
so they are kept beside, under the hash of the block that ends them. Requests with the same first
tokens share them.

A request that begins with shared blocks reads all their rows behind the sink as INT2. It computes at
least its last recent_tokens tokens itself: what it generates reads a whole exact window.

The scheduler decides (PrefixManager), perhaps in a process of its own, and tells the worker with each
step what to keep and what to take (SinkMoves).
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from .specs import Int2Spec


@dataclass
class SinkMoves:
    """What happens to sinks before a step: first all that is kept, then all that is taken."""

    kept: list = field(default_factory=list)   # (request id, place)
    taken: list = field(default_factory=list)  # (request id, place, tokens in shared blocks)


class PrefixManager(FullAttentionManager):
    """vLLM's manager of the blocks of full attention, for blocks that are INT2 pages (Int2Spec)."""

    def __init__(self, kv_cache_spec: Int2Spec, **options):
        super().__init__(kv_cache_spec, **options)
        self.format = kv_cache_spec.format
        self.sink_blocks = self.format.sink_tokens // self.block_size
        self.running = {}           # by id: a request, and what vLLM says of the sharing of its blocks
        self.places = OrderedDict()  # of kept sinks, by hash; first the one unused for longest
        self.free_places, self.drafts = [], 0
        self.moves = SinkMoves()

    def prepare(self, places, drafts):
        """Room for so many sinks (settings.prefixes), and most drafts of a step (settings.drafts)."""
        self.free_places, self.drafts = list(range(places)), drafts

    def take_moves(self):
        """Those of the step that was just scheduled."""
        moves, self.moves = self.moves, SinkMoves()
        return moves

    @override
    def find_longest_cache_hit(  # pyright: ignore[reportIncompatibleMethodOverride]: of an object
            self, block_hashes, max_length, **options):
        blocks, tokens = super().find_longest_cache_hit(
            block_hashes=block_hashes, max_length=max(max_length - self.format.recent_tokens, 0),
            **options)
        if len(blocks[0]) < self.sink_blocks or self._sink(blocks[0]) not in self.places:
            return tuple([] for _ in blocks), 0
        return blocks, tokens

    @override
    def add_local_computed_blocks(self, request_id, new_computed_blocks, num_local_computed_tokens,
                                  num_external_computed_tokens):
        super().add_local_computed_blocks(request_id, new_computed_blocks, num_local_computed_tokens,
                                          num_external_computed_tokens)
        if new_computed_blocks:
            sink = self._sink(new_computed_blocks)
            self.places.move_to_end(sink)
            self.moves.taken.append((request_id, self.places[sink], num_local_computed_tokens))

    @override
    def cache_blocks(self, request, num_tokens, retention_interval=None, **options):
        options["retention_interval"] = retention_interval
        self.running[request.request_id] = request, options
        self._share(request, options)

    @override
    def pop_blocks_for_free(self, request_id):
        if request_id in self.running:
            self._share(*self.running.pop(request_id))
        return super().pop_blocks_for_free(request_id)

    def forget(self, request_id):
        """Offers nothing more of a request, of which a row was refused."""
        self.running.pop(request_id, None)

    def _share(self, request: Request, options):
        """Offers the blocks whose pages are written by the steps before this one. Of the last step's tokens
        the first one was certain then, and only the certain ones make rows INT2."""
        computed = request.num_computed_tokens
        if self.drafts:  # among them those that nobody has accepted yet
            computed = max(min(computed, request.num_tokens - 1) - self.drafts, 0)
        history: int = self.format.history_tokens(computed)
        if history < self.block_size:
            return
        before = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, self.format.sink_tokens + history, **options)
        if before < self.sink_blocks:
            self._keep(request.request_id)

    def _keep(self, request_id):
        sink = self._sink(self.req_to_blocks[request_id])
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
        self.moves.kept.append((request_id, place))

    def _sink(self, blocks: Sequence[KVCacheBlock]):
        return blocks[self.sink_blocks - 1].block_hash
