#!/usr/bin/env python3
"""Speculative decoding of a real model in vLLM's engine, over a 2-bit cache or vLLM's own BF16 and FP8 ones.

Each request reads code (files of Python's standard library) and writes its last file again with a function renamed:
an edit, in which text that was read predicts what is written. One line of CSV a point: tokens a second of all requests
together while every one decodes, and how many tokens a request gets in a step (1 without drafts, k + 1 at most).

    benchmarks/bench_drafts.py --kv int2 --model FOLDER --bundle X.h5 --method ngram --drafts 3
    benchmarks/bench_drafts.py --kv bf16 --model FOLDER --drafts 0         without drafts
    benchmarks/bench_drafts.py --kv bf16 --model FOLDER --method draft_model --draft-model SMALL --drafts 3

One kind of cache and one number of drafts a process.
"""
import argparse
import os
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from bench_vllm import max_num_seqs, parse_points, use_int2

COLUMNS = "kv,method,drafts,tokens in the cache,requests,context,tokens/s,tokens a step,ms a step"
WARM_TOKENS = 32
# An edited file has at least so many tokens more than an answer.
SPARE_TOKENS = 128


def arguments_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kv", choices=("int2", "bf16", "fp8"), required=True)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--bundle", help="its bundle, of --kv int2")
    parser.add_argument("--method", choices=("ngram", "draft_model"), default="ngram")
    parser.add_argument("--draft-model", help="of --method draft_model, a Hugging Face folder")
    parser.add_argument("--drafts", type=int, default=3, help="tokens proposed in a step; 0: none")
    parser.add_argument("--points", type=parse_points, default=[(1, 30720), (8, 30720)], help="REQUESTSxCONTEXT,...")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--pool-mib", type=int, help="bytes of blocks, in place of --memory")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    arguments = parser.parse_args(argv)
    if (arguments.kv == "int2") != bool(arguments.bundle):
        parser.error("--bundle is for --kv int2, which needs it")
    if arguments.drafts < 0 or arguments.answer <= 2 * WARM_TOKENS:
        parser.error(f"--drafts is 0 or more, --answer more than {2 * WARM_TOKENS}")
    if arguments.drafts and (arguments.method == "draft_model") != bool(arguments.draft_model):
        parser.error("--draft-model is for --method draft_model, which needs it")
    return arguments


def files_of_python():
    """[(name, text)] of the standard library's modules, by name."""
    folder = pathlib.Path(os.__file__).parent
    return [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in sorted(folder.glob("*.py"))]


def renamed(text):
    """A function of a file, defined in it, by its first definition; None where there is none."""
    found = re.search(r"^def ([a-z_]{4,})\(", text, re.M)
    return found and found[1]


def edits(files, count, context, answer, tokenizer):
    """Prompts of at most `context` token ids: files, and at the end one to be written again with a function renamed."""
    long_enough = [(name, text) for name, text in files
                   if renamed(text) and len(tokenizer(text)["input_ids"]) > answer + SPARE_TOKENS]
    targets = [pair for pair in long_enough if len(tokenizer(pair[1])["input_ids"]) < context // 2][:count]
    if len(targets) < count:
        raise ValueError(f"{count} edits need as many files of {answer + SPARE_TOKENS} to {context // 2} tokens, found {len(targets)}")
    prompts = []
    for i, (name, text) in enumerate(targets):
        function = renamed(text)
        last = (f"\n# file: {name}\n{text}\n\nWrite {name} again, whole, with the function {function} called "
                f"new_{function}. Change nothing else. Answer with the code alone.")
        before = "".join(f"# file: {other}\n{code}\n" for other, code in files[i:] + files[:i] if other != name)
        # The template around both is some 40 tokens.
        room = context - 64 - len(tokenizer(last)["input_ids"])
        head = tokenizer.decode(tokenizer(before[:16 * room])["input_ids"][:room])
        chat = tokenizer.apply_chat_template([{"role": "user", "content": head + last}], tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(chat)["input_ids"][:context])
    return prompts


def measured(engine, parameters, prompts, name, now=time.perf_counter):
    """(tokens a second, tokens of a request in a step, ms a step), from the moment that all decode to the first end."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, parameters)
    tokens, first, last, steps = {}, None, None, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished and not first:
                raise RuntimeError(f"{len(prompts)} requests of {len(prompts[0])} tokens do not decode side by side")
        if last:
            continue  # what is left runs to its end
        if first:
            steps += 1
            if max(tokens.values()) >= parameters.max_tokens:
                last = now(), sum(tokens.values())
        elif len(tokens) == len(prompts) and min(tokens.values()) >= WARM_TOKENS:
            first = now(), sum(tokens.values())
    seconds, gained = last[0] - first[0], last[1] - first[1]
    return gained / seconds, gained / steps / len(prompts), 1000 * seconds / steps


def main():
    arguments = arguments_of(sys.argv[1:])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = {"kv_cache_dtype": "fp8"} if arguments.kv == "fp8" else {}
    if arguments.kv == "int2":
        use_int2(arguments.model, arguments.bundle)
    else:
        os.environ.pop("VLLM_OSCAR_BUNDLE", None)
    if arguments.drafts:
        config = {"method": arguments.method, "num_speculative_tokens": arguments.drafts}
        if arguments.draft_model:
            config["model"] = arguments.draft_model
        else:
            config |= {"prompt_lookup_min": 3, "prompt_lookup_max": 5}
        options["speculative_config"] = config
    if arguments.pool_mib:
        options["kv_cache_memory_bytes"] = arguments.pool_mib << 20
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer, files = AutoTokenizer.from_pretrained(arguments.model), files_of_python()
    llm = LLM(arguments.model, dtype="bfloat16", skip_tokenizer_init=True, seed=0, enforce_eager=arguments.eager,
              gpu_memory_utilization=arguments.memory, enable_prefix_caching=False,
              max_model_len=-(-(max(context for _, context in arguments.points) + arguments.answer) // 64) * 64,
              max_num_seqs=max_num_seqs(max(requests for requests, _ in arguments.points)), **options)
    cache = llm.llm_engine.vllm_config.cache_config
    parameters = SamplingParams(temperature=0, max_tokens=arguments.answer, ignore_eos=True, detokenize=False)
    method = arguments.method if arguments.drafts else "none"
    print(COLUMNS, flush=True)
    for requests, context in arguments.points:
        prompts = edits(files, requests, context, arguments.answer, tokenizer)
        rate, taken, ms = measured(llm.llm_engine, parameters, prompts, f"{requests}x{context}")
        print(f"{arguments.kv},{method},{arguments.drafts},{cache.num_gpu_blocks * cache.block_size},{requests},{context},"
              f"{rate:.1f},{taken:.2f},{ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
