"""Which vLLM the plugin runs in: one that has what it replaces there, whatever its number.

What else it takes from vLLM is checked by scripts/check_vllm.py, without running it.
"""
import importlib
import inspect
import logging
from typing import Any

from ..errors import UnsupportedError

logger = logging.getLogger("vllm.oscar_int2")  # below vllm's: its level and format

RAN = ("0.26", "0.33")  # releases in which it has run
OFFLOADS = ("0.26",)     # those of them whose connector for host memory offloading.py knows
# What hooks.py replaces, by the parameters that it counts on.
ENGINE = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "",
    "vllm.model_executor.layers.attention.attention:Attention.__init__": "attn_backend",
    "vllm.model_executor.model_loader.base_loader:process_weights_after_loading": "model model_config",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit":
        "block_hashes max_cache_hit_length",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": "request",
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": "",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "scheduler_output model_runner_output",
    "vllm.v1.engine.core:EngineCore.__init__": "vllm_config",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "resumable",
    "vllm.v1.metrics.loggers:StatLoggerManager.record": "scheduler_stats iteration_stats",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config": "kv_cache_configs",
}
FIRST_RUNNER = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "scheduler_output",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync":
        "scheduler_output sampler_output logits hidden_states",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": "scheduler_output sampled_token_ids",
    "vllm.v1.worker.gpu_input_batch:InputBatch.swap_states": "i1 i2",
    "vllm.v1.worker.gpu_input_batch:InputBatch.condense": "self",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "scheduler_output",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "",
}
SECOND_RUNNER = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests": "scheduler_output",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests": "scheduler_output",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn": "input_batch",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample": "hidden_states input_batch",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": "scheduler_output",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": "",
}
CHUNKS = {  # what chunks.py replaces: vLLM asks it where a chunk of a model with linear attention may end
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split":
        "request num_new_tokens num_new_local_computed_tokens num_external_computed_tokens",
}
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = {  # what offloading.py replaces, and reads
    f"{_CONNECTOR}.offloading.scheduler:OffloadingConnectorScheduler._lookup": "req_status",
    f"{_CONNECTOR}.offloading.scheduler:RequestOffloadState": "req max_offload_tokens num_locally_computed_tokens",
    f"{_CONNECTOR}.offloading_connector:OffloadingConnector.update_state_after_alloc":
        "request blocks num_external_tokens",
    f"{_CONNECTOR}.offloading_connector:OffloadingConnector.build_connector_meta": "scheduler_output",
}


def require(hooks):
    """Raises UnsupportedError if this vLLM lacks one of them."""
    for place, parameters in hooks.items():
        module, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            known = inspect.signature(found).parameters
        except (ImportError, AttributeError):
            known = ()
            lacks = f"has no {path}, in {module}"
        else:
            lacks = f"calls {path} otherwise, in {module}"
        if not set(parameters.split()) <= set(known) or not known:
            import vllm

            raise UnsupportedError(f"vLLM {vllm.__version__} {lacks}, which the INT2 cache needs. It has run in "
                                   f"{', '.join(RAN)}")


def module_of_groups() -> Any:
    """The module of vLLM's that groups the layers of a model by their blocks."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:  # before 0.33
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def _release(version):
    return ".".join(version.split(".")[:2])


def has_run(version):
    return _release(version) in RAN


def offloads():
    """Whether pages can be offloaded to host memory in the vLLM that is installed."""
    import vllm

    return _release(vllm.__version__) in OFFLOADS


def streams():
    """Whether input that comes in parts is right in the vLLM that is installed. Before 0.31 another request can get a
    waiting one's window; 0.31 keeps the hash of a token that it drops, by which others find a page that was written
    anew."""
    import vllm

    return tuple(int(part) for part in _release(vllm.__version__).split(".")) >= (0, 32)


def adapter_name():
    """The module of this package that knows how this vLLM learns of our blocks."""
    from vllm.v1.attention.backend import AttentionBackend

    return "adapter_0_33" if hasattr(AttentionBackend, "supported_kv_cache_layouts") else "adapter_0_26"
