"""Answers of vLLM's offline engine over one kind of KV cache."""
import datetime
import json
import logging
import os
import pathlib
import time

from . import files

SCHEMA = "oscar-tasks-answers-1"
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}  # what the model's makers recommend, without its penalty

# Engine options of each cache. The two of a bundle have it in VLLM_OSCAR_BUNDLE.
CACHES = {
    "bf16": {"kv_cache_dtype": "auto"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8-scaled": {"kv_cache_dtype": "fp8"},
    "fp8-per-token-head": {"kv_cache_dtype": "fp8_per_token_head"},
    "int4-per-token-head": {"kv_cache_dtype": "int4_per_token_head"},
    "turboquant-k8v4": {"kv_cache_dtype": "turboquant_k8v4"},
    "turboquant-4": {"kv_cache_dtype": "turboquant_4bit_nc"},
    "turboquant-3": {"kv_cache_dtype": "turboquant_3bit_nc"},
    "int2": {},
    "paper": {},
}
OVER_BUNDLES = ("int2", "paper")


class Failed(Exception):
    pass


class _Lines(logging.Handler):
    """What the plugin logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if "OSCAR INT2" in record.getMessage():
            self.lines.append(record.getMessage())


def _has_scales(model: pathlib.Path) -> bool:
    """Whether a folder is a checkpoint whose configuration has a scheme for the KV cache."""
    quantization = json.loads((model / "config.json").read_text()).get("quantization_config") or {}
    return bool(quantization.get("kv_cache_scheme"))


def start(model: pathlib.Path, cache: str, bundle, options: dict, sampled) -> tuple:
    """(vLLM's LLM, what the record says about it). In this process, so that the plugin's log is seen."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sampled is not None:  # the first runner draws for one seed after another
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.pop("VLLM_OSCAR_BUNDLE", None)
    options, record = CACHES[cache] | options, {}
    if cache in OVER_BUNDLES:
        os.environ["VLLM_OSCAR_BUNDLE"] = str(bundle)
    if cache == "fp8-scaled":
        record["scales"] = "of the checkpoint" if _has_scales(model) else "calculate_kv_scales: from the first step"
        if not _has_scales(model):
            options = options | {"calculate_kv_scales": True}
    import vllm

    seen = _Lines()
    loggers = [logging.getLogger(name) for name in ("vllm", "oscar_int2")]
    for logger in loggers:
        logger.addHandler(seen)
    llm = vllm.LLM(str(model), dtype="bfloat16", seed=0, enable_prefix_caching=False, **options)
    for logger in loggers:
        if seen not in logger.handlers:  # vLLM may set its loggers up anew
            logger.addHandler(seen)
    config = llm.llm_engine.vllm_config
    record |= {"vllm": vllm.__version__, "device": _device(), "options": {key: str(value) for key, value in options.items()},
               "runner": 2 if config.use_v2_model_runner else 1,
               "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
               "proof": [line.replace(str(bundle), pathlib.Path(str(bundle)).name) for line in seen.lines]}
    if cache in ("fp8", "fp8-scaled"):
        served = _served_scales(llm)
        record["served_scales"] = {side: [min(values), max(values)] for side, values in zip("kv", zip(*served))}
        if _has_scales(model) and any(scale == (1.0, 1.0) for scale in served):
            raise Failed(f"--cache {cache}: the running model has scales of 1, the folder has others")
    proofs = [line for line in seen.lines if "OSCAR INT2 is on" in line]
    if bool(proofs) != (cache in OVER_BUNDLES):
        raise Failed(f"--cache {cache}: the log {'has' if proofs else 'lacks'} the line 'OSCAR INT2 is on'\n  hint: docs/vllm.md says how "
                     "the plugin is found")
    return llm, record


def _served_scales(llm) -> list:
    """(k, v) of every attention layer of the running model."""
    def scales(model):
        return [(module._k_scale_float, module._v_scale_float) for module in model.modules() if hasattr(module, "_k_scale_float")]

    (found,) = llm.apply_model(scales)
    return found


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU, {len(os.sched_getaffinity(0))} cores"


def chosen(prompts: list, share: float, only, part: str) -> list:
    """The first `share` of all prompts, of them the tasks in `only`, of them part I of N ("I/N", from 1)."""
    prompts = prompts[:max(1, round(share * len(prompts)))]
    prompts = [prompt for prompt in prompts if not only or prompt["task"] in only]
    number, of = (int(word) for word in part.split("/"))
    return prompts[number - 1::of]


def token_ids(tokenizer, prompts: list) -> list:
    texts = [tokenizer.apply_chat_template(prompt["messages"], tools=prompt.get("tools"), add_generation_prompt=True, tokenize=False)
             for prompt in prompts]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def run(engine, prompts: list, ids: list, parameters_of, ends: float, said=lambda words: None):
    """Yields the answers that the engine finishes by `ends` (of time.monotonic()), batched as it likes.
    The longest answers are asked for first: alone at the end they would leave the machine idle."""
    begin = told = time.monotonic()
    count = 0
    order = sorted(range(len(prompts)), key=lambda i: -prompts[i]["max_tokens"] if prompts[i]["max_tokens"] > 4096 else 0)
    for i in order:
        engine.add_request(str(i), {"prompt_token_ids": ids[i]}, parameters_of(prompts[i]))
    while engine.has_unfinished_requests() and time.monotonic() < ends:
        for output in engine.step():
            if output.finished:
                prompt, (given, *_) = prompts[int(output.request_id)], output.outputs
                count += 1
                yield {"id": prompt["id"], "text": given.text, "tokens": len(given.token_ids), "finish": given.finish_reason,
                       "seconds": round(time.monotonic() - begin, 2)}
        if time.monotonic() > told + 30:
            told = time.monotonic()
            said(f"{count} of {len(prompts)} answers after {told - begin:.0f} s")


def answer(prompts_file: pathlib.Path, model: pathlib.Path, out: pathlib.Path, cache: str, bundle, sampled, options: dict, selection: tuple,
           within: float, limit, said) -> pathlib.Path:
    """Writes the record and behind it an answer a line; returns the file."""
    begin, (share, only, part) = time.monotonic(), selection
    prompts = chosen(files.read_lines(prompts_file), *selection)
    record = {"schema": SCHEMA, "cache": cache, "sampled": sampled, "sampling": GREEDY if sampled is None else SAMPLED, "share": share,
              "only": only, "part": part, "limit": limit, "prompts_sha256": files.sha256_of_lines(prompts_file), "model": model.name,
              "bundle": bundle.name if bundle else None,
              "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    llm, facts = start(model, cache, bundle, options, sampled)
    record |= facts
    from vllm import SamplingParams

    longest = llm.llm_engine.vllm_config.model_config.max_model_len
    tokenizer = llm.get_tokenizer()
    every = token_ids(tokenizer, prompts)
    kept = [i for i, ids in enumerate(every) if len(ids) + min(prompts[i]["max_tokens"], limit or 1 << 30) <= longest]
    prompts, ids = [prompts[i] for i in kept], [every[i] for i in kept]

    def parameters_of(prompt):
        most = min(prompt["max_tokens"], limit) if limit else prompt["max_tokens"]
        if sampled is None:
            return SamplingParams(max_tokens=most, **GREEDY)
        return SamplingParams(max_tokens=most, seed=(prompt["seed"] + 7919 * sampled) % (1 << 31), **SAMPLED)

    loaded = time.monotonic()
    said(f"{cache}: {record['kv_tokens']:,} tokens fit into the cache; {len(prompts)} prompts of {sum(map(len, ids)):,} tokens")
    answers = []
    try:
        for given in run(llm.llm_engine, prompts, ids, parameters_of, begin + within if within else float("inf"), said):
            answers.append(given)
    finally:  # also what there is when the engine fails
        record |= {"seconds_to_load": round(loaded - begin, 1), "seconds": round(time.monotonic() - loaded, 1), "asked": len(prompts),
                   "too_long": len(every) - len(kept), "answered": len(answers), "prompt_tokens": sum(map(len, ids)),
                   "answer_tokens": sum(given["tokens"] for given in answers)}
        target = out / name_of(cache, sampled, selection)
        order = {prompt["id"]: i for i, prompt in enumerate(prompts)}
        files.write_lines(target, [record, *sorted(answers, key=lambda given: order[given["id"]])])
        said(f"wrote {target}: {len(answers)} of {len(prompts)} answers, {record['answer_tokens']:,} tokens in {record['seconds']:.0f} s")
    return target


def name_of(cache: str, sampled, selection: tuple) -> str:
    """answers-CACHE[-SEED][-IofN][-TASKS].jsonl.gz"""
    _, only, part = selection
    words = [cache, *([str(sampled)] if sampled is not None else []), *([part.replace("/", "of")] if part != "1/1" else []), *(only or [])]
    return f"answers-{'-'.join(words)}.jsonl.gz"
