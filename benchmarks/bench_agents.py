#!/usr/bin/env python3
"""Agents' traffic through vLLM's engine with prefix caching, over a 2-bit cache or vLLM's own BF16 and FP8 ones.

Every session sends a shared system prompt and a first message, and then in each turn all of that, the answer, and a
new message (a tool's output). A session sends its next turn when it has the last answer and has thought for --think
seconds. Sessions that do not fit side by side push each other's blocks out of the cache, and are then read anew.

    benchmarks/bench_agents.py --kv int2 [--shape qwen3-8b] [--sessions 80] [--turns 5]
    benchmarks/bench_agents.py --kv fp8 --model FOLDER
    benchmarks/bench_agents.py --kv int2 --model FOLDER --bundle X.h5

Weights and token ids are random; --model FOLDER takes a real model. Answers have --answer tokens, whatever they say.
--offload GIB gives blocks that leave the GPU room in host memory, over each cache (KV offloading), and the first column
says so: int2+64GiB. One line of CSV a turn, and one for all: hit rate (share of prompt tokens found), the share of them
that came from host memory, seconds to the first token and to the last one, median and worst, from the moment the turn
is sent. One kind of cache a process.
"""
import argparse
import collections
import os
import pathlib
import random
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
COLUMNS = ("kv,tokens in the cache,sessions,turn,prompt tokens,hit rate,from host memory,first token median s,"
           "first token worst s,turn median s,turn worst s,tokens/s")
# `cached` of the prompt's tokens were found, `host` of them in host memory.
Turn = collections.namedtuple("Turn", "number prompt cached sent first done host")


class Session:
    """One agent's conversation, as token ids. `turn` counts from 1."""

    def __init__(self, name: str, shared: list, numbers: random.Random, arguments, vocabulary: int):
        self.name, self.numbers, self.arguments, self.vocabulary = name, numbers, arguments, vocabulary
        self.tokens, self.turn = list(shared), 0

    def _random(self, count: int) -> list:
        return self.numbers.choices(range(2, self.vocabulary), k=count)

    def prompt(self) -> list:
        """The next turn's: everything so far, and a message of half to one and a half times the usual length."""
        usual = self.arguments.first if self.turn == 0 else self.arguments.message
        self.turn += 1
        self.tokens += self._random(round(usual * self.numbers.uniform(0.5, 1.5)))
        return list(self.tokens)

    def answered(self, tokens) -> None:
        self.tokens += tokens


def note_host_tokens(engine) -> dict:
    """Takes, by name of a request, how many tokens of its prompt came from host memory: no answer of vLLM's says it."""
    found, process = {}, engine.output_processor.process_outputs

    def noted(outputs, *args, **options):
        for output in outputs:
            if output.prefill_stats is not None:  # vLLM's own names end with one part more
                found[output.request_id.rsplit("-", 1)[0]] = output.prefill_stats.num_external_cached_tokens
        return process(outputs, *args, **options)

    engine.output_processor.process_outputs = noted
    return found


def run(engine, sessions: list, turns: int, think: float, parameters, now=time.perf_counter, host_tokens=None) -> list:
    """Every turn of every session, through an engine of vLLM (add_request, step, has_unfinished_requests). `host_tokens`:
    note_host_tokens()'s."""
    due = [(now(), session) for session in sessions]
    running, first, done = {}, {}, []
    while due or running:
        begin = now()
        for moment, session in [entry for entry in due if entry[0] <= begin]:
            prompt = session.prompt()
            name = f"{session.name}-{session.turn}"
            running[name] = session, len(prompt), moment
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        due = [entry for entry in due if entry[0] > begin]
        if not running:
            time.sleep(max(0, min(moment for moment, _ in due) - now()))
            continue
        for output in engine.step():
            tokens = output.outputs[0].token_ids
            if tokens:
                first.setdefault(output.request_id, now())
            if output.finished:
                session, length, sent = running.pop(output.request_id)
                if output.outputs[0].finish_reason != "length":
                    raise RuntimeError(f"{output.request_id} ended by {output.outputs[0].finish_reason!r}")
                host = (host_tokens or {}).get(output.request_id, 0)
                done.append(Turn(session.turn, length, output.num_cached_tokens or 0, sent, first.pop(output.request_id), now(), host))
                session.answered(tokens)
                if session.turn < turns:
                    due.append((now() + think, session))
    return done


def summary(turns: list, answer: int) -> str:
    """The columns of `turns` from "prompt tokens" on."""
    prompts, cached = sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns)
    first, whole = ([getattr(turn, moment) - turn.sent for turn in turns] for moment in ("first", "done"))
    seconds = max(turn.done for turn in turns) - min(turn.sent for turn in turns)
    host = sum(turn.host for turn in turns)
    return (f"{prompts},{cached / prompts:.3f},{host / max(cached, 1):.3f},"
            f"{statistics.median(first):.3f},{max(first):.3f},{statistics.median(whole):.3f},"
            f"{max(whole):.3f},{answer * len(turns) / seconds:.1f}")


def arguments_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kv", choices=("int2", "bf16", "fp8"), required=True)
    parser.add_argument("--shape", default="qwen3-8b", help="of bench_serving.py")
    parser.add_argument("--model", help="a Hugging Face folder in place of a shape")
    parser.add_argument("--bundle", help="its bundle; without one, random transforms")
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=4096, help="tokens of the system prompt that all share")
    parser.add_argument("--first", type=int, default=8192, help="tokens of a session's first message, on average")
    parser.add_argument("--message", type=int, default=1024, help="tokens of later messages, on average")
    parser.add_argument("--answer", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--think", type=float, default=0, help="seconds between an answer and the session's next turn")
    parser.add_argument("--seats", type=int, default=64, help="requests at a time (max_num_seqs)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--pool-mib", type=int, help="size of the cache; --memory then only has to be free")
    parser.add_argument("--offload", type=float, metavar="GIB", help="host memory for blocks that leave the GPU")
    parser.add_argument("--step-tokens", type=int, help="max_num_batched_tokens, in place of vLLM's own")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    arguments = parser.parse_args(argv)
    if min(arguments.sessions, arguments.turns, arguments.system, arguments.first, arguments.message, arguments.answer, arguments.seats) < 1:
        parser.error("sessions, turns, seats and tokens are at least 1")
    if arguments.offload is not None and arguments.offload <= 0:
        parser.error("--offload is more than 0")
    return arguments


def start(arguments):
    """(vLLM's LLM, tokens that its cache holds)."""
    from bench_vllm import use_int2, write_config

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = arguments.model or write_config(arguments.shape)
    options = {"kv_cache_dtype": "fp8"} if arguments.kv == "fp8" else {}
    if arguments.kv == "int2":
        use_int2(model, arguments.bundle)
    else:
        os.environ.pop("VLLM_OSCAR_BUNDLE", None)
    if arguments.pool_mib:
        options["kv_cache_memory_bytes"] = arguments.pool_mib << 20
    if arguments.offload:
        options["kv_offloading_size"] = arguments.offload
    if arguments.step_tokens:
        options["max_num_batched_tokens"] = arguments.step_tokens
    from vllm import LLM

    most = arguments.system + 1.5 * (arguments.first + arguments.turns * arguments.message) + arguments.turns * arguments.answer
    llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, seed=0, load_format="auto" if arguments.model else "dummy",
              enforce_eager=arguments.eager, gpu_memory_utilization=arguments.memory, max_model_len=-(-round(most) // 64) * 64,
              max_num_seqs=arguments.seats, enable_prefix_caching=True, **options)
    cache = llm.llm_engine.vllm_config.cache_config
    return llm, cache.num_gpu_blocks * cache.block_size


def main():
    arguments = arguments_of(sys.argv[1:])
    llm, held = start(arguments)
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    parameters = SamplingParams(temperature=0, max_tokens=arguments.answer, ignore_eos=True, detokenize=False)

    def sessions(kind, count):
        numbers = random.Random(f"{kind} {arguments.seed}")
        shared = numbers.choices(range(2, vocabulary), k=arguments.system)
        return [Session(f"{kind}{i}", shared, random.Random(f"{kind} {arguments.seed} {i}"), arguments, vocabulary) for i in range(count)]

    run(llm.llm_engine, sessions("warm", 4), 2, 0, parameters)
    llm.reset_prefix_cache(reset_connector=bool(arguments.offload))
    host_tokens = note_host_tokens(llm.llm_engine) if arguments.offload else None
    done = run(llm.llm_engine, sessions("agent", arguments.sessions), arguments.turns, arguments.think, parameters,
               host_tokens=host_tokens)
    kind = f"{arguments.kv}+{arguments.offload:g}GiB" if arguments.offload else arguments.kv
    print(COLUMNS)
    for number in [*range(1, arguments.turns + 1), "all"]:
        turns = [turn for turn in done if number in (turn.number, "all")]
        print(f"{kind},{held},{arguments.sessions},{number},{summary(turns, arguments.answer)}", flush=True)


if __name__ == "__main__":
    main()
