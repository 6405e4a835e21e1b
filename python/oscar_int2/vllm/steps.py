"""The tables of one step, where they are read.

vLLM prepares a step while the last one may still run. Then only the device knows how many drafts were
accepted, and so how long each request is. What depends on that is worked out there (RequestTables). The
host says who is in the batch (Batch) and where prompts begin; its numbers go over together (to_device).
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.platform_utils import is_pin_memory_available

from .._library import PAGE_TOKENS, ops
from ..codec import StepTables

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from ..recipe import CacheFormat

MOST_QUERIES = 4  # rows of a request that one call of the attention kernel takes


@dataclass(frozen=True)
class Batch:
    """Who is in a step, in the order of its rows; int32 arrays."""

    slots: np.ndarray   # [requests] their windows
    drafts: np.ndarray  # [requests] of their rows, those behind that are drafts


NOBODY = Batch(np.zeros(0, np.int32), np.zeros(0, np.int32))  # of a dummy run


def takes_pinned(device):
    """Whether copies to and from this device want pinned host memory."""
    return device.type != "cpu" and is_pin_memory_available()


def to_device(arrays, device):
    """int32 arrays as int32 tensors, by one copy. Its pinned memory is nobody else's: torch gives it out
    again when the copy has ended."""
    host = torch.from_numpy(np.concatenate([np.asarray(a, np.int32).ravel() for a in arrays]))
    if len(host) and takes_pinned(device):
        host = host.pin_memory()
    return host.to(device, non_blocking=True).split([np.size(a) for a in arrays])


@dataclass(frozen=True)
class Decodes:
    """Requests with a few rows each, which attend behind their append: generated tokens and drafts."""

    tables: StepTables
    requests: int
    rows: int     # of the step, padding of a CUDA graph among them
    queries: int  # most rows of a request
    ends: list    # tables whose seq_lens end the queries of a call, MOST_QUERIES each; the last: `tables`
    pick: torch.Tensor | None   # [requests * queries] rows, each request's own at its end; None: they are
    place: torch.Tensor | None  # [rows] where they are in `pick`           all of one length


class RequestTables:
    """Numbers of each request in tensors that never move, since captured graphs read them."""

    ROWS = tuple(ops.step_names().split())

    def __init__(self, format: CacheFormat, slots, queries, device):
        """`slots`: requests at a time; `queries`: most rows of a request that is no prompt."""
        self.queries, self.device = queries, device
        self.windows = [format.sink_tokens, format.recent_tokens, format.demote_block]
        self.blocks = format.demote_block, PAGE_TOKENS  # by which INT2 tokens, and those in pages, grow
        calls = -(-queries // MOST_QUERIES)
        self.numbers = torch.zeros(len(self.ROWS) + calls - 1, slots, dtype=torch.int32, device=device)
        self.starts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.history = torch.zeros(slots, dtype=torch.int32, device=device)  # INT2 rows of each window's request,
        self.written = torch.zeros(slots, dtype=torch.int32, device=device)  # its rows that have a page,
        self.status = torch.zeros(slots, dtype=torch.int32, device=device)   # its refused rows

    def row(self, name, requests):
        return self.numbers[self.ROWS.index(name), requests]

    def clear(self, slots):
        """Of requests that have left."""
        for slot in slots:
            self.begin(slot, 0)
            self.status[slot] = 0

    def begin(self, slot, history, written=None):
        """A request begins with so many INT2 tokens, in pages of others. One that goes on may have more tokens
        that have a page (`written`)."""
        self.history[slot] = history
        self.written[slot] = history if written is None else written

    def fill(self, common: CommonAttentionMetadata, slots, drafts):
        """Works out a step's numbers. `slots`, `drafts`: those of its Batch, on the device.

        Rows without a slot in vLLM's cache (slot_mapping < 0) are written nowhere: those of dummy runs,
        and those that pad a graph. A page is written once it is full, while all its rows are exact. Both
        go by the tokens that are certain, never by drafts: then a rejected draft has reached no page.
        """
        n = common.num_reqs
        ops.step_numbers(self.windows, common.query_start_loc[:n + 1], common.seq_lens[:n], common.slot_mapping,
                         slots, drafts, self.starts, self.numbers, self.history, self.written)

    def step_tables(self, block_table, requests, query_start_loc, max_new_rows, max_new_history):
        """Of a slice of the requests. `block_table`: of all."""
        return StepTables(block_table=block_table[requests], query_start_loc=query_start_loc, status=self.status,
                          max_new_rows=max_new_rows, max_new_history=max_new_history,
                          **{name: self.row(name, requests) for name in self.ROWS})

    def decodes(self, block_table, requests, queries, rows, pick, place):
        """Of the first `requests`, which have at most so many rows each (`queries`)."""
        few = slice(requests)
        # What has become certain since the last step: its own rows, and drafts that it had accepted.
        certain = 2 * self.queries - 1
        grown = max(-(-certain // block) * block for block in self.blocks)
        tables = self.step_tables(block_table, few, self.starts[:requests + 1], queries, grown)
        ends = []
        for call, end in enumerate(range(MOST_QUERIES, queries, MOST_QUERIES)):
            seq_lens = self.numbers[len(self.ROWS) + call, few]
            torch.sub(tables.seq_lens, queries - end, out=seq_lens).clamp_(min=0)
            ends.append(replace(tables, seq_lens=seq_lens))
        return Decodes(tables=tables, requests=requests, rows=rows, queries=queries, ends=[*ends, tables],
                       pick=pick, place=place)


def fill_up(drafts, sampled, count):
    """`drafts` of each request, made `count` by its last token, over and over: a step in which all requests have the
    same number of rows runs in a CUDA graph, and drafts that are wrong cost a request nothing else.

    `sampled`: the step's tokens of each request. One without any is still in its prompt, and has no drafts."""
    return [found + [tokens[-1]] * (count - len(found)) if tokens else found for found, tokens in zip(drafts, sampled)]


def ragged(starts, queries):
    """(Decodes.pick, Decodes.place) of requests whose rows begin at starts[b] and end at starts[b + 1]."""
    places = np.arange(queries)[None] + starts[1:, None] - queries
    pick = np.clip(places, starts[:-1, None], max(starts[-1] - 1, 0))
    ends = np.repeat((np.arange(len(starts) - 1) + 1) * queries - starts[1:], np.diff(starts))
    return pick.ravel(), np.arange(starts[-1]) + ends
