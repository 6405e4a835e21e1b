"""The self-check of an engine, before it takes its first request (VLLM_OSCAR_SELF_CHECK=1).

The engine reads the probe of oscar_int2.self_check twice, and gives the log probabilities of what it reads.
A prompt that is read whole attends over its own rows, as the model made them: that is BF16. Behind it the
quote comes one token at a time, and takes the way of generated ones: the scheduler, windows, pages, and on a
GPU the graph of one request.
"""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.request import Request

from .. import self_check
from ..errors import SelfCheckError, UnsupportedError
from . import settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

logger = logging.getLogger("vllm.oscar_int2")
# Of a Scheduler: chunks of prompts end where it says, for states of linear attention and for canonical chunks.
_BLOCK_ENDS = "need_mamba_block_aligned_split"


def run(core: EngineCore):
    """Checks an EngineCore that has nothing to do yet. Raises SelfCheckError if its cache does not fit its
    model, UnsupportedError if that cannot be said."""
    config, bundle = core.vllm_config, settings.bundle(core.vllm_config)
    scheduler: Scheduler = core.scheduler
    probe = _probe(config, scheduler)
    ids, begin = probe.prompt + probe.quote, len(probe.prompt)
    exact, served = (_read(core, ids, at_once)[begin - 1:] for at_once in (len(ids), begin))
    core.reset_prefix_cache()
    result = self_check.check(bundle, probe, exact, served)
    logger.warning("OSCAR INT2: self-check passed: %s", result)


def _probe(config: VllmConfig, scheduler: Scheduler):
    """The longest that one step can read, if it needs to be no longer."""
    model, format = config.model_config, settings.cache_format(config)
    tokenizer, encode = cached_tokenizer_from_config(model), None
    if tokenizer is not None:
        def encode(text):
            return tokenizer.encode(text, add_special_tokens=False)
    room = min(model.max_model_len - 1, scheduler.max_num_scheduled_tokens)
    tokens = self_check.probe_tokens(format)
    least = 2 * (format.sink_tokens + format.recent_tokens + format.demote_block)
    while tokens >= least:
        probe = self_check.probe(tokens, model.get_vocab_size(), encode)
        if len(probe.prompt) + len(probe.quote) <= room:
            return probe
        tokens -= 32
    raise UnsupportedError(
        f"{settings.SELF_CHECK}=1 needs steps of about {least + 128} tokens, and this engine takes {room}: raise "
        "--max-model-len and --max-num-batched-tokens, or leave the self-check out")


def _read(core: EngineCore, ids, at_once):
    """Log probabilities of the tokens behind the first, which are read in one step of `at_once` tokens and
    in steps of one token behind it."""
    scheduler: Scheduler = core.scheduler
    config = scheduler.scheduler_config
    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    request = Request(settings.SELF_CHECK_REQUEST, ids, parameters, None, block_hasher=core.request_block_hasher)
    before = (scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold,
              config.enable_chunked_prefill, getattr(scheduler, _BLOCK_ENDS, False))
    setattr(scheduler, _BLOCK_ENDS, False)  # nothing of it is shared
    scheduler.max_num_scheduled_tokens = at_once
    config.long_prefill_token_threshold, config.enable_chunked_prefill = 0, True
    found = None
    try:
        core.add_request(request)
        while scheduler.has_requests() or core.batch_queue:
            outputs, _ = core.step_fn()
            scheduler.max_num_scheduled_tokens = 1
            for sent in (outputs or {}).values():
                for output in sent.outputs:
                    found = output.new_prompt_logprobs_tensors or found
    finally:
        (scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold,
         config.enable_chunked_prefill, ends) = before
        setattr(scheduler, _BLOCK_ENDS, ends)
    if found is None:
        raise SelfCheckError("the self-check failed: the engine gave no log probabilities of its prompt")
    return found.logprobs[:, 0].tolist()
