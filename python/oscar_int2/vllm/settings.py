"""The bundle that an engine serves, and what the engine must look like to be served with it.

VLLM_OSCAR_BUNDLE is read where an engine's arguments are read, and nowhere else: what it names goes
into the engine's configuration (ENTRY of additional_config), which vLLM hands to all its processes. So
one process may run several engines, over INT2, over another bundle or over BF16.
"""
from __future__ import annotations

import difflib
import errno
import functools
import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any

from .. import weight_files, weights
from .._library import PAGE_TOKENS
from ..bundle import load
from ..errors import BundleError, UnsupportedError
from . import chunks, layers, offloading, versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from ..bundle import Bundle

logger = logging.getLogger("vllm.oscar_int2")  # below vllm's: its level and format
BUNDLE = "VLLM_OSCAR_BUNDLE"  # environment: the bundle's path
ENTRY = "oscar_int2"  # of VllmConfig.additional_config: an Entry
WEIGHTS = "VLLM_OSCAR_WEIGHTS"  # environment: "any" to serve a bundle of other weights, or "same"
SINK_BYTES = "VLLM_OSCAR_SINK_BYTES"  # environment: host memory for sinks of shared prefixes, of all ranks
DEFAULT_SINK_BYTES = 2 << 30
SELF_CHECK = "VLLM_OSCAR_SELF_CHECK"  # environment: 1 for a self-check at start-up, or 0
SELF_CHECK_REQUEST = "oscar-self-check"  # its id
CHUNKS = "VLLM_OSCAR_CANONICAL_CHUNKS"  # environment: tokens of canonical chunks (chunks.py), or 0
# Environment, for tests: 1 fills windows that nobody holds, and the scratch before its use, with NaN.
POISON = "OSCAR_INT2_POISON"
VARIABLES = (BUNDLE, WEIGHTS, SINK_BYTES, SELF_CHECK, CHUNKS)
# Of vLLM's pull request 46774, which an export for it names (lib/oscar/bundle/export.cpp): nothing here reads them.
OF_PULL_REQUEST = tuple(f"VLLM_OSCAR_{name}" for name in (
    "K_ROTATION_PATH", "V_ROTATION_PATH", "K_CLIP_RATIO", "V_CLIP_RATIO", "GROUP_SIZE", "SINK_TOKENS", "RECENT_TOKENS"))
# Of requests at a time, where the user names none: every one costs a window in every layer, and
# vLLM's own default is 1024 on large GPUs.
DEFAULT_MAX_NUM_SEQS = 64

# Of EngineArgs, from 0.30 on: at which tokens windows and states of linear attention are kept for others. 0, its
# default, keeps those before a prompt's last token alone, and a hit ends recent_tokens before that. None keeps all.
RETENTION = "prefix_cache_retention_interval"
DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")  # methods of speculative decoding that have run


def require_known_variables():
    """Raises BundleError for a variable with the plugin's prefix that it does not read: misspelt, it would mean BF16.
    Those of the pull request are its own, and are warned of where a bundle is served."""
    theirs = [name for name in OF_PULL_REQUEST if name in os.environ]
    if theirs and BUNDLE in os.environ:
        logger.warning("OSCAR INT2: %s: for vLLM's pull request 46774; the bundle says all of that here",
                       ", ".join(theirs))
    for name in os.environ:
        if name.startswith("VLLM_OSCAR") and name not in VARIABLES + OF_PULL_REQUEST:
            meant = difflib.get_close_matches(name, VARIABLES, 1)
            raise BundleError(f"{name} is set, which nothing reads; {f'did you mean {meant[0]}? ' if meant else ''}"
                              f"There are {', '.join(VARIABLES)}")


def warn_of_bf16():
    """Of an engine over BF16: says so where a variable asks for something of the plugin, or looks like the one that names
    a bundle."""
    for name in (WEIGHTS, SINK_BYTES, CHUNKS):  # and of SELF_CHECK checks_itself() says it
        if name in os.environ:
            logger.warning("OSCAR INT2 is off: this engine's cache is vLLM's own. %s is set and %s is not", name, BUNDLE)
            return
    similar = [name for name in os.environ if name != BUNDLE and (
        difflib.SequenceMatcher(None, name.upper(), BUNDLE).ratio() > 0.9
        or {"OSCAR", "BUNDLE"} <= set(name.upper().split("_")))]
    if similar:
        logger.warning("OSCAR INT2 is off: this engine's cache is vLLM's own. %s is set, which nothing reads; %s names "
                       "a bundle", similar[0], BUNDLE)


def declare_variables():
    """Tells vLLM of variables that else are unknown to it: a warning, or an error with --fail-on-environ-validation.
    vLLM reads none of them, and hashes none into the key of what it compiles."""
    from vllm import envs

    for name in VARIABLES + OF_PULL_REQUEST:
        getattr(envs, "environment_variables", {}).setdefault(name, lambda: None)


def bundle_path():
    """What the environment names; None: the variable is not set. Raises BundleError if it is blank."""
    path = os.environ.get(BUNDLE)
    if path is not None and not path.strip():
        raise BundleError(f"{BUNDLE} is set and names no file; name the bundle of the model, or unset "
                          "the variable to serve BF16")
    return path


def checks_itself():
    """Whether the environment asks for a self-check. Raises BundleError for a value that says neither yes nor
    no, and where there is no bundle to check."""
    value = os.environ.get(SELF_CHECK, "0")
    if value not in ("0", "1"):
        raise BundleError(f"{SELF_CHECK} is {value!r}; it is 1 for a self-check at start-up, or 0")
    if value == "1" and bundle_path() is None:
        raise BundleError(f"{SELF_CHECK}=1 and {BUNDLE} is not set: name the bundle to serve, or unset both")
    return value == "1"


def accepted_weights():
    """What weights the environment accepts. Raises BundleError for a value that says none."""
    value = os.environ.get(WEIGHTS, weights.SAME)
    weights.require_choice(value, WEIGHTS)
    return value


def sink_bytes():
    """Host memory for sinks of shared prefixes that the environment allows; None: it says nothing. Raises BundleError
    if it names none."""
    value = os.environ.get(SINK_BYTES)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) == 0:
        raise BundleError(f"{SINK_BYTES} is {value!r}; it is a number of bytes, by default {DEFAULT_SINK_BYTES}. "
                          "Nothing is kept with --no-enable-prefix-caching")
    return int(value)


def canonical_chunks():
    """Tokens of a canonical chunk that the environment asks for; 0: chunks are vLLM's. Raises BundleError if it names
    no such number."""
    value = os.environ.get(CHUNKS, "0")
    if not value.isascii() or not value.isdigit() or int(value) % PAGE_TOKENS:
        raise BundleError(f"{CHUNKS} is {value!r}; it is a number of tokens, a multiple of {PAGE_TOKENS} such as 2048, "
                          "or 0")
    return int(value)


def poisons():
    return os.environ.get(POISON) == "1"


class Entry(dict):
    """{"bundle": path, "sha256": of its content, "weights": "same" or "any", "sink_bytes": sink_bytes(), "chunks":
    canonical_chunks()}. vLLM pickles it for the processes of an engine; where it is read, the hooks are in place from
    then on, before such a process makes its first object."""

    def __reduce__(self):
        return _restored, (dict(self),)


def _restored(values):
    from . import register

    register()
    return Entry(values)


def entry():
    """Of a configuration that is being made: what the environment names. Raises BundleError if that is
    nothing, or no sound bundle, and UnsupportedError for one that is not served here."""
    path = bundle_path()
    if path is None:
        raise BundleError(f"{BUNDLE} is not set: the INT2 backend needs a bundle of the model, "
                          "which oscar-calibrate makes")
    path = str(pathlib.Path(path).expanduser().absolute())
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"no bundle there, where {BUNDLE} says", path)
    return Entry(bundle=path, sha256=_load(path, _stamp(path)).content_sha256, weights=accepted_weights(),
                 sink_bytes=sink_bytes(), chunks=canonical_chunks())


def serves_int2(config: VllmConfig):
    """Whether the engine of this VllmConfig runs over INT2 pages."""
    return isinstance(config.additional_config, dict) and ENTRY in config.additional_config


def bundle(config: VllmConfig):
    """The bundle that the engine of this VllmConfig serves. Raises BundleError if it serves none, or
    if the file has changed since its configuration was made."""
    if not serves_int2(config):
        raise BundleError(f"an engine with the backend CUSTOM serves no bundle: set {BUNDLE} before its "
                          "arguments are read")
    chosen = config.additional_config[ENTRY]
    found = _load(chosen["bundle"], _stamp(chosen["bundle"]))
    if found.content_sha256 != chosen["sha256"]:
        raise BundleError(f"{found.path} has changed since this engine was configured: its content is "
                          f"{found.content_sha256[:16]} now and was {chosen['sha256'][:16]}; start again")
    return found


def weights_of(config: VllmConfig):
    """What weights the engine of this VllmConfig accepts: weights.SAME or weights.ANY."""
    return config.additional_config[ENTRY]["weights"]


def _stamp(path):
    """Differs once a file was replaced."""
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


@functools.lru_cache(maxsize=2)
def _load(path, stamp):
    found = load(path)
    layers.check_served(found)
    if found.quantizer.sink_tokens % PAGE_TOKENS:
        raise UnsupportedError(
            f"{path} keeps {found.quantizer.sink_tokens} first tokens exact; in vLLM, whose blocks "
            f"stand for them, that must be a multiple of {PAGE_TOKENS}")
    return found


def cache_format(config: VllmConfig):
    """That of the engine of this VllmConfig."""
    return bundle(config).quantizer.served()


# Of the bundle that is served, in logs and metrics.
FACTS = ("bundle", "model", "sha256", "serving_sha256", "bits", "sink_tokens", "recent_tokens")


def facts(config: VllmConfig):
    """{fact: text}"""
    found = bundle(config)
    quantizer = found.quantizer
    return dict(zip(FACTS, map(str, (
        pathlib.Path(found.path).name, found.model.name, found.content_sha256[:16],
        found.serving_sha256[:16], 2, quantizer.sink_tokens, quantizer.recent_tokens))))


def announce(config: VllmConfig):
    """Puts the bundle among what vLLM's own metrics say of the cache (vllm:cache_config_info), and warns of
    positions that it was not fitted for. Once an engine."""
    said = facts(config)
    setattr(config.cache_config, "oscar_int2_bundle", f"{said['bundle']} {said['sha256']}")
    if chunk_tokens(config):
        logger.info("OSCAR INT2: prompts are read in canonical chunks of %d tokens", chunk_tokens(config))
    beyond = bundle(config).beyond_positions(config.model_config.max_model_len)
    if beyond:
        logger.warning("OSCAR INT2: %s", beyond)
    if config.lora_config:
        logger.warning("OSCAR INT2: LoRA adapters are other weights than the bundle's, and are not compared: what they "
                       "cost has not been measured")


def bytes_of_sink(bundle: Bundle, ranks=1):
    """Bytes of the exact first tokens of a request, in all layers of 2-bit rows: bf16 keys and values. Of more ranks
    of tensor parallelism than KV heads each has a copy of one."""
    row = sum(4 * max(layer.num_kv_heads, ranks) * layer.head_dim
              for layer in filter(layers.is_int2, bundle.layers.values()))
    return row * bundle.quantizer.sink_tokens


def sink_size(config: VllmConfig):
    """bytes_of_sink of an engine, over all its ranks."""
    return bytes_of_sink(bundle(config), config.parallel_config.tensor_parallel_size)


def kept_sinks(config: VllmConfig):
    """Shared prefixes whose sinks are kept at most; 0: prefix caching is off."""
    size = sink_size(config) if config.cache_config.enable_prefix_caching else 0
    return sink_room(config) // size if size else 0


def sink_room(config: VllmConfig):
    """Bytes of host memory for sinks. Where pages are offloaded there is more to find, and so by itself more room."""
    default = max(DEFAULT_SINK_BYTES, offloading.host_bytes(config) // offloading.SINK_SHARE)
    return config.additional_config[ENTRY]["sink_bytes"] or default


def chunk_tokens(config: VllmConfig):
    """Tokens of a canonical chunk (chunks.py); 0: chunks are vLLM's."""
    return config.additional_config[ENTRY]["chunks"]


def check_chunks(config: VllmConfig):
    """Raises UnsupportedError unless the scheduler of this VllmConfig has room for canonical chunks, where they are
    asked for."""
    chunk, scheduler = chunk_tokens(config), config.scheduler_config
    if not chunk:
        return
    format = cache_format(config)
    most = chunks.longest(chunk, format.recent_tokens)
    needed = most + scheduler.max_num_seqs * (1 + drafts(config))
    room = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens  # vLLM lowers it for draft models
    for what, found, instead in (
            ("with linear attention", config.model_config.is_hybrid, "unset it"),
            ("without chunked prefill", not scheduler.enable_chunked_prefill, "--enable-chunked-prefill"),
            (f"beside --long-prefill-token-threshold {scheduler.long_prefill_token_threshold}",
             0 < scheduler.long_prefill_token_threshold < most, "leave it out"),
            (f"with {format.sink_tokens} first tokens kept exactly", chunk < format.sink_tokens,
             f"{format.sink_tokens} or more"),
            (f"in steps of {room} tokens (--max-num-batched-tokens)", room < needed,
             f"they must have room for {needed}: a chunk of {most}, and a step of {scheduler.max_num_seqs} requests")):
        if found:
            raise UnsupportedError(f"the INT2 cache does not serve {CHUNKS}={chunk} {what} in vLLM; {instead}")


def drafts(config: VllmConfig):
    """Most drafts of a request in a step; 0: there are none."""
    return config.num_speculative_tokens


def defaults(args: EngineArgs, chosen: Entry) -> dict[str, Any]:
    """{name: value} of what the user of these EngineArgs left open, over the bundle of entry(); what contradicts is
    refused later. Prefix caching is left to vLLM, where the bundle can serve it."""
    ours: dict[str, Any] = {name: value for name, given, value in (
        ("block_size", args.block_size, PAGE_TOKENS),
        ("max_num_seqs", args.max_num_seqs, DEFAULT_MAX_NUM_SEQS)) if given is None}
    found = _load(chosen["bundle"], _stamp(chosen["bundle"]))
    shared = args.enable_prefix_caching  # also where it is open: vLLM writes its choice into the arguments
    if shared is None and not found.quantizer.sink_tokens:
        logger.warning("OSCAR INT2: prefix caching is off, since %s keeps no first tokens exact", found.path)
        shared = False
    if getattr(args, RETENTION, None) == 0:
        ours[RETENTION] = None
    return ours | {"enable_prefix_caching": shared}


def check_streamed(config: VllmConfig):
    """Raises UnsupportedError unless an engine of this VllmConfig can go on with a request whose input comes in parts.
    vLLM drops the last token of an answer then, and perhaps those of a step that is under way."""
    for what, found in (
            ("in this version of vLLM (it does in 0.33)", not versions.streams()),
            ("beside drafts", config.speculative_config), ("with linear attention", config.model_config.is_hybrid)):
        if found:
            raise UnsupportedError(f"the INT2 cache does not serve streamed input {what}; send a new request")


def check(config: VllmConfig):
    """Raises UnsupportedError or BundleMismatchError unless this VllmConfig can be served."""
    from vllm import envs

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    attention, images = config.attention_config, model.multimodal_config
    method = getattr(config.speculative_config, "method", None)
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    mixed = model.is_hybrid or layers.has_others(bundle(config))
    others = "a model with windows or linear attention"
    backend = getattr(attention.backend, "name", None)
    refused = (
        (f"--attention-backend {backend}", backend not in (None, "CUSTOM"), "leave it out"),
        ("prefix caching without exact first tokens",
         cache.enable_prefix_caching and not cache_format(config).sink_tokens, "--no-enable-prefix-caching"),
        (f"prefix caching with {SINK_BYTES}={sink_room(config)}",
         cache.enable_prefix_caching and not kept_sinks(config),
         f"the exact first tokens of one prefix take {sink_size(config)} bytes"),
        (f"--block-size {cache.block_size}", cache.block_size != PAGE_TOKENS,
         f"--block-size {PAGE_TOKENS}"),
        (f"--kv-cache-dtype {cache.cache_dtype}", cache.cache_dtype not in ("auto", "bfloat16"),
         "leave it out: the bundle says how the cache is written"),
        (f"--dtype {model.dtype}", str(model.dtype) != "torch.bfloat16", "--dtype bfloat16"),
        ("--kv-cache-dtype-skip-layers", getattr(cache, "kv_cache_dtype_skip_layers", None),
         "the bundle says which layers are quantized"),
        ("--model-impl transformers", model.model_impl == "transformers", "leave it out: vLLM's own model is served"),
        (f"{model.architectures[0]}: this vLLM has no model of its own for it, and runs that of transformers",
         model.using_transformers_backend(), "use oscar_int2.transformers"),
        (f"drafts by {method}", method not in (None, *DRAFTERS), f"of these: {', '.join(DRAFTERS)}"),
        ("LoRA adapters, which are other weights than the bundle was calibrated on",
         config.lora_config and weights_of(config) != weights.ANY, f"{WEIGHTS}=any serves them"),
        ("drafts whose number the device decides (adaptive verification)",
         getattr(config.speculative_config, "enable_adaptive_verification", False), "leave it out"),
        ("VLLM_BATCH_INVARIANT=1", envs.VLLM_BATCH_INVARIANT, "answers depend on the chunks of their prompts"),
        ("--scheduler-cls", config.scheduler_config.scheduler_cls, "leave it out: vLLM's own scheduler tells of sinks"),
        (f"--worker-cls {parallel.worker_cls}",
         parallel.worker_cls != "auto" and not parallel.worker_cls.startswith("vllm.v1.worker."),
         "leave it out: another worker may lay out the cache otherwise; --worker-extension-cls only adds methods"),
        ("elastic expert parallelism", parallel.enable_elastic_ep, ""),
        ("fault tolerance", getattr(parallel, "enable_fault_tolerance", False), "a step that failed keeps no sink"),
        ("context parallelism", max(parallel.decode_context_parallel_size,
                                    parallel.prefill_context_parallel_size) > 1, ""),
        ("micro-batches", parallel.use_ubatching, ""),
        *offloading.refused(config, mixed),
        ("fast prefill over shared KV", cache.kv_sharing_fast_prefill, ""),
        ("sleep mode", model.enable_sleep_mode or getattr(model, "enable_cumem_allocator", False), ""),
        ("pooling", model.runner_type != "generate", ""),
        ("an encoder-decoder model", model.is_encoder_decoder, ""),
        (f"--prefix-match-unit with {others}", mixed and getattr(cache, "prefix_match_unit", None),
         "leave it out: blocks are shared whole"),
        ("--mamba-cache-mode all", getattr(cache, "mamba_cache_mode", None) == "all", "--mamba-cache-mode align"),
        ("prefix caching of linear attention on several ranks", model.is_hybrid and cache.enable_prefix_caching
         and max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size) > 1, "--no-enable-prefix-caching"),
        ("drafts for a model with linear attention", model.is_hybrid and method, "leave them out"),
        (f"drafts by {method} for a model with windows", mixed and method not in (None, "ngram"),
         "ngram: blocks of a drafter's own layers would take the room of 2-bit rows"),
        ("drafts by a model with windows or linear attention", method not in (None, "ngram") and drafter is not None
         and layers.sees_less(drafter.hf_text_config), "one whose layers all see all tokens"),
        (f"--disable-hybrid-kv-cache-manager with {others}",
         mixed and config.scheduler_config.disable_hybrid_kv_cache_manager, "leave it out"),
        ("layers with a window that have none in the bundle",
         (layers.sees_less(model.hf_text_config) or cache.sliding_window) and not mixed
         and (getattr(model.hf_text_config, "sliding_window", None) or 0) < model.max_model_len,
         "calibrate the model as its config.json is now"),
        ("inputs other than text", images is not None and not images.language_model_only, "--language-model-only"),
        ("MLA", model.use_mla, ""),
        ("attention that is not causal",
         attention.use_non_causal or getattr(model.hf_text_config, "is_causal", True) is False, ""),
        ("dual chunk attention", getattr(model.hf_text_config, "dual_chunk_attention_config", None),
         "leave dual_chunk_attention_config out of config.json"),
        ("backends by kind of layer", attention.backend_per_kind, ""))
    for what, found, instead in refused:
        if found:
            raise UnsupportedError(f"the INT2 cache does not serve {what} in vLLM"
                                   f"{f'; {instead}' if instead else ''}")
    check_chunks(config)
    bundle(config).check_model(model.hf_text_config)


def check_files(config: VllmConfig):
    """Raises UnsupportedError where the files of the model, if they are there, are not those that vLLM would load, or not
    whole."""
    model = config.model_config
    if config.load_config.load_format not in ("auto", "hf", "safetensors"):
        return
    tied = any(getattr(part, "tie_word_embeddings", True) for part in (model.hf_config, model.hf_text_config))
    problem = weight_files.problem_of_files(model.model, model.revision, tied)
    if problem:
        raise UnsupportedError(f"vLLM would not load the weights that were calibrated: {problem}")
