#!/usr/bin/env python3
"""Decode steps of vLLM's engine over a 2-bit cache, or over its own BF16 and FP8 caches.

Random weights in a shape of bench_serving.py, prompts of random token ids. One line of CSV a point:
the cache, the tokens that it holds, requests x context, ms a step over 128 decoded tokens a request,
tokens a second. One kind of cache a process, since vLLM gives memory back only when it ends.

    benchmarks/bench_vllm.py --kv int2 [--shape qwen3-8b] [--points 1x126000,8x32768,7x100000] [--tp 2]

Prompts come in chunks, as vLLM takes them: --step-tokens says how many tokens a step may have, and
--whole-prompts turns chunks off (INT2 only). --quick-prompts leaves attention out while prompts are read:
what is decoded behind them is noise either way, and 53 x 100000 tokens are read in minutes instead of a
quarter of an hour.
--prefix-caching reads the prompts of each point twice, and a last column has the seconds of the second time.
--layers N takes the first N layers of a shape, where the memory holds no more over every cache.
--no-multicast is for machines of several GPUs that must not use NVLink's multicast: no all-reduce fused with norms.
--model FOLDER --bundle X.h5 take a real model; without a GPU add --pool-mib.
"""
import argparse
import json
import os
import pathlib
import random
import sys
import tempfile
import time

BENCHES = str(pathlib.Path(__file__).resolve().parent)
sys.path.insert(0, BENCHES)
WARM_STEPS = 16
MAX_POSITIONS, ROPE_THETA = 131072, 10000.0
MOE_SHAPES = {  # hidden, intermediate of an expert, layers, query heads, KV heads, experts, experts of a token
    "qwen3-30b-a3b": (2048, 768, 48, 32, 4, 128, 8),
}


def parse_points(text):
    try:
        points = [tuple(int(n) for n in point.split("x")) for point in text.split(",")]
        if all(len(point) == 2 and min(point) > 0 for point in points):
            return points
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"points are REQUESTSxCONTEXT,..., for example 8x32768, not {text!r}")


def arguments_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv", choices=("int2", "bf16", "fp8"), required=True)
    parser.add_argument("--points", type=parse_points, default=[(1, 126000), (8, 32768), (7, 100000)])
    parser.add_argument("--shape", default="qwen3-8b", help="of bench_serving.py, or " + ", ".join(MOE_SHAPES))
    parser.add_argument("--layers", type=int, help="of the shape, in place of all")
    parser.add_argument("--model", help="a Hugging Face folder in place of a shape")
    parser.add_argument("--bundle", help="its bundle; without one, random transforms")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the heads (tensor parallelism)")
    parser.add_argument("--no-multicast", action="store_true", help="of --tp: all-reduce without NVLink's multicast")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--pool-mib", type=int, help="bytes of blocks, in place of --memory")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument("--step-tokens", type=int, help="max_num_batched_tokens, in place of vLLM's own")
    parser.add_argument("--whole-prompts", action="store_true", help="no chunks")
    parser.add_argument("--quick-prompts", action="store_true")
    parser.add_argument("--prefix-caching", action="store_true", help="prompts share what they begin alike with")
    arguments = parser.parse_args(argv)
    if arguments.tp < 1 or (arguments.layers is not None and arguments.layers < 1):
        parser.error("--tp and --layers are 1 or more")
    if arguments.model and arguments.layers:
        parser.error("--layers is for a shape")
    if arguments.kv != "int2" and arguments.whole_prompts:
        parser.error("--whole-prompts is for --kv int2")
    return arguments


def write_config(shape, layers=None):
    """A model folder without weights, which bench_serving.py's random bundle fits: always the same one,
    since vLLM keeps what it compiled by the model's path."""
    from bench_serving import HEAD_DIM, SHAPES, VOCAB
    config = {"head_dim": HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": MAX_POSITIONS,
              "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": ROPE_THETA, "attention_bias": False,
              "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    if shape in MOE_SHAPES:
        hidden, expert, all_layers, heads, kv_heads, experts, chosen = MOE_SHAPES[shape]
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 8 * expert,
                   "moe_intermediate_size": expert, "num_experts": experts, "num_experts_per_tok": chosen,
                   "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
    else:
        hidden, intermediate, all_layers, heads, kv_heads, tied = SHAPES[shape]
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": intermediate,
                   "tie_word_embeddings": tied}
    config |= {"hidden_size": hidden, "num_hidden_layers": layers or all_layers, "num_attention_heads": heads,
               "num_key_value_heads": kv_heads}
    folder = pathlib.Path(tempfile.gettempdir(), f"oscar-bench-{shape}-{layers or all_layers}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def use_int2(model, bundle=None):
    """The plugin in this process, and in those that it starts, with the bundle that was named or a random one."""
    # Without a bundle a file that is there; nothing reads it.
    os.environ["VLLM_OSCAR_BUNDLE"] = bundle or str(pathlib.Path(model, "config.json"))
    os.environ["VLLM_OSCAR_WEIGHTS"] = "any"  # a shape's weights are random too
    if not bundle:
        os.environ["OSCAR_BENCH_MODEL"] = model
    import oscar_int2_vllm

    oscar_int2_vllm.register()
    import bench_worker  # noqa: F401: as each worker does


def max_num_seqs(requests):
    """vLLM's whole-step graphs have 1, 2, 4, 8, 16, 24, ... requests, max_num_seqs at most: 7
    requests with max_num_seqs=7 would run without one."""
    return requests if requests in (1, 2, 4) else -(-requests // 8) * 8


def tokens_to_decode(arguments, requests, context):
    """Of the request that is first: it goes on while the others' prompts are read, by vLLM's own choice
    in pieces of 8192 tokens and more."""
    free = max((arguments.step_tokens or 8192) - requests, 1)
    pieces = 1 if arguments.whole_prompts else -(-context // free)
    return WARM_STEPS + arguments.steps + 16 + requests * pieces


def measured(engine, parameters, requests, context, vocabulary, steps):
    """(ms a step, seconds until every prompt was read), of requests that decode together."""
    numbers = random.Random(context)
    names = [f"{requests}x{context}-{i}" for i in range(requests)]
    for name in names:
        prompt = numbers.choices(range(2, vocabulary), k=context)
        engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    tokens, begin, first, end = {}, time.perf_counter(), None, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and end is None:
                raise RuntimeError(f"{requests} requests of {context} tokens do not fit side by side")
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        fewest = min(tokens.values()) if len(tokens) == requests else 0
        if first is None and fewest >= WARM_STEPS:
            first = time.perf_counter(), fewest
        if end is None and first and fewest >= first[1] + steps:
            end = time.perf_counter(), fewest
            engine.abort_request(names)
    return 1000 * (end[0] - first[0]) / (end[1] - first[1]), first[0] - begin


def main():
    arguments = arguments_of(sys.argv[1:])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["PYTHONPATH"] = os.pathsep.join([BENCHES, *filter(None, [os.environ.get("PYTHONPATH")])])
    model = arguments.model or write_config(arguments.shape, arguments.layers)
    options = {"enable_prefix_caching": arguments.prefix_caching, "tensor_parallel_size": arguments.tp,
               "worker_extension_cls": "bench_worker.Worker"}
    if arguments.kv == "fp8":
        options["kv_cache_dtype"] = "fp8"
    if arguments.quick_prompts:
        os.environ["OSCAR_BENCH_QUICK_PROMPTS"] = arguments.kv
    if arguments.kv == "int2":
        use_int2(model, arguments.bundle)
    else:
        os.environ.pop("VLLM_OSCAR_BUNDLE", None)
    if arguments.pool_mib:
        options["kv_cache_memory_bytes"] = arguments.pool_mib << 20
    else:
        options["gpu_memory_utilization"] = arguments.memory
    if arguments.no_multicast:
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
                       "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_USE_NCCL_SYMM_MEM": "0"}
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if arguments.step_tokens:
        options["max_num_batched_tokens"] = arguments.step_tokens
    if arguments.whole_prompts:
        options["enable_chunked_prefill"] = False
    from vllm import LLM, SamplingParams

    most = [tokens_to_decode(arguments, *point) for point in arguments.points]
    llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, seed=0,
              load_format="auto" if arguments.model else "dummy", enforce_eager=arguments.eager,
              max_model_len=max(point[1] + n for point, n in zip(arguments.points, most))
              if arguments.model else MAX_POSITIONS,
              max_num_seqs=max_num_seqs(max(requests for requests, _ in arguments.points)), **options)
    config = llm.llm_engine.vllm_config
    held = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    print("kv,GPUs,layers,tokens of a step,tokens in the cache,requests,context,ms a step,tokens/s,seconds until all decode"
          + ",the second time" * arguments.prefix_caching, flush=True)
    for (requests, context), tokens in zip(arguments.points, most):
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        ms, *prompts = measured(llm.llm_engine, parameters, requests, context,
                                config.model_config.get_vocab_size(), arguments.steps)
        if arguments.quick_prompts and not all(llm.collective_rpc("prompts_left_out")):
            raise RuntimeError("--quick-prompts knows FlashAttention alone, and vLLM chose another backend")
        if arguments.prefix_caching:
            prompts += measured(llm.llm_engine, parameters, requests, context,
                                config.model_config.get_vocab_size(), arguments.steps)[1:]
        layers = config.model_config.hf_text_config.num_hidden_layers
        print(f"{arguments.kv},{arguments.tp},{layers},{config.scheduler_config.max_num_batched_tokens},{held},{requests},"
              f"{context},{ms:.3f},{1000 * requests / ms:.1f}," + ",".join(f"{s:.2f}" for s in prompts), flush=True)


if __name__ == "__main__":
    main()
