"""What /metrics says of the INT2 cache: which bundle is served, and what the cache holds.

The scheduler's process counts. Its numbers travel with the stats of a step to the API server's, among those of a KV
connector, which vLLM publishes under its own names (add(), split()).
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from . import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats

    from .prefixes import Prefixes

LABELS = ("model_name", "engine")
REFUSED = "oscar_refused_requests"  # of a Scheduler: since its last count()
WRITTEN = "oscar_written_tokens"    # of a Scheduler: since its last count()
COUNTS = "oscar_int2"              # among a connector's stats: those of count()
HELD = "oscar_held_tokens"          # of a Request: (its preemptions, tokens in 2 bits)
COUNTERS = {  # by their names in count()
    "written": ("tokens_written", "Tokens that were stored in 2 bits."),
    "refused": ("refused_requests", "Requests that ended by a row that 2 bits cannot hold."),
    "sink_hits": ("sink_hits", "Requests that began with shared blocks, of the pool or of host memory."),
    "sink_misses": ("sink_misses", "Requests whose beginning was computed anew, since its sink was not kept any more."),
}


def count_refused(scheduler: Scheduler, requests):
    """So many more have ended by a refused row."""
    setattr(scheduler, REFUSED, getattr(scheduler, REFUSED, 0) + requests)


def count_written(scheduler: Scheduler, output: SchedulerOutput, format):
    """Counts the tokens that a step, which was just scheduled, stores in 2 bits. Those in shared pages are there already; a
    request that was preempted stores its own again."""
    written = getattr(scheduler, WRITTEN, 0)
    for name, scheduled in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        preemptions, known = getattr(request, HELD, (None, 0))
        if preemptions != request.num_preemptions:  # it begins
            known = max(request.num_computed_tokens - scheduled - format.sink_tokens, 0)
        held = max(format.history_tokens(request.num_computed_tokens - drafts), known)
        setattr(request, HELD, (request.num_preemptions, held))
        written += held - known
    setattr(scheduler, WRITTEN, written)


def _take(scheduler: Scheduler, name):
    value = getattr(scheduler, name, 0)
    setattr(scheduler, name, 0)
    return value


def count(scheduler: Scheduler, format, prefixes: Prefixes | None):
    """What the running requests of a scheduler hold, in tokens. Since this was called last: tokens that were stored in 2
    bits, requests that were refused, and what `prefixes` counted, if they are cached."""
    tokens = [request.num_computed_tokens for request in scheduler.running]
    int2 = sum(map(format.history_tokens, tokens))
    hits, misses = prefixes.take_counts() if prefixes else (0, 0)
    return {"int2": int2, "exact": sum(tokens) - int2, "written": _take(scheduler, WRITTEN), "refused": _take(scheduler, REFUSED),
            "sink_hits": hits, "sink_misses": misses}


def add(stats: SchedulerStats, counts):
    """Puts what was counted among the stats of a step."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), COUNTS: counts}


def split(stats: SchedulerStats):
    """Takes it out again; None: it is not there. A connector's own stats stay."""
    theirs = dict(stats.kv_connector_stats or {})
    counts = theirs.pop(COUNTS, None)
    if counts is not None:
        stats.kv_connector_stats = theirs or None
    return counts


@functools.cache
def _metrics():
    """Made once a process, whichever engines come and go."""
    return (Gauge("oscar_int2_info", "The bundle of the 2-bit KV cache, by the hashes of its content.",
                  (*LABELS, *settings.FACTS), multiprocess_mode="mostrecent"),
            Gauge("oscar_int2_tokens", "Tokens of running requests in the KV cache, by how they are held.",
                  (*LABELS, "rows"), multiprocess_mode="mostrecent"),
            {name: Counter(f"oscar_int2_{metric}", text, LABELS) for name, (metric, text) in COUNTERS.items()})


_SHOWN = []  # labels of oscar_int2_info: those of the engine that came last


class Published:
    """The metrics of the engines of one configuration."""

    def __init__(self, config: VllmConfig, engines):
        self.info, self.tokens, self.counters = _metrics()
        self.model = str(config.model_config.served_model_name)
        while _SHOWN:
            self.info.remove(*_SHOWN.pop())
        for engine in engines:
            _SHOWN.append((self.model, str(engine), *settings.facts(config).values()))
            self.info.labels(*_SHOWN[-1]).set(1)
            self.take(engine, dict.fromkeys(("int2", "exact", *COUNTERS), 0))

    def take(self, engine, counts):
        labels = self.model, str(engine)
        for rows in ("int2", "exact"):
            self.tokens.labels(*labels, rows).set(counts[rows])
        for name, counter in self.counters.items():
            counter.labels(*labels).inc(counts[name])
