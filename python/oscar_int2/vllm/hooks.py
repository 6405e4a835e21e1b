"""What is changed in vLLM, and in which of its processes.

| method | process | what it does besides |
|---|---|---|
| EngineArgs.create_engine_config | each that reads an engine's arguments | defaults and refusals |
| Scheduler.__init__ | the scheduler's | makes PrefixManager the manager of our blocks |
| Scheduler.schedule | the scheduler's | tells the worker what happens to sinks |
| GPUModelRunner._update_states | a worker's | tells the builder which request is where in the batch |

Each is replaced by one that calls the original. The scheduler's two only where a bundle is named, the
worker's only once an INT2 layer is made: other engines are left alone. How vLLM learns the size of our
blocks depends on its version, and is the adapters'.
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


def replace(owner, name, make):
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
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # for this process and its own
            if chosen is None:
                self.attention_backend = AttentionBackendEnum.CUSTOM
            config = original(self, *args, **options)
            settings.check(config)
            return config

        return create_engine_config

    replace(EngineArgs, "create_engine_config", make)


def _follow_scheduler():
    """What the process of a scheduler needs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    def make_init(original):
        def __init__(self, *args, **options):
            from .prefixes import PrefixManager
            from .specs import Int2Spec

            KVCacheSpecRegistry.register(Int2Spec, PrefixManager, FullAttentionSpec)
            original(self, *args, **options)
            for manager in _prefix_managers(self):
                manager.make_places(settings.prefixes(self.vllm_config))

        return __init__

    def make_schedule(original):
        def schedule(self, *args, **options):
            output = original(self, *args, **options)
            for manager in _prefix_managers(self):
                setattr(output, _MOVES, manager.take_moves())
            return output

        return schedule

    replace(Scheduler, "__init__", make_init)
    replace(Scheduler, "schedule", make_schedule)


def _prefix_managers(scheduler):
    from .prefixes import PrefixManager

    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if isinstance(manager, PrefixManager)]


def follow_worker():
    """What the process of a worker needs, once its first INT2 layer is made."""
    from .backend import OscarMetadataBuilder

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

    replace(sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner, "_update_states",
            make_update)
