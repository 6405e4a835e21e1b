"""Canonical chunks: a prompt gives the same rows, whether or not others have computed a part of it.

By default a whole prompt reads its own rows exactly, and one that begins with shared blocks reads them in 2 bits. With
canonical chunks of C tokens every prompt is computed in chunks that begin at multiples of C, and a chunk reads all rows
before it in 2 bits, behind the sink's exact ones: as a prompt does that shares just these. Hits end at multiples of C,
and nothing that was generated is shared.

The last chunk has more than recent_tokens: what is generated reads a whole exact window.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from . import versions

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from ..recipe import CacheFormat

def longest(chunk, recent_tokens):
    """Tokens of the longest chunk, which is a prompt's last one."""
    return chunk + recent_tokens


def chunk_end(start, tokens, chunk, recent_tokens):
    """Where the chunk that begins at `start` ends, in a prompt of so many tokens."""
    following = (start // chunk + 1) * chunk
    return following if following + recent_tokens < tokens else tokens


def canonical_tokens(tokens, chunk, recent_tokens):
    """Of a prompt of so many tokens, those before its last chunk: a longer prompt computes them in the same chunks."""
    return max(tokens - 1 - recent_tokens, 0) // chunk * chunk


def split_prompts(scheduler: Scheduler, format: CacheFormat, chunk):
    """Makes a scheduler take prompts by whole chunks. One for which a step has no room waits for the next."""
    versions.require(versions.CHUNKS)

    def split(request: Request, num_new_tokens, num_new_local_computed_tokens=0, num_external_computed_tokens=0):
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if start >= request.num_prompt_tokens or request.num_tokens - start == 1:  # which vLLM may fill up with drafts
            return num_new_tokens
        wanted = chunk_end(start, request.num_prompt_tokens, chunk, format.recent_tokens) - start
        return wanted if wanted <= num_new_tokens else 0

    scheduler.need_mamba_block_aligned_split = True
    scheduler._mamba_block_aligned_split = split
