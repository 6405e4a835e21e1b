#!/usr/bin/env python3
"""Draws docs/bits.svg: KL of the embedded model to a BF16 cache against bits per cached value.

All figures are those of rotation_zoo/tiny-gqa/study/study.json; nothing is measured here.
  scripts/draw_bits_chart.py [--study FILE] [--out FILE]
"""
import argparse
import json
import pathlib
import sys
from html import escape

from draw_quality_chart import STYLE, TOP, line, text
from studies import charts, figures

STUDY = TOP / "rotation_zoo" / "tiny-gqa" / "study" / "study.json"
OUT = TOP / "docs" / "bits.svg"
CONTEXT = "131072"  # tokens of which bits per value are an average, windows included

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP_EDGE, BOTTOM = 76, WIDTH - 28, 84, HEIGHT - 58
LABEL_X = 264  # where the words of a series begin
# Runs by quantization group, from the fewest bits on.
GROUPS = ("main", "group 64", "group 32")
# Name in the study, words, style, and where the words are over the last point, in pixels.
SERIES = (("identity", "plain INT2, no rotation", "plain", 4),
          ("hadamard-clip", "Hadamard rotation + clipping", "plain", -8),
          ("perhead", "OSCAR as published", "theirs", 14),
          ("default", "this toolkit", "ours", 5))


def points_of(study, name):
    """(bits per value, KL) by quantization group."""
    points = []
    for group in GROUPS:
        run = figures.RunFigures(study["runs"][group])
        if run.has(name):
            points.append((run.methods[name]["bpe"][CONTEXT], run.kl(name)[0]))
    return points


def axes(bits, kl):
    body = []
    for tick in kl.ticks():
        y = kl.at(tick)
        body += [line("grid", LEFT, y, RIGHT, y), text(LEFT - 10, y + 4.5, f"{tick:g}", "small", "end")]
    for tick in (2, 3, 4, 6, 8, 16):
        x = bits.at(tick)
        body += [line("axis", x, BOTTOM, x, BOTTOM + 5), text(x, BOTTOM + 20, f"{tick}", "small", "mid")]
    body += [line("axis", LEFT, BOTTOM, RIGHT, BOTTOM),
             text((LEFT + RIGHT) / 2, HEIGHT - 16, "bits per cached value at 128K tokens; the three points of a line: groups of 128, 64 and 32 values",
                  "small", "mid")]
    return body


def series(study, bits, kl):
    body = []
    for name, words, style, shift in SERIES:
        points = [(bits.at(b), kl.at(value)) for b, value in points_of(study, name)]
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            body.append(f'<polyline class="line {style}" points="{path}"/>')
        body += [f'<circle class="mark {style}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>' for x, y in points]
        first = figures.number(points_of(study, name)[0][1], 2)
        label = f"{words}: {first}"
        if name == "default":
            published = points_of(study, "perhead")[0][1]
            label += f", {published / points_of(study, name)[0][1]:.0f} times less KL at the same bits"
        body.append(text(LABEL_X if len(points) > 1 else points[0][0] + 14, points[-1][1] + shift, label,
                         style, "strong" if name == "default" else ""))
    return body


def reference(study, bits, kl):
    """BF16, the noise of comparing with it, and what the fewest bits save."""
    floor = kl.at(study["runs"]["main"]["kl_floor"])
    fewest = points_of(study, "default")[0]
    x, y = bits.at(fewest[0]), kl.at(fewest[1] / 2.2)
    end = bits.at(16)
    return [line("floor", LEFT, floor, RIGHT, floor),
            text(end - 16, floor - 10, "BF16 cache: 0 by definition", "end"),
            text(LEFT + 8, floor - 8, "noise of BF16 arithmetic", "small"),
            f'<circle class="mark bf16" cx="{end:.1f}" cy="{floor:.1f}" r="5.5"/>',
            f'<path class="line ours" d="M{end:.1f},{y:.1f} H{x + 1:.1f} m8,-5 l-8,5 l8,5"/>',
            text((x + end) / 2, y + 16, f"{16 / fewest[0]:.1f} times less cache memory", "mid", "ours")]


def draw(study):
    bits = charts.Scale((2, 16), LEFT, RIGHT)
    kl = charts.Scale((0.0002, 12), BOTTOM, TOP_EDGE)
    tokens = study["runs"]["main"]["tokens"]
    title = "How far a 2-bit KV cache moves the model from its BF16 cache"
    subtitle = (f"KL in nats per token, logarithmic, lower is closer; tiny-gqa, a synthetic model; "
                f"{tokens:,} held-out tokens, one H200")
    body = [f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            text(24, 33, title, "title"), text(24, 55, subtitle, "small"),
            *axes(bits, kl), *reference(study, bits, kl), *series(study, bits, kl)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--study", type=pathlib.Path, default=STUDY, help="figures (default: the zoo's)")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="file to write (default: docs/bits.svg)")
    options = parser.parse_args(arguments)
    options.out.write_text(draw(json.loads(options.study.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
