#!/usr/bin/env python3
"""Measures what each part of a 2-bit cache is worth on a model, and draws the figures as a page and as Markdown.

Calls the built programs: calibrates the model, fits a bundle for every variant, and compares them on held-out text. Writes
study.json (the figures), README.md and study.html to OUT. What has been made is kept in the work folder and is not made
again by another call, so that a study may be done in several calls, step by step.

  study.py tiny-gqa OUT           the embedded model
  study.py smollm2 OUT            a real model (python -m oscar_int2 fetch smollm2 corpora)
  study.py qwen2.5-coder-1.5b OUT another (python -m oscar_int2 fetch qwen2.5-coder-1.5b corpora)
  study.py MODEL OUT --quick      few tokens and points, for a CPU
  study.py MODEL OUT --within 540 begin nothing after 540 s; call again to go on
  study.py MODEL OUT --render-only  draw the figures of an earlier run again
"""
import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys

from study_parts import content, markdown, measure, page
from study_parts.plans import PLANS

SOURCE = pathlib.Path(__file__).resolve().parent.parent
PAGE = "study.html"


def parse(words) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=PLANS, help="whose study")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder to write")
    parser.add_argument("--bin", type=pathlib.Path, default=SOURCE / "build" / "bin", help="the programs (build/bin)")
    parser.add_argument("--work", type=pathlib.Path,
                        help="folder for bundles and reports, kept (build/study/MODEL, with --quick MODEL-quick)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, help="programs side by side (with a GPU one for each 4 CPU cores, 4 at most; else 1)")
    parser.add_argument("--within", type=float, default=0, metavar="SECONDS", help="begin no program after so many")
    parser.add_argument("--quick", action="store_true", help="few tokens and points")
    parser.add_argument("--steps", help="some of the study's steps, separated by commas (all): "
                        + "; ".join(f"{name}: {','.join(plan.steps)}" for name, plan in PLANS.items()))
    parser.add_argument("--tokens", type=int, help="held-out tokens of a run")
    parser.add_argument("--calibration-tokens", type=int, help="calibration tokens")
    parser.add_argument("--sequence-length", type=int, help="tokens per sequence")
    parser.add_argument("--render-only", action="store_true", help="draw the figures in OUT/study.json again")
    arguments = parser.parse_args(words)
    steps = PLANS[arguments.model].steps
    if arguments.steps and not set(arguments.steps.split(",")) <= set(steps):
        parser.error(f"--steps: expected some of {','.join(steps)}, found {arguments.steps}")
    return arguments


def size_of(arguments: argparse.Namespace):
    """How much is measured."""
    plan = PLANS[arguments.model]
    size = plan.quick if arguments.quick else plan.size
    given = {key: getattr(arguments, key) for key in ("tokens", "calibration_tokens", "sequence_length")}
    if arguments.tokens and size.headline_tokens:
        given["headline_tokens"] = arguments.tokens
    return dataclasses.replace(size, **{key: value for key, value in given.items() if value})


def has_gpu(arguments: argparse.Namespace) -> bool:
    return arguments.device != "cpu" and shutil.which("nvidia-smi") is not None


def jobs_of(arguments: argparse.Namespace) -> int:
    return arguments.jobs or (max(1, min(4, (os.cpu_count() or 1) // 4)) if has_gpu(arguments) else 1)


def draw(document: dict, out: pathlib.Path) -> None:
    """README.md and the page of a study."""
    shown = content.content(document)
    (out / "README.md").write_text(markdown.render(shown, PAGE), encoding="utf-8")
    (out / PAGE).write_text(page.render(shown), encoding="utf-8")


def decisive(arguments: argparse.Namespace) -> str:
    """The options that decide the figures, as the page quotes them."""
    words = ["--quick"] if arguments.quick else []
    for key in ("steps", "tokens", "calibration_tokens", "sequence_length"):
        if getattr(arguments, key):
            words.append(f"--{key.replace('_', '-')} {getattr(arguments, key)}")
    return " ".join(words)


def write(document: dict, figures: pathlib.Path) -> None:
    figures.parent.mkdir(parents=True, exist_ok=True)
    temporary = figures.with_suffix(".tmp")
    temporary.write_text(measure.dump(document) + "\n", encoding="utf-8")
    os.replace(temporary, figures)


def read(figures: pathlib.Path) -> dict:
    document = json.loads(figures.read_text(encoding="utf-8"))
    if document.get("schema") != measure.SCHEMA:
        sys.exit(f"{figures}: expected {measure.SCHEMA}, found {document.get('schema')}")
    return document


def main(words=None) -> int:
    arguments = parse(words)
    figures = arguments.out / "study.json"
    if arguments.render_only:
        draw(read(figures), arguments.out)
        return 0
    plan = PLANS[arguments.model]
    work = arguments.work or SOURCE / "build" / "study" / f"{plan.name}{'-quick' if arguments.quick else ''}"
    size = size_of(arguments)
    runs = plan.runs(size, arguments.steps and arguments.steps.split(","))
    try:
        bench = measure.Bench(arguments.bin.resolve(), SOURCE, work.resolve(), arguments.device, jobs_of(arguments),
                              has_gpu(arguments), arguments.within)
        study = measure.Study(bench, plan, size)
        work.mkdir(parents=True, exist_ok=True)
        outcome = measure.measure(study, runs, lambda document: write(document, figures), decisive(arguments))
    except measure.Failed as failure:
        sys.exit(f"study: {failure}")
    if outcome.document["runs"]:
        write(outcome.document, figures)
        draw(read(figures), arguments.out)
        print(f"wrote {figures}, README.md and {PAGE}")
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    if outcome.left:
        print(f"no time was left for {', '.join(outcome.left)}: call again with the same --work", file=sys.stderr)
    return 1 if outcome.failures or outcome.left else 0


if __name__ == "__main__":
    sys.exit(main())
