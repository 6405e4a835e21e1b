"""vLLM 0.26: where it has to be changed, since it has no hook for a KV cache of a third party.

Five methods are replaced, each by one that calls the original: EngineArgs.create_engine_config
(defaults and refusals), Scheduler.__init__ (our manager of blocks), Scheduler.schedule (what it tells
the worker), Attention.get_kv_cache_spec (the size of our blocks; the original knows TurboQuant's
alone), GPUModelRunner._update_states (which request is where in the batch). The last two only once
an INT2 layer is made, and the scheduler's only where a bundle is named: other engines are left alone.
"""
import functools
import os
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from . import settings

_BACKEND = "oscar_int2.vllm.backend.OscarBackend"
_MARK = "_oscar_int2"  # attribute of a method that was replaced
_MOVES = "oscar_sink_moves"  # of a SchedulerOutput: prefixes.SinkMoves


def _replace(owner, name, make):
    """owner.name becomes make(owner.name), unless it did before."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        method = functools.wraps(original)(make(original))
        setattr(method, _MARK, True)
        setattr(owner, name, method)


def install():
    """What a process needs before it reads its engine's arguments."""
    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    if settings.bundle_path():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        if current_platform.is_cpu():  # which asks for no other backend
            register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
        _follow_scheduler()

    def make(original):
        def create_engine_config(self, *args, **options):
            chosen = self.attention_backend or self.attention_config.backend
            if not settings.bundle_path() and getattr(chosen, "name", chosen) != "CUSTOM":
                return original(self, *args, **options)
            settings.bundle()  # what is wrong with it, before anything else
            settings.set_defaults(self)
            if chosen is None:
                self.attention_backend = AttentionBackendEnum.CUSTOM
            config = original(self, *args, **options)
            settings.check(config)
            return config

        return create_engine_config

    _replace(EngineArgs, "create_engine_config", make)


def _follow_scheduler():
    """What the process of a scheduler needs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    def make_init(original):
        def __init__(self, *args, **options):
            from .backend import Int2Spec
            from .prefixes import PrefixManager

            KVCacheSpecRegistry.register(Int2Spec, PrefixManager, FullAttentionSpec)
            original(self, *args, **options)

        return __init__

    def make_schedule(original):
        def schedule(self, *args, **options):
            output = original(self, *args, **options)
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                if hasattr(manager, "take_moves"):
                    setattr(output, _MOVES, manager.take_moves())
            return output

        return schedule

    _replace(Scheduler, "__init__", make_init)
    _replace(Scheduler, "schedule", make_schedule)


def follow_engine():
    """What the process of a worker needs, once its first INT2 layer is made."""
    from vllm.model_executor.layers.attention.attention import Attention

    from .backend import OscarBackend, OscarMetadataBuilder, cache_spec

    def make_spec(original):
        def get_kv_cache_spec(self, vllm_config):
            if issubclass(self.attn_backend, OscarBackend):
                return cache_spec(self.num_kv_heads, self.head_size, vllm_config)
            return original(self, vllm_config)

        return get_kv_cache_spec

    def make_update(original):
        def _update_states(self, scheduler_output):
            result = original(self, scheduler_output)
            for group in (group for groups in self.attn_groups for group in groups):
                for builder in group.metadata_builders:
                    if isinstance(builder, OscarMetadataBuilder):
                        builder.follow(scheduler_output.finished_req_ids,
                                       scheduler_output.preempted_req_ids or (),
                                       list(scheduler_output.scheduled_cached_reqs.resumed_req_ids),
                                       self.input_batch.req_ids, getattr(scheduler_output, _MOVES, None))
            return result

        return _update_states

    _replace(Attention, "get_kv_cache_spec", make_spec)
    _replace(sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner, "_update_states",
             make_update)
