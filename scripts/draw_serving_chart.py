#!/usr/bin/env python3
"""Draws docs/serving.svg: ms of a decode step over the 2-bit cache and over BF16.

All figures are those of python/results/h200_serving.csv; nothing is measured here.
  scripts/draw_serving_chart.py [--out FILE]
"""
import argparse
import csv
import pathlib
import sys

from draw_quality_chart import STYLE, TOP, line, text

FIGURES, OUT = TOP / "python" / "results" / "h200_serving.csv", TOP / "docs" / "serving.svg"
SHAPE = "qwen3-8b"
POINTS = (("1x32K", "1 request of 32K"), ("1x128K", "1 of 128K"), ("8x32K", "8 of 32K"),
          ("8x100K", "8 of 100K"))
# Cache, words, style.
BARS = (("int2", "this toolkit, 2 bits", "ours"), ("bf16", "BF16, cuDNN", "plain"),
        ("bf16-triton", "BF16, Triton", "theirs"))
WIDTH, LEFT, RIGHT, TOP_EDGE, BAR, GAP = 760, 150, 690, 92, 17, 18


def figures():
    """{(point, cache): ms}"""
    with open(FIGURES, encoding="utf-8") as file:
        return {(row["point"], row["cache"]): float(row["ms"]) for row in csv.DictReader(file)
                if row["shape"] == SHAPE}


def draw():
    """The picture as text."""
    ms = figures()
    most = max(ms[point, cache] for point, _ in POINTS for cache, _, _ in BARS)
    height = TOP_EDGE + len(POINTS) * (len(BARS) * BAR + GAP) + 6
    scale = (RIGHT - LEFT) / most
    style = STYLE + "".join(
        f".bar.{name} {{ fill: {light}; }} " for name, light in
        (("ours", "#1a7f37"), ("plain", "#818b98"), ("theirs", "#d97b45")))
    body = [text(24, 34, "A decode step of a whole model, in ms", "title"),
            text(24, 56, "Qwen3-8B's shape, one NVIDIA H200; the same loop, nothing differs but the cache", "small")]
    x = LEFT
    for _, words, name in BARS:
        body += [f'<rect class="bar {name}" x="{x}" y="68" width="11" height="11"/>', text(x + 17, 78, words, "small")]
        x += 40 + 6 * len(words)
    y = TOP_EDGE
    for point, words in POINTS:
        body.append(text(LEFT - 12, y + len(BARS) * BAR / 2 + 5, words, "end"))
        for cache, _, name in BARS:
            value = ms[point, cache]
            label = f"{value:.1f}"
            if cache == "bf16":
                label += f"  ({value / ms[point, 'int2']:.1f} times)"
            body += [f'<rect class="bar {name}" x="{LEFT}" y="{y + 2}" width="{value * scale:.1f}" height="{BAR - 3}"/>',
                     text(LEFT + value * scale + 6, y + BAR - 3, label, "small",
                          *(("strong",) if cache == "int2" else ()))]
            y += BAR
        y += GAP
    body.append(line("axis", LEFT, TOP_EDGE - 4, LEFT, y - GAP + 4))
    title = "Milliseconds of a decode step over the 2-bit cache and over BF16"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img"><title>{title}</title><style>{style}</style>'
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
            + "\n".join(body) + "</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
