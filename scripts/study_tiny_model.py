#!/usr/bin/env python3
"""Measures every part of a 2-bit cache on the embedded model, and draws the figures as a page and as Markdown.

Calls the built programs: calibrates tiny-gqa and its twins with no and with harder outliers, fits a bundle for every
variant, and compares them on held-out text. Writes study.json (the figures), README.md and study.html to the output
folder. It takes minutes: on an H200 (with --jobs 4) for everything, on two CPU cores for --quick, from few tokens.

  study_tiny_model.py                     everything, on a GPU if there is one
  study_tiny_model.py --quick --out DIR   few tokens and points, for a CPU
  study_tiny_model.py --render-only       draw the figures of an earlier run again
"""
import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile

from tiny_study import content, markdown, measure, page, plan

SOURCE = pathlib.Path(__file__).resolve().parent.parent
PAGE = "study.html"


def parse(words) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=SOURCE / "build" / "bin", help="the programs (build/bin)")
    parser.add_argument("--out", type=pathlib.Path, default=SOURCE / "rotation_zoo" / "tiny-gqa" / "study",
                        help="folder to write (rotation_zoo/tiny-gqa/study)")
    parser.add_argument("--work", type=pathlib.Path, help="folder for bundles and checkpoints, kept (a temporary one)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="programs that run side by side (1)")
    parser.add_argument("--quick", action="store_true", help="few tokens and points")
    parser.add_argument("--sections", help=f"of {','.join(plan.SECTIONS)} (all)")
    parser.add_argument("--tokens", type=int, help="held-out tokens")
    parser.add_argument("--calibration-tokens", type=int, help="calibration tokens")
    parser.add_argument("--chunk-len", type=int, help="tokens per sequence")
    parser.add_argument("--render-only", action="store_true", help="draw the figures in OUT/study.json again")
    arguments = parser.parse_args(words)
    if arguments.sections and not set(arguments.sections.split(",")) <= set(plan.SECTIONS):
        parser.error(f"--sections: expected some of {','.join(plan.SECTIONS)}, found {arguments.sections}")
    return arguments


def scale_of(arguments: argparse.Namespace) -> plan.Scale:
    scale = plan.QUICK if arguments.quick else plan.Scale()
    given = {key: getattr(arguments, key) for key in ("tokens", "calibration_tokens", "chunk_len")}
    if arguments.sections:
        given["sections"] = tuple(arguments.sections.split(","))
    return dataclasses.replace(scale, **{key: value for key, value in given.items() if value})


def draw(document: dict, out: pathlib.Path) -> None:
    """README.md and the page of a study."""
    shown = content.content(document)
    (out / "README.md").write_text(markdown.render(shown, PAGE), encoding="utf-8")
    (out / PAGE).write_text(page.render(shown), encoding="utf-8")


def decisive(arguments: argparse.Namespace) -> str:
    """The options that decide the figures, as the page quotes them."""
    words = ["--quick"] if arguments.quick else []
    for key in ("sections", "tokens", "calibration_tokens", "chunk_len"):
        if getattr(arguments, key):
            words.append(f"--{key.replace('_', '-')} {getattr(arguments, key)}")
    return " ".join(words)


def main(words=None) -> int:
    arguments = parse(words)
    figures = arguments.out / "study.json"
    if arguments.render_only:
        document = json.loads(figures.read_text(encoding="utf-8"))
        if document.get("schema") != measure.SCHEMA:
            sys.exit(f"{figures}: expected {measure.SCHEMA}, found {document.get('schema')}")
        draw(document, arguments.out)
        return 0
    work = arguments.work or pathlib.Path(tempfile.mkdtemp(prefix="study-"))
    try:
        work.mkdir(parents=True, exist_ok=True)
        bench = measure.Bench(arguments.bin, SOURCE, work, arguments.device, arguments.jobs)
        document, failures = measure.measure(bench, scale_of(arguments))
    except measure.Failed as failure:
        sys.exit(f"study_tiny_model: {failure}")
    finally:
        if not arguments.work:
            shutil.rmtree(work, ignore_errors=True)
    if "runs" in document:
        document["arguments"] = decisive(arguments)
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = measure.dump(document) + "\n"
        temporary = figures.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, figures)
        draw(json.loads(text), arguments.out)
        print(f"wrote {figures}, README.md and {PAGE}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
