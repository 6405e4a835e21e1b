"""KV offloading: vLLM's OffloadingConnector copies INT2 pages to host memory, and back for requests that begin alike.

vLLM's connector decides what is stored and found, and its worker copies whole pages. Three things are ours:

- A page is stored once the step that wrote it has ended without a refused row (confirmed()). vLLM stores a block with
  the step that computes it, whose rows nobody has judged yet.
- A hit ends before the exact window, and its sink has to be kept (_lookup()), as with blocks of the pool (prefixes.py).
- A request takes its sink in the step that it is first scheduled in. Until its pages have come, the sink's place is
  nobody else's (SinkMoves.taken; Prefixes.take_moves()).

All of that is in the scheduler's process. Workers copy bytes of whole pages, and know nothing of it.
"""
from __future__ import annotations

import logging
import sys
from itertools import chain
from typing import TYPE_CHECKING

from .._library import PAGE_TOKENS
from . import chunks, versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from .prefixes import Prefixes

logger = logging.getLogger("vllm.oscar_int2")  # below vllm's: its level and format

CONNECTOR, SPEC = "OffloadingConnector", "CPUOffloadingSpec"
BYTES = "cpu_bytes_to_use"  # of its options: host memory of all ranks of an engine
OPTIONS = (BYTES, "spec_name", "eviction_policy", "store_threshold", "max_tracker_size", "offload_prompt_only")
# Of host memory for pages, the share for sinks beside it. A sink of 64 tokens takes as much as 7 pages of 64 tokens, so
# it is enough where beginnings have 57 pages (3,600 tokens) each, or more.
SINK_SHARE = 8


def host_bytes(config: VllmConfig):
    """Host memory for pages of the engine of this VllmConfig, over all its ranks; 0: nothing is offloaded."""
    transfer = config.kv_transfer_config
    return int(transfer.kv_connector_extra_config.get(BYTES) or 0) if transfer else 0


def refused(config: VllmConfig, mixed):
    """(what, whether it is found, what to do instead) of each setting with which pages are not offloaded. `mixed`:
    some layers hold no 2-bit rows."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return ()
    chosen, parallel = transfer.kv_connector_extra_config, config.parallel_config
    method = getattr(config.speculative_config, "method", None)
    others = [name for name in chosen if name not in OPTIONS]
    ours = transfer.kv_connector == CONNECTOR and transfer.kv_connector_module_path is None
    return (
        (f"KV transfer by {transfer.kv_connector}", not ours, "--kv-offloading-size N takes the OffloadingConnector"),
        (f"KV transfer in the role {transfer.kv_role}", transfer.kv_role != "kv_both", "kv_both"),
        (f"KV offloading by {chosen.get('spec_name')}", chosen.get("spec_name", SPEC) != SPEC, SPEC),
        (f"KV offloading with {', '.join(others)}", others, f"of these options: {', '.join(OPTIONS)}"),
        ("KV offloading in this version of vLLM", not versions.offloads(), f"{', '.join(versions.OFFLOADS)} offloads"),
        ("KV offloading for a model with windows or linear attention", mixed, "leave it out"),
        ("KV offloading without prefix caching", not config.cache_config.enable_prefix_caching,
         "--enable-prefix-caching"),
        (f"KV offloading with drafts by {method}", method not in (None, "ngram"),
         "ngram: vLLM offloads blocks of one kind, and a drafter has its own"),
        ("KV offloading with pipeline parallelism", parallel.pipeline_parallel_size > 1, "--tensor-parallel-size"))


def _asked(request: Request):
    """The most tokens that a client wants stored, as vLLM reads it."""
    most = (request.kv_transfer_params or {}).get("max_offload_tokens")
    return most if type(most) is int and most >= 0 else sys.maxsize


class Offloading:
    """What the connector of one scheduler may store, and what requests may take from it."""

    def __init__(self, scheduler: Scheduler, prefixes: Prefixes, connector: OffloadingConnector):
        versions.require(versions.OFFLOADING)
        inner = connector.connector_scheduler
        assert inner is not None, "a scheduler's connector has a scheduler"
        self.scheduler, self.prefixes = scheduler, prefixes
        self.states = inner._req_status  # by id: RequestOffloadState, also of requests that have just ended
        self.begun = {}       # by id: tokens that a request began with, in blocks of others
        self.refused = set()  # ids of requests that store nothing more
        self._find = inner._lookup
        self._allocated, self._build = connector.update_state_after_alloc, connector.build_connector_meta
        inner._lookup = self._lookup
        connector.update_state_after_alloc = self.update_state_after_alloc
        connector.build_connector_meta = self.build_connector_meta
        self._say_size()

    def _say_size(self):
        cache, config = self.scheduler.kv_cache_config, self.scheduler.vllm_config
        pool = sum(tensor.size for tensor in cache.kv_cache_tensors) * config.parallel_config.world_size
        room = host_bytes(config)
        logger.info("OSCAR INT2: host memory of %.1f GiB holds pages of %d tokens", room / (1 << 30),
                    room // (pool // cache.num_blocks) * PAGE_TOKENS)

    def _lookup(self, req_status: RequestOffloadState) -> int | None:
        """The connector's: tokens to load behind those of the pool; None: ask again. No more than a request may begin
        with, and none without the sink."""
        prefixes, request, local = self.prefixes, req_status.req, req_status.num_locally_computed_tokens
        unit = prefixes.chunk or PAGE_TOKENS  # a hit ends where a canonical chunk does, where prompts come in these
        most = max(request.num_tokens - 1 - prefixes.format.recent_tokens, 0) // unit * unit
        if most <= local or most < prefixes.format.sink_tokens:
            return 0
        found = self._find(req_status)
        sink = prefixes.sink(request.block_hashes)
        if found != 0 and sink not in prefixes.places:
            prefixes.missed = sink
            return 0
        if not found:
            return found
        tokens = min(local + found, most) // unit * unit
        return max(tokens - local, 0) if tokens >= prefixes.format.sink_tokens else 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens):
        """The connector's. A request that waits for its pages holds its sink's place from here on."""
        self._allocated(request, blocks, num_external_tokens)
        if num_external_tokens:
            local = self.states[request.request_id].num_locally_computed_tokens
            self.prefixes.begin(request, local + num_external_tokens)

    def confirmed(self, request: Request):
        """Tokens of a request that may be stored; none before its first step has ended. By then the step that wrote what
        it began with has been judged too."""
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        if request.request_id in self.refused or processed <= self.begun.get(request.request_id, sys.maxsize):
            return 0
        tokens, chunk = self.prefixes.certain(request, processed), self.prefixes.chunk
        if chunk:
            return min(tokens, chunks.canonical_tokens(request.num_prompt_tokens, chunk, self.prefixes.format.recent_tokens))
        return tokens

    def refuse(self, request_ids):
        """Rows of these requests were refused. They store nothing more, nor do those that share a block with them."""
        manager = self.scheduler.kv_cache_manager

        def blocks(name):
            return {block for ids in manager.get_block_ids(name) for block in ids}

        bad = set().union(*map(blocks, request_ids))
        self.refused |= {*request_ids, *(name for name in self.scheduler.requests if bad & blocks(name))}

    def build_connector_meta(self, scheduler_output: SchedulerOutput):
        """The connector's, of a step that was just scheduled: what it stores ends at what is confirmed."""
        for name in scheduler_output.preempted_req_ids or ():
            self.begun.pop(name, None)
        begin = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        for name in (*begin, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
            self.begun[name] = self.states[name].req.num_computed_tokens
        for name in chain(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids):
            state = self.states.get(name)
            if state is not None:
                state.max_offload_tokens = min(self.confirmed(state.req), _asked(state.req))
        built = self._build(scheduler_output)
        for name in scheduler_output.finished_req_ids:
            self.begun.pop(name, None)
            self.refused.discard(name)
        return built
