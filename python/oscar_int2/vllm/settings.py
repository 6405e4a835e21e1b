"""The bundle that is served, and what an engine must look like to be served with it."""
import functools
import os

from .._library import PAGE_TOKENS
from ..bundle import load
from ..cache import check_served
from ..codec import Windows
from ..errors import BundleError, UnsupportedError

BUNDLE = "VLLM_OSCAR_BUNDLE"  # environment: the bundle's path
# Environment, for tests: 1 fills windows that nobody holds, and the scratch before its use, with NaN.
POISON = "OSCAR_INT2_POISON"
# Of requests at a time, where the user names none: every one costs a window in every layer, and
# vLLM's own default is 1024 on large GPUs.
DEFAULT_MAX_NUM_SEQS = 64


def bundle_path():
    return os.environ.get(BUNDLE) or None


def poisons():
    return os.environ.get(POISON) == "1"


def bundle():
    """The bundle of this process, read once. Raises BundleError if none is named."""
    if not bundle_path():
        raise BundleError(f"{BUNDLE} is not set: the INT2 backend needs a bundle of the model, "
                          "which oscar-calibrate makes")
    return _load(bundle_path())


@functools.lru_cache(maxsize=1)
def _load(path):
    found = load(path)
    check_served(found)
    if found.quantizer.sink_tokens % PAGE_TOKENS:
        raise UnsupportedError(
            f"{path} keeps {found.quantizer.sink_tokens} first tokens exact; in vLLM, whose blocks "
            f"stand for them, that must be a multiple of {PAGE_TOKENS}")
    return found


def windows():
    return Windows.of(bundle().quantizer)


def prefixes(config):
    """Shared prefixes whose sinks are kept; 0: prefix caching is off."""
    caches = config.cache_config.enable_prefix_caching
    return config.scheduler_config.max_num_seqs if caches else 0


def set_defaults(args):
    """Sets what the user of these EngineArgs left open; what contradicts stays, to be refused."""
    for name, value in (("enable_prefix_caching", False), ("block_size", PAGE_TOKENS),
                        ("max_num_seqs", DEFAULT_MAX_NUM_SEQS)):
        if getattr(args, name) is None:
            setattr(args, name, value)


def check(config):
    """Raises UnsupportedError or BundleMismatchError unless this VllmConfig can be served."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    attention = config.attention_config
    backend = getattr(attention.backend, "name", None)
    refused = (
        (f"--attention-backend {backend}", backend not in (None, "CUSTOM"), "leave it out"),
        ("Model Runner V2", config.use_v2_model_runner, "set VLLM_USE_V2_MODEL_RUNNER=0"),
        ("prefix caching without exact first tokens",
         cache.enable_prefix_caching and not windows().sink_tokens, "--no-enable-prefix-caching"),
        (f"--block-size {cache.block_size}", cache.block_size != PAGE_TOKENS,
         f"--block-size {PAGE_TOKENS}"),
        (f"--kv-cache-dtype {cache.cache_dtype}", cache.cache_dtype not in ("auto", "bfloat16"),
         "leave it out: the bundle says how the cache is written"),
        (f"--dtype {model.dtype}", str(model.dtype) != "torch.bfloat16", "--dtype bfloat16"),
        ("speculative decoding", config.speculative_config, ""),
        ("tensor parallelism", parallel.tensor_parallel_size > 1, ""),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1, ""),
        ("data parallelism", parallel.data_parallel_size > 1, "one server a GPU"),
        ("context parallelism", max(parallel.decode_context_parallel_size,
                                    parallel.prefill_context_parallel_size) > 1, ""),
        ("micro-batches", parallel.use_ubatching, ""),
        ("KV transfer and offloading", config.kv_transfer_config, ""),
        ("fast prefill over shared KV", cache.kv_sharing_fast_prefill, ""),
        ("sleep mode", model.enable_sleep_mode, ""),
        ("pooling", model.runner_type != "generate", ""),
        ("an encoder-decoder model", model.is_encoder_decoder, ""),
        ("a hybrid model", model.is_hybrid, ""),
        ("MLA", model.use_mla, ""),
        ("attention that is not causal", attention.use_non_causal, ""),
        ("backends by kind of layer", attention.backend_per_kind, ""))
    for what, found, instead in refused:
        if found:
            raise UnsupportedError(f"the INT2 cache does not serve {what} in vLLM"
                                   f"{f'; {instead}' if instead else ''}")
    bundle().check_model(model.hf_text_config)


def check_layer(head_dim, scale, *, alibi_slopes, sliding_window, logits_soft_cap, attn_type,
                kv_sharing_target_layer_name, others):
    """Raises UnsupportedError unless this attention layer is plain causal attention."""
    refused = (("ALiBi", alibi_slopes is not None), ("a sliding window", sliding_window is not None),
               ("a soft cap of logits", logits_soft_cap), ("KV sharing", kv_sharing_target_layer_name),
               (f"attention of type {attn_type}", attn_type != "decoder"),
               (f"a softmax scale of {scale}", abs(scale * head_dim**0.5 - 1) > 1e-6),
               *((f"attention with {other}", value is not None) for other, value in others.items()))
    for what, found in refused:
        if found:
            raise UnsupportedError(f"the INT2 cache does not serve {what}")
