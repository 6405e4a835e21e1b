"""A row that cannot be coded ends the request that it belongs to, and nothing else.

The append operator notes refused rows by window slot. The worker reads these notes once a step, behind
everything else on its stream, so that nothing waits for them, and sends them with the step's output. A stage of
pipeline parallelism that is not the last tells the next one by NaN. The scheduler ends the requests that the
notes name before it takes a token of that step.
"""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..cache import row_problem

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    from .backend import OscarMetadataBuilder
    from .prefixes import PrefixManager

logger = logging.getLogger("vllm.oscar_int2")  # below vllm's: its level and format

_NOTED = "oscar_noted"   # of a model runner: the notes of a step that is under way
NOTES = "oscar_refused"  # of a ModelRunnerOutput: {request id: bits}, of requests with a bit
NO_LOGITS = 1 << 9       # a bit beside those of RowStatus: the logits are NaN
PREFIX = "OSCAR INT2: "  # of every reason that a client is told


def reason(bits):
    """What a client and the log are told."""
    rows = bits & ~NO_LOGITS
    return PREFIX + (row_problem(rows) if rows else "the logits are not finite")


def note(runner, builders: list[OscarMetadataBuilder], request_ids, hidden_states, query_start_loc):
    """Reads which requests of a step have a refused row, behind all that the step has computed; waits for nothing.
    `hidden_states` [tokens, hidden size] of the last layer: a last stage without a layer over INT2, and so without
    `builders`, sees NaN in them."""
    requests = len(request_ids)
    last = hidden_states.index_select(0, query_start_loc[1:requests + 1] - 1)
    bits = last.amax(-1).isnan().int() * NO_LOGITS  # one number shows any NaN
    for builder in builders:
        bits |= builder.refused(requests)
    setattr(runner, _NOTED, (list(request_ids), bits.to("cpu", non_blocking=True)))


def send(runner, output):
    """Adds NOTES to a step's output; there are none where the step had no tokens."""
    notes = vars(runner).pop(_NOTED, None)
    if notes is None:
        return output

    def noted(done):
        setattr(done, NOTES, {request: bits for request, bits in zip(notes[0], notes[1].tolist()) if bits})
        return done

    if not hasattr(output, "get_output"):
        return noted(output)
    running: AsyncModelRunnerOutput = output  # of a step that is still under way: its bits arrive with its tokens
    get_output = running.get_output
    running.get_output = lambda: noted(get_output())
    return output


def take(scheduler: Scheduler, managers: list[PrefixManager], output: ModelRunnerOutput):
    """Of the requests that a step's output names and that still run: {request id: reason}. Their tokens
    of this step are dropped, and their blocks are for nobody else."""
    found = {}
    for request, bits in (getattr(output, NOTES, None) or {}).items():
        if request not in scheduler.requests or scheduler.requests[request].is_finished():
            continue
        found[request] = reason(bits)
        logger.error("Request %s ends with an error. %s", request, found[request])
        if output.sampled_token_ids:
            output.sampled_token_ids[output.req_id_to_index[request]] = []
        output.prompt_logprobs_dict.pop(request, None)
        for manager in managers:
            manager.forget(request)
        blocks = scheduler.kv_cache_manager.get_block_ids(request)
        scheduler.kv_cache_manager.evict_blocks({block for ids in blocks for block in ids})
    return found


def end(scheduler: Scheduler, reasons):
    """Those of {id: reason} end with an error in the scheduler's next update_from_output()."""
    ending: Any = scheduler.grammar_compile_error_reqs
    if isinstance(ending, set):
        ending.update(reasons)
        return
    from vllm.outputs import RequestError  # pyright: ignore[reportAttributeAccessIssue]: not in all versions

    ending.update({request: RequestError(code="validation_error", message=reason)
                   for request, reason in reasons.items()})


def say_why(outputs: dict[int, EngineCoreOutputs], reasons):
    """Writes the reasons into what the scheduler sends to its clients (EngineCoreOutputs)."""
    for sent in outputs.values():
        for output in sent.outputs:
            if output.request_id in reasons and output.finish_reason is not None:
                output.stop_reason = reasons[output.request_id]
