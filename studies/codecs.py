#!/usr/bin/env python3
"""What each bit of a KV cache buys: a bundle, its rows at other widths and other projects' codecs, text by text.

Calls oscar-eval, which must be built. Writes a report of each text (NAME.json, NAME.html) and README.md with all figures to
OUT. A text whose report is there already is not measured again, so that a study may be done in several calls.

  codecs.py MODEL BUNDLE OUT code=code.jsonl prose=prose.jsonl
  codecs.py MODEL BUNDLE OUT code=code.jsonl --within 540   begin no text after 540 s; call again to go on
"""
import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parent.parent
WIDTHS = ("8/8", "6/6", "4/4", "4/3", "4/2", "3/3", "3/2")
OWN = ("exact", "hadamard-clip", *(f"bundle@bits:{width}" for width in WIDTHS), "bundle")


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for oscar-eval")
    parser.add_argument("bundle", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE", help="held-out text or token ids")
    parser.add_argument("--bin", type=pathlib.Path, default=SOURCE / "build" / "bin", help="the programs (build/bin)")
    parser.add_argument("--tokens", type=int, help="of each text (all)")
    parser.add_argument("--sequence-length", type=int, help="tokens of a sequence (as oscar-eval)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--gpu-memory", help="as oscar-eval's")
    parser.add_argument("--within", type=float, default=0, metavar="SECONDS", help="begin no text after so many")
    arguments = parser.parse_args(words)
    arguments.texts = [text.partition("=")[::2] for text in arguments.texts]
    if any(not (name and file) for name, file in arguments.texts):
        parser.error("a text is NAME=FILE")
    return arguments


def rivals(arguments):
    """Names of other projects' codecs, as oscar-eval lists them."""
    said = subprocess.run([arguments.bin / "oscar-eval", "--help"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^  (\S+) +[\d.]+ / [\d.]+ ", said, re.MULTILINE)


def measure(arguments, name, file, methods):
    given = {"--max-tokens": arguments.tokens, "--sequence-length": arguments.sequence_length, "--gpu-memory": arguments.gpu_memory}
    options = [word for option, value in given.items() if value for word in (option, str(value))]
    subprocess.run([arguments.bin / "oscar-eval", arguments.model, "--bundle", arguments.bundle, "--corpus", file,
                    "--compare", ",".join(methods), "--separators", "off", "--device", arguments.device, *options,
                    "--json", arguments.out / f"{name}.json", "--html", arguments.out / f"{name}.html", "--quiet",
                    "--resume"], check=True)


def figure(value):
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}".lstrip("0")


def cells(method, length):
    kl, nll = method["kl"], method["nll_increase"]["mean"]
    increase = 100 * (math.exp(min(nll, 40)) - 1)
    return f"{method['bpe'][length]:.2f} | {figure(kl['mean'])} ±{figure(kl['se'] or 0)} | {increase:+.2f}% |"


def render(reports, names):
    """A table for each text: a codec as it is shipped beside the same in the windows of the run."""
    lines = ["# What each bit of a KV cache buys", "",
             "KL to BF16 in nats a token with its standard error, and perplexity over BF16's. Bits are those of the "
             "whole cache at the length of a sequence, exact windows and layers included.", ""]
    for name, report in reports.items():
        length = str(report["longest_sequence"])
        lines += [f"## {name}", f"`{report['command']}`", "",
                  f"{report['tokens']:,} tokens from position {report['first_position']} on, {report['device']}.", "",
                  "| codec | bits | KL | perplexity | bits, common windows | KL | perplexity |", "|---|---|---|---|---|---|---|"]
        methods = report["methods"]
        rows = [(n, methods[n], methods.get(f"{n}@common", methods[n])) for n in (*OWN, *names)]
        for n, shipped, common in sorted(rows, key=lambda row: row[1]["bpe"][length], reverse=True):
            label = f"**{n}**" if n == "bundle" else n
            lines.append(f"| {label} | {cells(shipped, length)} {cells(common, length)}")
        lines.append("")
    return "\n".join(lines)


def main(words):
    arguments = parse(words)
    start = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = rivals(arguments)
    methods = [*names, *(f"{name}@common" for name in names), *OWN]
    reports = {}
    for name, file in arguments.texts:
        report = arguments.out / f"{name}.json"
        if not report.exists() and arguments.within and time.monotonic() - start > arguments.within:
            print("not all is measured: call again", file=sys.stderr)
            break
        measure(arguments, name, file, methods)
        reports[name] = json.loads(report.read_text())
    (arguments.out / "README.md").write_text(render(reports, names), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
