"""What is changed in vLLM, and in which of its processes.

| method | process | what it does besides |
|---|---|---|
| EngineArgs.create_engine_config | each that reads an engine's arguments | the bundle into the configuration, defaults and refusals |
| Attention.__init__ | a worker's | our backend for layers that hold 2-bit rows |
| base_loader.process_weights_after_loading | a worker's | compares weights with the bundle's |
| get_kv_cache_groups of kv_cache_utils, or later of kv_cache_planning | the scheduler's | makes the blocks of all layers ones of equal bytes |
| Scheduler.__init__ | the scheduler's | makes PrefixManager the manager of our blocks, WindowManager that of windows, Prefixes of what they share, and Offloading of what goes to host memory; with canonical chunks, _mamba_block_aligned_split |
| of its connector: update_state_after_alloc, build_connector_meta; of the connector's scheduler: _lookup | the scheduler's | what Offloading lets in and out (offloading.py) |
| Scheduler.add_request | the scheduler's | says once what log probabilities of prompts are |
| Scheduler.schedule | the scheduler's | tells the worker what happens to sinks |
| Scheduler.update_from_output | the scheduler's | ends requests of which a row was refused |
| Scheduler.make_stats | the scheduler's | counts what the cache holds |
| EngineCore.__init__ | the scheduler's | the bundle in the keys of blocks; the self-check, if it is asked for |
| InputProcessor.process_inputs | the API server's | refuses input that comes in parts, where it is not served |
| OutputProcessor.process_outputs | the API server's | answers with the reason, where vLLM has no RequestError |
| StatLoggerManager.__init__, .record | that of /metrics | publishes what was counted |
| WorkerWrapperBase.initialize_from_config | a worker's | what follows, for the runner that it has |
| GPUModelRunner._update_states (first runner) | a worker's | tells the builder which request is where in the batch; zeros new blocks of windows |
| GPUModelRunner.propose_draft_token_ids (first) | a worker's | fills up drafts of a request that has too few of them |
| InputBatch.swap_states, .condense (first) | a worker's | keep the allowed tokens of a request its own, which vLLM 0.26 leaves with others |
| CPUModelRunner._zero_block_ids (first, CPU) | a worker's | zeroes whole blocks, where one has several pages |
| rejection_sampler.expand_batch_to_tokens (first, CPU) | a worker's | repeats temperatures for drafts, which vLLM 0.26's CPU engine leaves out |
| GPUModelRunner.finish_requests, .add_requests, .prepare_attn (second runner) | a worker's | the same |
| GPUModelRunner._bookkeeping_sync (first), .sample (second) | a worker's | reads which requests have a refused row |
| GPUModelRunner.execute_model (both) | a worker's that is no last stage | tells the next stage of refused rows |
| GPUModelRunner.sample_tokens (both) | a worker's that is the last stage | sends that with the step's output |

Each is replaced by one that calls the original, and does more only for an engine whose configuration
names a bundle (settings.ENTRY): other engines of the process are left alone, whichever came first. How
vLLM learns the size of our blocks depends on its version, and is the adapters' (follow()).
"""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from vllm import outputs
from vllm.config import get_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..errors import UnsupportedError
from . import adapter, layers, settings, versions

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.input_batch import InputBatch as SecondInputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

    from .backend import OscarMetadataBuilder
    from .prefixes import Prefixes, SinkMoves

P = ParamSpec("P")
R = TypeVar("R")
logger = init_logger("vllm.oscar_int2")

_MARK = "_oscar_int2"  # attribute of a function that replaces another
_METRICS = "oscar_metrics"  # of a StatLoggerManager: metrics.Published
_PREFIXES = "oscar_prefixes"  # of a Scheduler that caches prefixes: prefixes.Prefixes
_OFFLOADING = "oscar_offloading"  # of a Scheduler that offloads pages: offloading.Offloading
_MOVES = "oscar_sink_moves"  # of a SchedulerOutput: prefixes.SinkMoves


def replace(owner, found: Callable[P, R] | property,
            make: Callable[[Callable[P, R]], Callable[P, R]]):
    """A function or property of `owner` becomes make(it), unless it did before."""
    original: Any = found.fget if isinstance(found, property) else found
    if not hasattr(original, _MARK):
        name = next(name for name in dir(owner) if inspect.getattr_static(owner, name) is found)
        function: Any = functools.wraps(original)(make(original))
        setattr(function, _MARK, True)
        setattr(owner, name, property(function) if isinstance(found, property) else function)


def install():
    """What a process needs before it reads its engine's arguments, or is given a configuration."""
    register_backend(AttentionBackendEnum.CUSTOM, "oscar_int2.vllm.backend.OscarBackend")
    settings.declare_variables()
    _follow_configuration()
    _follow_inputs()
    _follow_layers()
    _follow_weights()
    _follow_blocks()
    _follow_scheduler()
    _follow_stats()
    _follow_core()
    _follow_workers()
    adapter().follow()
    if not hasattr(outputs, "RequestError"):
        _answer_with_reasons()


def _follow_configuration():
    def make_create(original):
        def create_engine_config(self: EngineArgs, *args, **options):
            chosen = self.attention_backend or self.attention_config.backend
            settings.require_known_variables()  # one may have been set behind register()
            settings.checks_itself()  # what is wrong with it, before the weights are loaded
            if settings.ENTRY in (self.additional_config or {}):
                raise UnsupportedError(f"{settings.ENTRY!r} in additional_config: the plugin writes it; name the "
                                       f"bundle in {settings.BUNDLE}")
            if settings.bundle_path() is None and getattr(chosen, "name", chosen) != "CUSTOM":
                settings.warn_of_bf16()
                return original(self, *args, **options)
            entry = settings.entry()
            ours = settings.defaults(self, entry)
            ours["additional_config"] = {**self.additional_config, settings.ENTRY: entry}
            before = {name: getattr(self, name) for name in ours}
            vars(self).update(ours)
            try:
                config = original(self, *args, **options)
            finally:  # they may be read again, without a bundle
                vars(self).update(before)
            settings.check(config)
            settings.check_files(config)
            config.attention_config.backend = None  # Attention.__init__ says which layers have ours
            settings.announce(config)
            return config

        return create_engine_config

    replace(EngineArgs, EngineArgs.create_engine_config, make_create)


def _follow_inputs():
    from vllm.v1.engine.input_processor import InputProcessor

    def make_process(original):
        def process_inputs(self: InputProcessor, *args, resumable=False, **options):
            if resumable and settings.serves_int2(self.vllm_config):
                settings.check_streamed(self.vllm_config)
            return original(self, *args, resumable=resumable, **options)

        return process_inputs

    replace(InputProcessor, InputProcessor.process_inputs, make_process)


def scores_a_prompt(parameters: SamplingParams | None):
    """Whether a request with these SamplingParams shows what a prompt's own rows give: its tokens' log
    probabilities, or those of the one token behind it, as every step of a beam search asks for."""
    return parameters is not None and (parameters.prompt_logprobs is not None or (
        parameters.max_tokens == 1 and parameters.logprobs is not None))


def _follow_layers():
    from vllm.compilation import backends
    from vllm.model_executor.layers.attention.attention import Attention

    def make_init(original):
        parameters = inspect.signature(original)

        def __init__(self: Attention, *args, attn_backend: type[AttentionBackend] | None = None, **options):
            config = get_current_vllm_config()
            # Layers of drafts have tags of their own, and keep the backend that vLLM gives them.
            if settings.serves_int2(config) and backends.model_tag == "backbone":
                if attn_backend is not None:
                    raise UnsupportedError(f"the INT2 cache does not serve attention with a backend of "
                                           f"its own, {attn_backend.get_name()}")
                given = parameters.bind(self, *args, **options).arguments
                window, cache = given.get("per_layer_sliding_window"), given.get("cache_config")
                if window is None and cache is not None:
                    window = cache.sliding_window
                if layers.holds_int2(settings.bundle(config), given.get("prefix", ""), window,
                                     given.get("kv_sharing_target_layer_name")):
                    from .backend import backend_of

                    attn_backend = backend_of(config)
            original(self, *args, attn_backend=attn_backend, **options)

        return __init__

    replace(Attention, Attention.__init__, make_init)


def _follow_weights():
    from vllm.model_executor.model_loader import base_loader

    def make_process(original):
        def process_weights_after_loading(model, model_config, target_device):
            config = get_current_vllm_config()
            if not settings.serves_int2(config):
                return original(model, model_config, target_device)
            from .weights import Loaded

            loaded = Loaded(model, config)
            loaded.check()
            result = original(model, model_config, target_device)
            loaded.watch()
            return result

        return process_weights_after_loading

    replace(base_loader, base_loader.process_weights_after_loading, make_process)


def _follow_blocks():
    """All workers say what blocks their layers have, and the scheduler's process groups them."""
    from .specs import equal_blocks

    planning = versions.module_of_groups()
    versions.require({f"{planning.__name__}:get_kv_cache_groups": "vllm_config kv_cache_spec"})
    replace(planning, planning.get_kv_cache_groups, equal_blocks)


def _follow_scheduler():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from . import chunks, metrics, offloading, refusals

    def make_init(original):
        def __init__(self: Scheduler, vllm_config, *args, **options):
            if not settings.serves_int2(vllm_config):
                return original(self, vllm_config, *args, **options)
            from .prefixes import PrefixManager, Prefixes, WindowManager
            from .specs import Int2Spec, WindowSpec

            KVCacheSpecRegistry.register(Int2Spec, PrefixManager, FullAttentionSpec)
            KVCacheSpecRegistry.register(WindowSpec, WindowManager, SlidingWindowSpec)
            original(self, vllm_config, *args, **options)
            managers, chunk = _prefix_managers(self), settings.chunk_tokens(vllm_config)
            if managers and chunk:
                chunks.split_prompts(self, settings.cache_format(vllm_config), chunk)
            if managers and vllm_config.cache_config.enable_prefix_caching:
                prefixes = Prefixes(self.kv_cache_manager.coordinator, managers, settings.kept_sinks(vllm_config),
                                    settings.drafts(vllm_config), chunk)
                setattr(self, _PREFIXES, prefixes)
                if self.connector is not None:
                    connector: Any = self.connector  # settings.check() lets no other kind through
                    setattr(self, _OFFLOADING, offloading.Offloading(self, prefixes, connector))

        return __init__

    def make_add(original):
        def add_request(self: Scheduler, request: Request):
            parameters = request.sampling_params
            if (settings.serves_int2(self.vllm_config) and scores_a_prompt(parameters)
                    and request.request_id != settings.SELF_CHECK_REQUEST):
                logger.warning_once("OSCAR INT2: log probabilities of a prompt (prompt_logprobs, echo) are BF16's where "
                                    "it is read in one step: its rows become 2 bits behind that. So are those of a "
                                    "single token behind it and of beams, but where a beginning that others share is "
                                    "read in 2 bits. To measure the cache: "
                                    "apply(..., prompts='int2') of oscar_int2.transformers")
            return original(self, request)

        return add_request

    def make_schedule(original):
        def schedule(self: Scheduler, *args, **options):
            output = original(self, *args, **options)
            for manager in _prefix_managers(self)[:1]:
                metrics.count_written(self, output, manager.format)
            prefixes = _prefixes(self)
            if prefixes:
                setattr(output, _MOVES, prefixes.take_moves(output.num_scheduled_tokens))
            return output

        return schedule

    def make_output(original):
        def update_from_output(self: Scheduler, scheduler_output, model_runner_output):
            reasons = refusals.take(self, _prefix_managers(self), model_runner_output)
            if reasons:
                stores: offloading.Offloading | None = getattr(self, _OFFLOADING, None)
                if stores:
                    stores.refuse(reasons)
                refusals.end(self, reasons)
                metrics.count_refused(self, len(reasons))
            outputs = original(self, scheduler_output, model_runner_output)
            if reasons:
                refusals.say_why(outputs, reasons)
            return outputs

        return update_from_output

    replace(Scheduler, Scheduler.__init__, make_init)
    replace(Scheduler, Scheduler.add_request, make_add)
    replace(Scheduler, Scheduler.schedule, make_schedule)
    replace(Scheduler, Scheduler.update_from_output, make_output)


def _follow_stats():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import StatLoggerManager

    from . import metrics

    def make_count(original):
        def make_stats(self: Scheduler, *args, **options):
            stats: SchedulerStats | None = original(self, *args, **options)
            managers = _prefix_managers(self)
            if stats is not None and managers:
                metrics.add(stats, metrics.count(self, managers[0].format, _prefixes(self)))
            return stats

        return make_stats

    def make_init(original):
        def __init__(self: StatLoggerManager, vllm_config, *args, **options):
            original(self, vllm_config, *args, **options)
            if settings.serves_int2(vllm_config):
                setattr(self, _METRICS, metrics.Published(vllm_config, self.engine_indexes))

        return __init__

    def make_record(original):
        def record(self: StatLoggerManager, scheduler_stats: SchedulerStats | None, iteration_stats,
                   mm_cache_stats=None, engine_idx=None):
            published = getattr(self, _METRICS, None)
            counts = metrics.split(scheduler_stats) if published and scheduler_stats else None
            if counts:
                published.take(engine_idx or 0, counts)
            return original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

        return record

    replace(Scheduler, Scheduler.make_stats, make_count)
    replace(StatLoggerManager, StatLoggerManager.__init__, make_init)
    replace(StatLoggerManager, StatLoggerManager.record, make_record)


def _answer_with_reasons():
    """A request that ended by a refused row is answered with the reason, as a bad request. vLLM itself
    says no more than "Internal server error", and keeps the text of no other kind of exception."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    from .refusals import PREFIX

    def make_process(original):
        def process_outputs(self: OutputProcessor, engine_core_outputs, *args, **options):
            for output in engine_core_outputs:
                if output.finish_reason == FinishReason.ERROR and isinstance(output.stop_reason, str):
                    state = self.request_states.get(output.request_id)
                    if state and state.queue and output.stop_reason.startswith(PREFIX):
                        state.queue.put(VLLMValidationError(output.stop_reason))
            return original(self, engine_core_outputs, *args, **options)

        return process_outputs

    replace(OutputProcessor, OutputProcessor.process_outputs, make_process)


def _follow_core():
    from vllm.v1.engine.core import EngineCore

    def make_init(original):
        def __init__(self: EngineCore, vllm_config, *args, **options):
            original(self, vllm_config, *args, **options)
            if settings.serves_int2(vllm_config):
                if vllm_config.cache_config.enable_prefix_caching:
                    from .prefixes import seed_keys

                    seed_keys(vllm_config)
                if settings.checks_itself():
                    from . import self_check

                    self_check.run(self)

        return __init__

    replace(EngineCore, EngineCore.__init__, make_init)


def _prefixes(scheduler: Scheduler) -> Prefixes | None:
    return getattr(scheduler, _PREFIXES, None)


def _prefix_managers(scheduler: Scheduler):
    from .prefixes import PrefixManager

    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if isinstance(manager, PrefixManager)]


def _follow_workers():
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def make_initialize(original):
        def initialize_from_config(self: WorkerWrapperBase, kv_cache_configs):
            if settings.serves_int2(self.vllm_config):
                _follow_runner()
            return original(self, kv_cache_configs)

        return initialize_from_config

    replace(WorkerWrapperBase, WorkerWrapperBase.initialize_from_config, make_initialize)


def _follow_runner():
    """By now vLLM has made this worker's model runner, of one kind or the other. Each stage of pipeline
    parallelism comes here, also one without a layer over INT2."""
    for module, needs, follow in (
            ("vllm.v1.worker.gpu_model_runner", versions.FIRST_RUNNER, _follow_first_runner),
            ("vllm.v1.worker.gpu.model_runner", versions.SECOND_RUNNER, _follow_second_runner)):
        if module in sys.modules:
            versions.require(needs)
            follow(sys.modules[module].GPUModelRunner)


def _builders(runner: FirstRunner | SecondRunner) -> list[OscarMetadataBuilder]:
    from .backend import OscarMetadataBuilder

    found = (builder for groups in runner.attn_groups for group in groups
             for builder in group.metadata_builders)
    return [builder for builder in found if isinstance(builder, OscarMetadataBuilder)]


def _follow_first_runner(owner: type[FirstRunner]):
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from . import refusals, specs, steps

    def make_update(original):
        def _update_states(self: FirstRunner, scheduler_output: SchedulerOutput):
            if settings.serves_int2(self.vllm_config):
                specs.clean_windows(self, scheduler_output)
            result = original(self, scheduler_output)
            moves: SinkMoves | None = getattr(scheduler_output, _MOVES, None)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            request_ids = self.input_batch.req_ids
            for builder in _builders(self):
                slots = builder.slots
                builder.keep_sinks([(slots.of[request], place) for request, place in moves.kept] if moves else [])
                builder.leave([slot for ids in (
                    scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or (),
                    scheduler_output.scheduled_cached_reqs.resumed_req_ids) for slot in slots.release(ids)])
                builder.go_on([(slots.of[new.req_id], new.num_computed_tokens)
                               for new in scheduler_output.scheduled_new_reqs if new.req_id in slots.of])
                builder.publish(slots.hold(request_ids), [len(drafts.get(request, ())) for request in request_ids])
                builder.take_sinks([(slots.of[request], *rest) for request, *rest in moves.taken] if moves else [])
            return result

        return _update_states

    def make_bookkeeping(original):
        def _bookkeeping_sync(self: FirstRunner, scheduler_output, sampler_output, logits, hidden_states, *args, **options):
            if settings.serves_int2(self.vllm_config):
                refusals.note(self, _builders(self), self.input_batch.req_ids, hidden_states, self.query_start_loc.gpu)
            return original(self, scheduler_output, sampler_output, logits, hidden_states, *args, **options)

        return _bookkeeping_sync

    def make_propose(original):
        def propose_draft_token_ids(self: FirstRunner, scheduler_output, sampled_token_ids, *args, **options):
            drafts = original(self, scheduler_output, sampled_token_ids, *args, **options)
            if settings.serves_int2(self.vllm_config) and isinstance(drafts, list):  # as ngram's, which finds what it finds
                count = scheduler_output.num_spec_tokens_to_schedule  # k, or fewer where vLLM says so
                return steps.fill_up(drafts, sampled_token_ids, count)
            return drafts

        return propose_draft_token_ids

    def make_swap(original):
        def swap_states(self: InputBatch, i1, i2):
            allowed = self.allowed_token_ids_mask_cpu_tensor
            rows = None if allowed is None else allowed[[i2, i1]]  # a copy: vLLM exchanges views, of which one is lost
            original(self, i1, i2)
            if rows is not None:
                allowed[[i1, i2]] = rows

        return swap_states

    def make_condense(original):
        def condense(self: InputBatch):
            original(self)
            if self.allowed_token_ids_mask_cpu_tensor is not None:  # rows that were left keep theirs, for who comes next
                self.allowed_token_ids_mask_cpu_tensor[self.num_reqs:] = False

        return condense

    def make_expand(original):
        def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
            if current_platform.is_cpu():  # vLLM's kernel there takes integers alone, and writes into a copy
                counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
                return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)

        return expand_batch_to_tokens

    def make_zero(original):
        def _zero_block_ids(self: CPUModelRunner, block_ids):
            if settings.serves_int2(self.vllm_config):
                return specs.zero_blocks(self, block_ids)
            return original(self, block_ids)

        return _zero_block_ids

    cpu = sys.modules.get("vllm.v1.worker.cpu_model_runner")
    if cpu is not None:
        replace(cpu.CPUModelRunner, cpu.CPUModelRunner._zero_block_ids, make_zero)
    replace(owner, owner._update_states, make_update)
    replace(owner, owner._bookkeeping_sync, make_bookkeeping)
    replace(owner, owner.propose_draft_token_ids, make_propose)
    replace(InputBatch, InputBatch.swap_states, make_swap)
    replace(InputBatch, InputBatch.condense, make_condense)
    replace(rejection_sampler, rejection_sampler.expand_batch_to_tokens, make_expand)
    _send_notes(owner)


def _follow_second_runner(owner: type[SecondRunner]):
    from . import refusals, specs

    def make_finish(original):
        def finish_requests(self: SecondRunner, scheduler_output: SchedulerOutput):
            if settings.serves_int2(self.vllm_config):
                specs.clean_windows(self, scheduler_output)
            moves: SinkMoves | None = getattr(scheduler_output, _MOVES, None)
            index = self.req_states.req_id_to_index
            left = scheduler_output.finished_req_ids.union(scheduler_output.preempted_req_ids or ())
            for builder in _builders(self):
                builder.slots.of = index
                builder.keep_sinks([(index[request], place) for request, place in moves.kept] if moves else [])
                builder.leave([index[request] for request in left if request in index])
            return original(self, scheduler_output)

        return finish_requests

    def make_add(original):
        def add_requests(self: SecondRunner, scheduler_output: SchedulerOutput):
            index = self.req_states.req_id_to_index
            go_on = [new for new in scheduler_output.scheduled_new_reqs if new.req_id in index]
            result = original(self, scheduler_output)
            moves: SinkMoves | None = getattr(scheduler_output, _MOVES, None)
            for builder in _builders(self):
                builder.go_on([(index[new.req_id], new.num_computed_tokens) for new in go_on])
                builder.take_sinks([(index[request], *rest) for request, *rest in moves.taken] if moves else [])
            return result

        return add_requests

    def make_prepare(original):
        def prepare_attn(self: SecondRunner, input_batch: SecondInputBatch):
            drafts = input_batch.num_draft_tokens_per_req
            slots = input_batch.idx_mapping_np
            for builder in _builders(self):
                builder.publish(slots, [0] * len(slots) if drafts is None else drafts)
            return original(self, input_batch)

        return prepare_attn

    def make_read(original):
        def sample(self: SecondRunner, hidden_states, input_batch: SecondInputBatch, *args, **options):
            if settings.serves_int2(self.vllm_config):
                refusals.note(self, _builders(self), input_batch.req_ids, hidden_states, input_batch.query_start_loc)
            return original(self, hidden_states, input_batch, *args, **options)

        return sample

    replace(owner, owner.finish_requests, make_finish)
    replace(owner, owner.add_requests, make_add)
    replace(owner, owner.prepare_attn, make_prepare)
    replace(owner, owner.sample, make_read)
    _send_notes(owner)


def _send_notes(owner: type[FirstRunner] | type[SecondRunner]):
    from vllm.sequence import IntermediateTensors

    from . import refusals

    def make_execute(original):
        def execute_model(self, *args, **options):
            output = original(self, *args, **options)
            if isinstance(output, IntermediateTensors):  # for the next stage
                for builder in _builders(self):
                    builder.spoil_refused(output.tensors.values())
            return output

        return execute_model

    def make_sample(original):
        def sample_tokens(self, *args, **options):
            return refusals.send(self, original(self, *args, **options))

        return sample_tokens

    # Their decorator, torch.inference_mode, has no type of a function.
    replace(owner, owner.execute_model, make_execute)  # pyright: ignore[reportArgumentType]
    replace(owner, owner.sample_tokens, make_sample)  # pyright: ignore[reportArgumentType]
