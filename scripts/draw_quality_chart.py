#!/usr/bin/env python3
"""Draws docs/quality.svg, the picture in README.md: KL of a real model to its BF16 cache, text by text.

All figures are those of the real model's study; nothing is measured here.
  scripts/draw_quality_chart.py [--out FILE]
"""
import argparse
import json
import pathlib
import sys
from html import escape

from studies import charts, vocabulary
from studies.figures import RunFigures, number

TOP = pathlib.Path(__file__).resolve().parent.parent
STUDY = TOP / "rotation_zoo" / "smollm2-135m-instruct" / "study" / "study.json"
OUT = TOP / "docs" / "quality.svg"

WIDTH, LEFT, RIGHT, TOP_EDGE, ROW = 760, 176, 724, 118, 42
# Runs of the study; words for each in two lines.
TEXTS = {"documentation": ("documentation", ""), "documentation, separators": ("documentation", "with separators"),
         "code": ("code", ""), "code, separators": ("code", "with separators"),
         "prose": ("prose", ""), "prose, separators": ("prose", "with separators"),
         "chat": ("chats of many turns", "")}
# Methods, of which each text shows the one that is closest to BF16; words; style.
SERIES = ((("hadamard-clip",), "Hadamard rotation + clipping", "plain"),
          (vocabulary.PUBLISHED, "OSCAR as published, the better of its two", "theirs"),
          (("default",), "this toolkit", "ours"))
# An opaque card: it reads the same whichever theme the page around it has.
STYLE = """
text { font: 14px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
text.title { font-size: 17px; font-weight: 600; } text.strong { font-weight: 600; }
text.small { font-size: 12.5px; fill: #59636e; } text.mid { text-anchor: middle; } text.end { text-anchor: end; }
.card { fill: #ffffff; stroke: #d1d9e0; } .grid { stroke: #e4e8ec; } .axis { stroke: #818b98; }
.floor { stroke: #818b98; stroke-dasharray: 2 4; } .mark { stroke: #ffffff; stroke-width: 1.5; }
.line { stroke-width: 2; fill: none; } .bf16 { fill: #1f2328; }
text.plain, .mark.plain { fill: #6e7781; } .line.plain { stroke: #6e7781; }
text.theirs, .mark.theirs { fill: #bc4c00; } .line.theirs { stroke: #bc4c00; }
text.ours, .mark.ours { fill: #1a7f37; } .line.ours { stroke: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } text.small { fill: #9198a1; } .card { fill: #0d1117; stroke: #3d444d; }
  .grid { stroke: #21262d; } .axis, .floor { stroke: #656c76; } .mark { stroke: #0d1117; } .bf16 { fill: #f0f6fc; }
  text.plain, .mark.plain { fill: #9198a1; } .line.plain { stroke: #9198a1; }
  text.theirs, .mark.theirs { fill: #f0883e; } .line.theirs { stroke: #f0883e; }
  text.ours, .mark.ours { fill: #3fb950; } .line.ours { stroke: #3fb950; }
}
"""


def text(x, y, words, *classes):
    return f'<text class="{" ".join(classes)}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(style, x1, y1, x2, y2):
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def shown(value):
    """With three digits that count, ".0122"."""
    return number(value).removeprefix("0")


def fewer_times(run, best):
    """How far below `best` the default is, where the floor allows a ratio."""
    ratio = run.ratio("default", best)
    return f", {1 / ratio[0]:.0f} times less than {shown(run.kl(best)[0])}" if ratio else ""


def draw(study):
    """The picture as text."""
    runs = {name: RunFigures(study["runs"][name]) for name in TEXTS}
    closest = {style: {name: run.best(methods) for name, run in runs.items()} for methods, _, style in SERIES}
    kl = {style: {name: run.kl(closest[style][name])[0] for name, run in runs.items()} for style in closest}
    scale = charts.Scale((0.004, 0.25), LEFT, RIGHT)
    bottom = TOP_EDGE + ROW * len(TEXTS)
    title = "How far a 2-bit KV cache moves a real model from its BF16 cache"
    body = [text(24, 33, title, "title"),
            text(24, 55, "SmolLM2-135M-Instruct in Q4_1, one H200: KL in nats per token, logarithmic; calibrated on "
                 "documentation", "small")]
    x = 24
    for _, words, style in SERIES:
        body += [f'<circle class="mark {style}" cx="{x + 6}" cy="80" r="5.5"/>',
                 text(x + 18, 85, words, style, *(("strong",) if style == "ours" else ()))]
        x += 44 + 7 * len(words)
    for tick in (.005, .01, .02, .05, .1, .2):
        at = scale.at(tick)
        body += [line("grid", at, TOP_EDGE - 8, at, bottom), text(at, bottom + 20, f"{tick:g}", "small", "mid")]
    body.append(line("axis", LEFT, bottom, RIGHT, bottom))
    for number, (column, (words, more)) in enumerate(TEXTS.items()):
        y = TOP_EDGE + ROW * (number + .5) - 4
        body.append(text(LEFT - 14, y + (-3 if more else 5), words, "end"))
        if more:
            body.append(text(LEFT - 14, y + 13, more, "small", "end"))
        ours, best = kl["ours"][column], min(("plain", "theirs"), key=lambda style: kl[style][column])
        body += [line("floor", scale.at(ours), y, scale.at(kl[best][column]), y),
                 *(f'<circle class="mark {style}" cx="{scale.at(kl[style][column]):.1f}" cy="{y:.1f}" r="5.5"/>'
                   for _, _, style in SERIES),
                 text(scale.at(ours) + 12, y - 7, shown(ours) + fewer_times(runs[column], closest[best][column]), "ours", "strong")]
    height = bottom + 34
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
            + "\n".join(body) + "\n</svg>\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="file to write (default: docs/quality.svg)")
    options = parser.parse_args(arguments)
    options.out.write_text(draw(json.loads(STUDY.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
